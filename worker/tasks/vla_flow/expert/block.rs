//! One DiT block of the action expert (arXiv 2212.09748), in the form of GR00T and starVLA:
//!
//! ```text
//! scale, shift = chunk(W_ada cond + b_ada)              cond = silu(time embedding), one row per draw
//! y = layer_norm(x) * (1 + scale) + shift               eps 1e-5, no gain, no bias
//! x = x + W_o attention(W_q y, W_k c, W_v c) + b_o      c = hidden states in even blocks, y in odd ones
//! x = x + W_2 gelu_tanh(W_1 layer_norm(x))              4 x as wide, with biases
//! ```
//!
//! Cross-attention reads `R` draws of one sample as one longer query sequence, `[b, r * t]`, so keys and
//! values of the hidden states are computed once per sample whatever `R` is; self-attention keeps the draws
//! apart, `[b * r, t]`. Both are views of the same rows.
//!
//! With dropout, some of what each half adds to `x` is dropped in training: the rows are a draw's tokens, the
//! module is `expert.blocks.N.attn` or `.mlp`.
//!
//! A layerwise expert has cross-attention alone. The source of keys and values is then `c = W_p
//! (layer_norm(h) * gain + bias) + b_p` of the block's own layer `h` of the language model.
//!
//! Keys have no bias: a constant added to every key moves all scores of a query alike, which the softmax
//! takes out again. Its gradient is rounding noise, which AdamW would scale up to full steps.
//!
//! Initial values: Xavier's bound, and zero for `W_ada`, so that a block starts as a plain pre-norm
//! transformer block.

use std::sync::Arc;

use burn::tensor::Tensor;

use coxswain_nn::{
    dense::{Dense, DenseShape},
    kernels::{
        AdaNorm, AttentionMask, AttentionOps, Dropout, ModelBackend, RowOps, Tape, dropout::module_word,
    },
    params::ParamScope,
    recompute::Layer,
};

use super::{ExpertShape, features::FeatureNorm, registrar::Registrar};

/// Epsilon of the layer norms inside blocks.
const EPS: f64 = 1e-5;

/// A block's parameters.
#[derive(Clone, Debug)]
pub(super) struct DitBlock {
    cross: bool,
    /// Norm and projection of the hidden states that this block alone reads.
    source: Option<(FeatureNorm, Dense)>,
    width: usize,
    heads: usize,
    ada: Dense,
    query: Dense,
    key: Dense,
    value: Dense,
    output: Dense,
    mlp_in: Dense,
    mlp_out: Dense,
    /// Rate of dropout on what attention and the MLP add.
    dropout: f64,
    words: [u64; 2],
}

/// How rows are arranged in one micro-batch.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    /// Samples.
    pub batch: usize,
    /// Draws per sample.
    pub repeats: usize,
    /// Tokens per draw.
    pub tokens: usize,
    /// Which hidden states count.
    pub mask: AttentionMask,
}

/// What the queries of a block attend to.
pub(super) enum KeyValueSource<'a, T: Tape> {
    /// Hidden states, still to be projected.
    Hidden(&'a Tensor<T, 2>),
    /// Keys and values projected before, `[n, d]`.
    Projected(&'a KeysValues<T>),
}

/// Keys and values, `[n, d]` each.
#[derive(Clone)]
pub(super) struct KeysValues<T: Tape> {
    keys_nd: Tensor<T, 2>,
    values_nd: Tensor<T, 2>,
}

impl DitBlock {
    /// Registers block `index`; even ones cross-attend, of a layerwise expert all.
    pub fn register(registrar: &mut Registrar<'_>, shape: &ExpertShape, index: usize) -> Self {
        let (width, layerwise) = (shape.width, shape.form.layerwise);
        let cross = layerwise || index.is_multiple_of(2);
        let own = layerwise.then(|| {
            let norm = FeatureNorm::register(registrar, &format!("blocks.{index}.features"), shape.context);
            let projection = DenseShape::xavier(shape.context, width);
            (norm, registrar.dense(&format!("blocks.{index}.project"), projection))
        });
        let source = if cross && !layerwise { shape.context } else { width };
        let mut dense =
            |name: &str, shape: DenseShape| registrar.dense(&format!("blocks.{index}.{name}"), shape);
        Self {
            cross,
            source: own,
            width,
            heads: shape.heads,
            ada: dense("ada", DenseShape::zeros(width, 2 * width)),
            query: dense("attn.q", DenseShape::xavier(width, width)),
            key: dense("attn.k", DenseShape::xavier(source, width).without_bias()),
            value: dense("attn.v", DenseShape::xavier(source, width)),
            output: dense("attn.o", DenseShape::xavier(width, width)),
            mlp_in: dense("mlp.in", DenseShape::xavier(width, 4 * width)),
            mlp_out: dense("mlp.out", DenseShape::xavier(4 * width, width)),
            dropout: shape.form.dropout,
            words: ["attn", "mlp"].map(|half| module_word(&format!("expert.blocks.{index}.{half}"))),
        }
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        let Self { ada, query, key, value, output, mlp_in, mlp_out, source, .. } = self;
        let own = source.as_ref().is_some_and(|(norm, linear)| norm.trains() || linear.trains());
        own || [ada, query, key, value, output, mlp_in, mlp_out].into_iter().any(Dense::trains)
    }

    /// Whether the block reads the hidden states.
    pub fn is_cross(&self) -> bool {
        self.cross
    }

    /// Keys and values of `source_nd`: the hidden states, or the block's own normalised input.
    pub fn project<T: Tape>(&self, params: &ParamScope<'_, T>, source_nd: &Tensor<T, 2>) -> KeysValues<T> {
        let source_nd = match &self.source {
            Some((norm, linear)) => linear.apply(params, norm.apply(params, source_nd.clone())),
            None => source_nd.clone(),
        };
        KeysValues {
            keys_nd: self.key.apply(params, source_nd.clone()),
            values_nd: self.value.apply(params, source_nd),
        }
    }

    /// The attention half. `x_nd` `[b * r * t, d]`, `cond_md` `[b * r, d]`.
    pub fn attend<T: Tape>(
        &self,
        params: &ParamScope<'_, T>,
        rows: &Rows,
        x_nd: Tensor<T, 2>,
        cond_md: &Tensor<T, 2>,
        attended: KeyValueSource<'_, T>,
    ) -> Tensor<T, 2> {
        let ada_md = self.ada.apply(params, cond_md.clone());
        let y_nd = T::ada_layer_norm(x_nd.clone(), ada_md, AdaNorm { shift_first: false, eps: EPS });
        let KeysValues { keys_nd, values_nd } = match (self.cross, attended) {
            (true, KeyValueSource::Hidden(hidden_nd)) => self.project(params, hidden_nd),
            (true, KeyValueSource::Projected(projected)) => projected.clone(),
            (false, _) => self.project(params, &y_nd),
        };
        let q_nd = self.query.apply(params, y_nd);
        let (sequences, mask) = match self.cross {
            true => (rows.batch, rows.mask.clone()),
            false => (rows.batch * rows.repeats, AttentionMask::Full),
        };
        let head_dim = self.width / self.heads;
        let by_head = |x_nd: Tensor<T, 2>| {
            let length = x_nd.dims()[0] / sequences;
            x_nd.reshape([sequences, length, self.heads, head_dim])
        };
        let scale = 1.0 / (head_dim as f64).sqrt();
        let mixed =
            <T as AttentionOps>::attention(by_head(q_nd), by_head(keys_nd), by_head(values_nd), &mask, scale);
        let mixed_nd = mixed.reshape([rows.batch * rows.repeats * rows.tokens, self.width]);
        self.added(params, 0, [x_nd, mixed_nd])
    }

    /// The MLP half.
    pub fn mlp<T: Tape>(&self, params: &ParamScope<'_, T>, x_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        let inner_nf = self.mlp_in.apply(params, <T as RowOps>::layer_norm(x_nd.clone(), EPS));
        self.added(params, 1, [x_nd, T::gelu_tanh(inner_nf)])
    }

    /// `x` plus the last layer of the first or the second half, of which training may drop some.
    fn added<T: Tape>(
        &self,
        params: &ParamScope<'_, T>,
        half: usize,
        [x_nd, inner_nf]: [Tensor<T, 2>; 2],
    ) -> Tensor<T, 2> {
        let last = [&self.output, &self.mlp_out][half];
        let Some(rows) = params.dropout_rows().filter(|_| self.dropout > 0.0) else {
            return last.apply_residual(params, x_nd, inner_nf);
        };
        let y_nd = last.apply(params, inner_nf);
        let left_nd = match <T::Base as ModelBackend>::VALUES {
            true => Dropout { rows, module: self.words[half], rate: self.dropout }.apply(y_nd),
            // What is dropped is not drawn where there are sizes alone.
            false => y_nd.clone() * y_nd.zeros_like(),
        };
        params.residual(x_nd, left_nd)
    }
}

/// A block in its micro-batch, as a layer of a tower whose side inputs are `cond_md` and the hidden states.
pub(super) struct DitLayer<'a> {
    pub block: &'a DitBlock,
    pub rows: Arc<Rows>,
    /// Whether anything in the block trains, or below its side inputs.
    pub trains: bool,
}

impl<B: Tape<Base = B>> Layer<B> for DitLayer<'_> {
    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        let [x_nd, cond_md, hidden_nd] = inputs else {
            unreachable!("the expert's tower has two side inputs")
        };
        self.block.attend(params, &self.rows, x_nd.clone(), cond_md, KeyValueSource::Hidden(hidden_nd))
    }

    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        self.block.mlp(params, inputs[0].clone())
    }

    fn trains(&self) -> bool {
        self.trains
    }
}
