//! A transformer block, in the two forms that such a policy has:
//!
//! ```text
//! on hidden states   y = layer_norm(x) gain + bias      attends to all of its sample
//! on actions         y = layer_norm(x) (1 + s) + h      s, h = W c + b, c the time's silu
//!                                                       attends to its own tokens, or to hidden states
//! both               x = x + W_o attention(W_q y, W_k z, W_v z)     z = y, or hidden states
//!                    x = x + W_2 gelu_tanh(W_1 layer_norm(x))
//! ```
//!
//! In training a part of what attention adds is dropped twice, as diffusers' layer and the block around it
//! each do it; of what the MLP adds once, and of what is inside of it once.

use std::sync::Arc;

use burn::tensor::Tensor;
use coxswain_models::{joint::LayerSource, pretrained::error::ModelError};
use coxswain_nn::{
    kernels::{
        AdaNorm, AttentionMask, AttentionOps, Dropout, DropoutRows, ModelBackend, RowOps, Tape,
        dropout::module_word,
    },
    lora::LoraLinear,
    params::{BaseWeight, ParamScope},
    recompute::Layer,
};

/// Of the norms in blocks, and of that before them.
pub(super) const EPS: f64 = 1e-5;

/// What a block attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttentionSource {
    /// The block's own tokens.
    Own,
    /// Hidden states of text.
    Text,
    /// Those of images.
    Images,
}

/// Where a block is in the file, and its sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockShape<'s> {
    pub at: &'s str,
    pub width: usize,
    pub heads: usize,
    /// Width of what keys and values are made of.
    pub source: usize,
    pub attended: AttentionSource,
    /// Whether it is told the time.
    pub timed: bool,
    pub dropout: f64,
}

impl BlockShape<'_> {
    /// Linears, behind the block's path, and their features, `[inputs, outputs]`.
    pub fn linears(&self) -> Vec<(&'static str, [usize; 2])> {
        let Self { width, source, .. } = *self;
        let ada = self.timed.then_some(("norm1.linear", [width, 2 * width]));
        let rest = [
            ("attn1.to_q", [width, width]),
            ("attn1.to_k", [source, width]),
            ("attn1.to_v", [source, width]),
            ("attn1.to_out.0", [width, width]),
            ("ff.net.0.proj", [width, 4 * width]),
            ("ff.net.2", [4 * width, width]),
        ];
        ada.into_iter().chain(rest).collect()
    }
}

/// Gain and bias of a layer norm.
pub(super) struct LayerNorm<B: ModelBackend>([BaseWeight<B, 1>; 2]);

impl<B: ModelBackend> LayerNorm<B> {
    /// Loads the one at this path.
    pub fn load(source: &mut dyn LayerSource<B>, at: &str, width: usize) -> Result<Self, ModelError> {
        let gain = source.gain(&format!("{at}.weight"), width)?;
        Ok(Self([gain, source.gain(&format!("{at}.bias"), width)?]))
    }

    /// Rows, normed.
    pub fn apply<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, x_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        let d = x_nd.dims()[1];
        let [gain, bias] = self.0.each_ref().map(|weight| weight.on_tape(params).reshape([1, d]));
        // One batch row: a scale of one less than the gain.
        T::modulated_layer_norm(x_nd, gain - 1.0, bias, EPS)
    }

    /// Whether it trains.
    pub fn trains(&self) -> bool {
        self.0.iter().any(BaseWeight::trains)
    }
}

/// The norms of a block.
enum Norms<B: ModelBackend> {
    /// Told the time, and one without weights.
    Timed(LoraLinear<B>),
    /// Both with weights.
    Own([LayerNorm<B>; 2]),
}

/// A block's weights.
pub(super) struct Block<B: ModelBackend> {
    attended: AttentionSource,
    heads: usize,
    norms: Norms<B>,
    query: LoraLinear<B>,
    key: LoraLinear<B>,
    value: LoraLinear<B>,
    output: LoraLinear<B>,
    mlp_in: LoraLinear<B>,
    mlp_out: LoraLinear<B>,
    dropout: f64,
    /// Of what attention adds, twice; of the MLP's inside, and of what it adds.
    words: [u64; 4],
}

/// What blocks share of a micro-batch.
pub(super) struct BlockRows<B: ModelBackend> {
    pub batch: usize,
    /// Which hidden states are a sample's, which of them of its text, and which of its images.
    pub whole: AttentionMask,
    pub text: AttentionMask,
    pub images: AttentionMask,
    /// As adapters drop of them: hidden states, and the times.
    pub dropout: Option<[DropoutRows<B>; 2]>,
}

impl<B: ModelBackend> Block<B> {
    /// Loads one.
    pub fn load(source: &mut dyn LayerSource<B>, shape: BlockShape<'_>) -> Result<Self, ModelError> {
        let BlockShape { at, width, .. } = shape;
        let norms = if shape.timed {
            Norms::Timed(source.linear(&format!("{at}.norm1.linear"), [width, 2 * width], true)?)
        } else {
            let mut norm = |name: &str| LayerNorm::load(source, &format!("{at}.{name}"), width);
            Norms::Own([norm("norm1")?, norm("norm3")?])
        };
        let mut linears = shape.linears().into_iter().skip(usize::from(shape.timed));
        let mut next = || {
            let (name, features) = linears.next().expect("there are six beside the norm's");
            source.linear(&format!("{at}.{name}"), features, true)
        };
        Ok(Self {
            attended: shape.attended,
            heads: shape.heads,
            norms,
            query: next()?,
            key: next()?,
            value: next()?,
            output: next()?,
            mlp_in: next()?,
            mlp_out: next()?,
            dropout: shape.dropout,
            words: ["attention", "around", "inside", "mlp"].map(|part| module_word(&format!("{at}.{part}"))),
        })
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        let Self { query, key, value, output, mlp_in, mlp_out, .. } = self;
        let norms = match &self.norms {
            Norms::Timed(linear) => linear.trains(),
            Norms::Own(norms) => norms.iter().any(LayerNorm::trains),
        };
        norms || [query, key, value, output, mlp_in, mlp_out].into_iter().any(LoraLinear::trains)
    }

    /// Whether it reads hidden states.
    pub fn is_cross(&self) -> bool {
        self.attended != AttentionSource::Own
    }
}

/// Keys and values, `[n, d]` each.
pub(super) type KeysValues<T> = [Tensor<T, 2>; 2];

impl<B: Tape<Base = B>> Block<B> {
    /// Keys and values of hidden states, `[b * s, source]`.
    pub fn project<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        rows: &BlockRows<B>,
        hidden_nd: &Tensor<T, 2>,
    ) -> KeysValues<T> {
        params
            .reading(rows.dropout.as_ref().map(|[hidden, _]| hidden), || self.keys_values(params, hidden_nd))
    }

    fn keys_values<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        z_nd: &Tensor<T, 2>,
    ) -> KeysValues<T> {
        [&self.key, &self.value].map(|linear| linear.forward(params, z_nd.clone()))
    }

    /// The attention half of tokens `[b * t, d]`, at times `[b, d]`; of a block that reads hidden states,
    /// given keys and values of them.
    pub fn attend<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        rows: &BlockRows<B>,
        x_nd: Tensor<T, 2>,
        time_bd: Option<&Tensor<T, 2>>,
        projected: Option<KeysValues<T>>,
    ) -> Tensor<T, 2> {
        let y_nd = match (&self.norms, time_bd) {
            (Norms::Own([norm, _]), _) => norm.apply(params, x_nd.clone()),
            (Norms::Timed(linear), Some(time_bd)) => {
                let of_times = rows.dropout.as_ref().map(|[_, times]| times);
                let told = params.reading(of_times, || linear.forward(params, time_bd.clone()));
                T::ada_layer_norm(x_nd.clone(), told, AdaNorm { shift_first: false, eps: EPS })
            }
            (Norms::Timed(_), None) => unreachable!("blocks on actions are told the time"),
        };
        let [k_nd, v_nd] = projected.unwrap_or_else(|| self.keys_values(params, &y_nd));
        let q_nd = self.query.forward(params, y_nd);
        let mask = match (self.attended, &self.norms) {
            (AttentionSource::Own, Norms::Timed(_)) => &AttentionMask::Full,
            (AttentionSource::Own, Norms::Own(_)) => &rows.whole,
            (AttentionSource::Text, _) => &rows.text,
            (AttentionSource::Images, _) => &rows.images,
        };
        let [n, d] = q_nd.dims();
        let by_head = |x_nd: Tensor<T, 2>| {
            let tokens = x_nd.dims()[0] / rows.batch.max(1);
            x_nd.reshape([rows.batch, tokens, self.heads, d / self.heads])
        };
        let scale = ((d / self.heads) as f64).powf(-0.5);
        let [q, k, v] = [q_nd, k_nd, v_nd].map(by_head);
        let mixed_nd = <T as AttentionOps>::attention(q, k, v, mask, scale).reshape([n, d]);
        self.added(params, [0, 1], &self.output, [x_nd, mixed_nd])
    }

    /// The MLP half.
    pub fn mlp<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, x_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        let y_nd = match &self.norms {
            Norms::Own([_, norm]) => norm.apply(params, x_nd.clone()),
            Norms::Timed(_) => <T as RowOps>::layer_norm(x_nd.clone(), EPS),
        };
        let inner_nf = T::gelu_tanh(self.mlp_in.forward(params, y_nd));
        let inner_nf = self.dropped(params, 2, inner_nf);
        self.added(params, [3, 3], &self.mlp_out, [x_nd, inner_nf])
    }

    /// `x` plus a half's last layer, some of which is dropped, by these words.
    fn added<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        words: [usize; 2],
        last: &LoraLinear<B>,
        [x_nd, inner_nf]: [Tensor<T, 2>; 2],
    ) -> Tensor<T, 2> {
        if self.dropout == 0.0 || params.dropout_rows().is_none() {
            return last.forward_residual(params, x_nd, inner_nf);
        }
        let mut y_nd = self.dropped(params, words[0], last.forward(params, inner_nf));
        if words[1] != words[0] {
            y_nd = self.dropped(params, words[1], y_nd);
        }
        params.residual(x_nd, y_nd)
    }

    fn dropped<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        word: usize,
        x_nd: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        match params.dropout_rows().filter(|_| self.dropout > 0.0) {
            None => x_nd,
            Some(rows) if B::VALUES => {
                Dropout { rows, module: self.words[word], rate: self.dropout }.apply(x_nd)
            }
            // What is dropped is not drawn where there are sizes alone.
            Some(_) => x_nd.clone() * x_nd.zeros_like(),
        }
    }
}

/// A block in its micro-batch. On actions its side inputs are the times and the hidden states.
pub(super) struct HeadLayer<'a, B: ModelBackend> {
    pub block: &'a Block<B>,
    pub rows: Arc<BlockRows<B>>,
    /// Whether anything in it trains, or below its side inputs.
    pub trains: bool,
}

impl<B: Tape<Base = B>> Layer<B> for HeadLayer<'_, B> {
    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        let projected = match inputs.get(2) {
            Some(hidden_nd) if self.block.is_cross() => {
                Some(self.block.project(params, &self.rows, hidden_nd))
            }
            _ => None,
        };
        self.block.attend(params, &self.rows, inputs[0].clone(), inputs.get(1), projected)
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
