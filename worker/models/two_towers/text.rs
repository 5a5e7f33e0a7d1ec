//! The language model: decoder layers with grouped queries, rotary positions on three axes, and a gated MLP;
//! queries and keys normed head by head where the configuration has it so.
//!
//! Everything runs on flattened tokens, `[n, d]` with `n = b * s`; batch and length live in the context. Not
//! here: the embedding table and the head (`embed`). Layers that keep keys and values are in `following`.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::{
    gated_mlp::{GatedMlp, normed},
    rope::RotaryTables,
    sizes::TextSizes,
};
use crate::pretrained::{
    error::ModelError,
    loader::{LinearShape, Loader},
    prompts::Rows,
    stack::{Assemble, Manifest, Parts, Stack},
};
use coxswain_nn::{
    block::Block,
    kernels::{AttentionMask, JoinedHeads, ModelBackend, RopeMask, Tape},
    lora::{GroupOutputs, LinearGroup, LoraLinear},
    params::{BaseWeight, Keep, ParamScope},
};

/// What all decoder layers share within one micro-batch.
#[derive(Clone)]
pub struct TextContext<B: ModelBackend> {
    /// Rows; 1 where they lie side by side.
    pub batch: usize,
    /// Padded length, or that of all rows.
    pub seq: usize,
    /// Rotary tables, `[b, s, k]`.
    pub tables: RotaryTables<B>,
    /// Causal, within each row.
    pub mask: AttentionMask,
}

/// The decoder stack.
pub struct TextModel<B: ModelBackend> {
    /// Sizes.
    pub config: TextSizes,
    /// Decoder layers, first to last.
    pub layers: Stack<B, DecoderLayer<B>>,
    norm_d: BaseWeight<B, 1>,
    device: B::Device,
}

impl<B: ModelBackend> TextModel<B> {
    /// Loads layers and final norm below `model.language_model`.
    pub fn load(loader: &mut Loader<'_, B>, config: &TextSizes) -> Result<Self, ModelError> {
        let layers = Stack::load(loader, config, config.num_layers)?;
        let norm_d = loader.gain("model.language_model.norm.weight", config.hidden_size)?;
        Ok(Self { config: config.clone(), layers, norm_d, device: loader.device.clone() })
    }

    /// Where the weights are.
    pub fn device(&self) -> &B::Device {
        &self.device
    }

    /// Tables and mask for positions `[3, b, s]` of rows that lie so.
    pub fn context(&self, position_ids: &[u32], rows: Rows<'_>) -> TextContext<B> {
        let [batch, seq] = rows.axes(position_ids.len() / 3);
        let tables = RotaryTables::text(&self.config, position_ids, batch, &self.device);
        let mask = match rows {
            Rows::Padded(valid) => AttentionMask::Causal(Arc::from(valid)),
            Rows::SideBySide(ends) => AttentionMask::CausalSegments(Arc::from(ends)),
        };
        TextContext { batch, seq, tables, mask }
    }

    /// The norm after the last layer.
    pub fn final_norm<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        T::rms_norm(x_nd, self.norm_d.on_tape(params), self.config.rms_norm_eps)
    }

    /// Whether the gain of that norm trains.
    pub fn final_norm_trains(&self) -> bool {
        self.norm_d.trains()
    }
}

/// One decoder layer.
pub struct DecoderLayer<B: ModelBackend> {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) eps: f64,
    pub(super) attention_norm_d: BaseWeight<B, 1>,
    pub(super) qkv: LinearGroup<B, 3>,
    pub(super) o: LoraLinear<B>,
    /// Norms of queries and of keys, `[k]` each.
    head_norms: Option<[BaseWeight<B, 1>; 2]>,
    mlp_norm_d: BaseWeight<B, 1>,
    mlp: GatedMlp<B>,
}

impl<B: ModelBackend> Assemble<B> for DecoderLayer<B> {
    type Sizes = TextSizes;

    fn manifest(config: &TextSizes, index: usize) -> Manifest {
        let at = format!("model.language_model.layers.{index}");
        let (d, bias) = (config.hidden_size, config.qkv_bias);
        let [q, kv] = [config.num_heads, config.num_kv_heads].map(|heads| heads * config.head_dim);
        let attention = [
            LinearShape::new(&at, "self_attn.q_proj", [d, q], bias),
            LinearShape::new(&at, "self_attn.k_proj", [d, kv], bias),
            LinearShape::new(&at, "self_attn.v_proj", [d, kv], bias),
            LinearShape::new(&at, "self_attn.o_proj", [q, d], false),
        ];
        let mlp = LinearShape::gated_mlp(&at, [d, config.intermediate_size], false);
        let norm = |(norm, len): (&str, usize)| (format!("{at}.{norm}.weight"), len);
        let heads = [("self_attn.q_norm", config.head_dim), ("self_attn.k_norm", config.head_dim)];
        let norms = [("input_layernorm", d), ("post_attention_layernorm", d)];
        Manifest {
            norms: norms
                .into_iter()
                .chain(heads.into_iter().filter(|_| config.head_norms))
                .map(norm)
                .collect(),
            linears: attention.into_iter().chain(mlp).collect(),
            groups: vec![0..3, 4..6],
        }
    }

    fn assemble(config: &TextSizes, _index: usize, parts: Parts<B>) -> Self {
        let Parts { mut norms, mut linears } = parts;
        let [attention_norm_d, mlp_norm_d] = [norms.take(), norms.take()];
        Self {
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            attention_norm_d,
            qkv: linears.take_group(),
            o: linears.take(),
            head_norms: config.head_norms.then(|| [norms.take(), norms.take()]),
            mlp_norm_d,
            mlp: GatedMlp::assemble(&mut linears),
        }
    }
}

impl<B: ModelBackend> DecoderLayer<B> {
    /// The norm of either half, for layers that round it or do not.
    fn normed<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: &Tensor<T, 2>,
        gain_d: &BaseWeight<B, 1>,
        rounded: Option<DType>,
    ) -> Tensor<T, 2> {
        normed(x_nd, gain_d.on_tape(params), self.eps, rounded)
    }

    /// Queries, keys and values, the first two normed head by head if this layer has such norms.
    pub(super) fn heads_normed<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        [q_bshk, k_bshk, v_bshk]: [Tensor<T, 4>; 3],
    ) -> [Tensor<T, 4>; 3] {
        let Some([q_norm_k, k_norm_k]) = &self.head_norms else { return [q_bshk, k_bshk, v_bshk] };
        let normed = |x_bshk: Tensor<T, 4>, gain_k: &BaseWeight<B, 1>| {
            let shape @ [b, s, heads, k] = x_bshk.dims();
            let x_rk = x_bshk.reshape([b * s * heads, k]);
            T::rms_norm(x_rk, gain_k.on_tape(params), self.eps).reshape(shape)
        };
        [normed(q_bshk, q_norm_k), normed(k_bshk, k_norm_k), v_bshk]
    }
}

impl<B: ModelBackend> Block<B> for DecoderLayer<B> {
    type Context = TextContext<B>;

    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        context: &TextContext<B>,
    ) -> Tensor<T, 2> {
        let (b, s, k) = (context.batch, context.seq, self.head_dim);
        let y_nd = self.normed(params, &x_nd, &self.attention_norm_d, self.qkv.rounds_input());
        let (tables_bsk, scale) = (context.tables.lifted(), (k as f64).powf(-0.5));
        let heads_bshk = match self.qkv.forward(params, [Keep::Output; 3], y_nd, false) {
            GroupOutputs::Apart([q_nd, k_nd, v_nd]) => {
                let inputs_bshk = [(q_nd, self.heads), (k_nd, self.kv_heads), (v_nd, self.kv_heads)]
                    .map(|(x_nd, heads)| x_nd.reshape([b, s, heads, k]));
                let inputs_bshk = self.heads_normed(params, inputs_bshk);
                T::rope_attention(inputs_bshk, tables_bsk, &context.mask, scale)
            }
            GroupOutputs::Joined(qkv_no) => {
                let heads = [self.heads, self.kv_heads, self.kv_heads];
                let joined = JoinedHeads { qkv_no, rows: [b, s], heads };
                if self.head_norms.is_some() {
                    let inputs_bshk = self.heads_normed(params, joined.parts());
                    T::rope_attention(inputs_bshk, tables_bsk, &context.mask, scale)
                } else {
                    let to = self.qkv.rounds_input();
                    let attending = RopeMask { tables_bsk, mask: &context.mask, scale, to };
                    T::rope_attention_joined(joined, attending)
                }
            }
        };
        let heads_nd = heads_bshk.reshape([b * s, self.heads * k]);
        self.o.forward_residual(params, x_nd, heads_nd)
    }

    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        _context: &TextContext<B>,
    ) -> Tensor<T, 2> {
        let y_nd = self.normed(params, &x_nd, &self.mlp_norm_d, self.mlp.rounds_input());
        self.mlp.forward_residual(params, x_nd, y_nd)
    }

    fn trains(&self) -> bool {
        self.qkv.trains()
            || self.o.trains()
            || self.mlp.trains()
            || [&self.attention_norm_d, &self.mlp_norm_d].into_iter().any(BaseWeight::trains)
            || self.head_norms.iter().flatten().any(BaseWeight::trains)
    }
}
