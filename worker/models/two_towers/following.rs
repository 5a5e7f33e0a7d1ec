//! A decoder layer run for tokens that follow others, whose keys and values were kept: generation.
//!
//! The layer's arithmetic is that of training; only what attention reads is longer than what runs.

use burn::tensor::Tensor;

use super::text::{DecoderLayer, TextContext};
use coxswain_nn::{
    block::Block,
    kernels::{AttentionOps, Tape},
    lora::forward_all,
    params::{Keep, ParamScope},
};

/// Keys, under the rotary embedding, and values of one layer: of all tokens so far.
pub struct KeptTokens<B: Tape<Base = B>>(Option<[Tensor<B, 4>; 2]>);

impl<B: Tape<Base = B>> Default for KeptTokens<B> {
    fn default() -> Self {
        Self(None)
    }
}

impl<B: Tape<Base = B>> KeptTokens<B> {
    /// Keys and values of all tokens, these ones included; `[b, s, kv_heads, k]`.
    fn with(&mut self, new_bshk: [Tensor<B, 4>; 2]) -> [Tensor<B, 4>; 2] {
        let all = match self.0.take() {
            None => new_bshk,
            Some([k_bshk, v_bshk]) => {
                let [new_k_bshk, new_v_bshk] = new_bshk;
                [Tensor::cat(vec![k_bshk, new_k_bshk], 1), Tensor::cat(vec![v_bshk, new_v_bshk], 1)]
            }
        };
        self.0 = Some(all.clone());
        all
    }
}

impl<B: Tape<Base = B>> DecoderLayer<B> {
    /// The layer's output for new tokens `[b * s, d]`, which attend to those kept and to each other as the
    /// context's mask says, over the keys of all. Theirs are kept as well.
    pub fn following(
        &self,
        params: &ParamScope<'_, B>,
        x_nd: Tensor<B, 2>,
        context: &TextContext<B>,
        kept: &mut KeptTokens<B>,
    ) -> Tensor<B, 2> {
        let (b, s, k) = (context.batch, context.seq, self.head_dim);
        let y_nd = B::rms_norm(x_nd.clone(), self.attention_norm_d.on_tape(params), self.eps);
        let [q_nd, k_nd, v_nd] =
            forward_all(params, self.qkv.each().each_ref().map(|layer| (layer, Keep::Output)), y_nd);
        let inputs_bshk = [(q_nd, self.heads), (k_nd, self.kv_heads), (v_nd, self.kv_heads)]
            .map(|(x_nd, heads)| x_nd.reshape([b, s, heads, k]));
        let inputs_bshk = self.heads_normed(params, inputs_bshk);
        let [q_bshk, k_bshk, v_bshk] = B::rope(inputs_bshk, context.tables.lifted());
        let [k_bshk, v_bshk] = kept.with([k_bshk, v_bshk]);
        let scale = (k as f64).powf(-0.5);
        let heads_bshk = <B as AttentionOps>::attention(q_bshk, k_bshk, v_bshk, &context.mask, scale);
        let heads_nd = heads_bshk.reshape([b * s, self.heads * k]);
        let h_nd = self.o.forward_residual(params, x_nd, heads_nd);
        self.mlp_half(params, h_nd, context)
    }
}
