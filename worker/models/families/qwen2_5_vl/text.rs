//! The language model: decoder layers with grouped queries, rotary positions on three axes, and a gated MLP.
//!
//! Everything runs on flattened tokens, `[n, d]` with `n = b * s`; batch and length live in the context. Not
//! here: the embedding table and the head (`embed`). Layers that keep keys and values are in `following`.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::{
    config::TextConfig,
    mlp::{GatedMlp, normed},
    rope::RotaryTables,
};
use crate::pretrained::{
    error::ModelError,
    loader::{LinearShape, Loader},
    prompts::Rows,
    stack::{Assemble, Manifest, Parts, Stack},
};
use coxswain_nn::{
    block::Block,
    kernels::{Attending, AttentionMask, JoinedHeads, ModelBackend, Tape},
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
    pub config: TextConfig,
    /// Decoder layers, first to last.
    pub layers: Stack<B, DecoderLayer<B>>,
    norm_d: BaseWeight<B, 1>,
    device: B::Device,
}

impl<B: ModelBackend> TextModel<B> {
    /// Loads layers and final norm below `model.language_model`.
    pub fn load(loader: &mut Loader<'_, B>, config: &TextConfig) -> Result<Self, ModelError> {
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
    mlp_norm_d: BaseWeight<B, 1>,
    mlp: GatedMlp<B>,
}

impl<B: ModelBackend> Assemble<B> for DecoderLayer<B> {
    type Sizes = TextConfig;

    fn manifest(config: &TextConfig, index: usize) -> Manifest {
        let at = format!("model.language_model.layers.{index}");
        let (d, kv) = (config.hidden_size, config.num_kv_heads * config.head_dim);
        let attention = [
            LinearShape::new(&at, "self_attn.q_proj", [d, d], true),
            LinearShape::new(&at, "self_attn.k_proj", [d, kv], true),
            LinearShape::new(&at, "self_attn.v_proj", [d, kv], true),
            LinearShape::new(&at, "self_attn.o_proj", [d, d], false),
        ];
        let mlp = LinearShape::gated_mlp(&at, [d, config.intermediate_size], false);
        Manifest {
            norms: ["input_layernorm", "post_attention_layernorm"].map(|norm| format!("{at}.{norm}.weight")),
            width: d,
            linears: attention.into_iter().chain(mlp).collect(),
            groups: vec![0..3, 4..6],
        }
    }

    fn assemble(config: &TextConfig, _index: usize, parts: Parts<B>) -> Self {
        let Parts { norms: [attention_norm_d, mlp_norm_d], mut linears } = parts;
        Self {
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            attention_norm_d,
            qkv: linears.take_group(),
            o: linears.take(),
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
                T::rope_attention(inputs_bshk, tables_bsk, &context.mask, scale)
            }
            GroupOutputs::Joined(qkv_no) => {
                let heads = [self.heads, self.kv_heads, self.kv_heads];
                let to = self.qkv.rounds_input();
                let attending = Attending { tables_bsk, mask: &context.mask, scale, to };
                T::rope_attention_joined(JoinedHeads { qkv_no, rows: [b, s], heads }, attending)
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
    }
}
