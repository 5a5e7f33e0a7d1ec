//! Attention, and the rotary embedding of what attends.

use burn::tensor::{DType, Tensor, backend::Backend};

use super::{
    backward,
    operands::{AttentionMask, AttentionOutput, AttentionSaved, JoinedHeads, RopeMask},
    precision, reference,
};

/// Whether a GPU that has the instructions attends with such heads in one kernel: under weights of bfloat16;
/// widths are multiples of 16 up to 128, and of 32 up to 256, where the gradients of keys and values are made
/// in two halves.
pub(super) fn may_fuse(dim: usize) -> bool {
    let in_whole = (1..=128).contains(&dim) && dim.is_multiple_of(16);
    precision::may_halve() && (in_whole || (1..=256).contains(&dim) && dim.is_multiple_of(32))
}

/// How a backend attends.
pub trait AttentionOps: Backend {
    /// Rotary embedding in the rotate-half convention: `x * cos + rotate_half(x) * sin`, with
    /// `rotate_half([a | b]) = [-b | a]`. `x_bshk`; tables `[b, s, k]` (or `[1, s, k]`, shared by the batch),
    /// frozen.
    fn rotary(
        x_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        reference::rotary(x_bshk, cos_bsk, sin_bsk)
    }

    /// The gradient of `x` under [`rotary`](Self::rotary).
    fn rotary_backward(
        dy_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        backward::rotary(dy_bshk, cos_bsk, sin_bsk)
    }

    /// `softmax(q k^T * scale, masked) v` with grouped queries: query head `h` reads key/value head `h /
    /// (heads / kv_heads)`. `q [b, sq, heads, k]`, `k` and `v` `[b, sk, kv_heads, k]`; returns `[b, sq,
    /// heads, k]`. A query with no admissible key (left padding) gets zeros.
    fn attention(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> Tensor<Self, 4> {
        Self::attention_saving(q_bshk, k_bshk, v_bshk, mask, scale).out_bshk
    }

    /// [`attention`](Self::attention) of queries and keys under [`rotary`](Self::rotary), by tables of
    /// cosines and sines. Queries, keys, values.
    fn rope_attention(
        inputs_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
        mask: &AttentionMask,
        scale: f64,
    ) -> Tensor<Self, 4> {
        let [q_bshk, k_bshk, v_bshk] = Self::rope(inputs_bshk, tables_bsk);
        <Self as AttentionOps>::attention(q_bshk, k_bshk, v_bshk, mask, scale)
    }

    /// What [`rope_attention`](Self::rope_attention) attends with.
    fn rope(inputs_bshk: [Tensor<Self, 4>; 3], tables_bsk: [Tensor<Self, 3>; 2]) -> [Tensor<Self, 4>; 3] {
        let ([q_bshk, k_bshk, v_bshk], [cos_bsk, sin_bsk]) = (inputs_bshk, tables_bsk);
        let q_bshk = Self::rotary(q_bshk, cos_bsk.clone(), sin_bsk.clone());
        [q_bshk, Self::rotary(k_bshk, cos_bsk, sin_bsk), v_bshk]
    }

    /// The gradients under [`rope`](Self::rope).
    fn rope_backward(
        gradients_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
    ) -> [Tensor<Self, 4>; 3] {
        let ([dq_bshk, dk_bshk, dv_bshk], [cos_bsk, sin_bsk]) = (gradients_bshk, tables_bsk);
        let dq_bshk = Self::rotary_backward(dq_bshk, cos_bsk.clone(), sin_bsk.clone());
        [dq_bshk, Self::rotary_backward(dk_bshk, cos_bsk, sin_bsk), dv_bshk]
    }

    /// [`rope_attention`](Self::rope_attention) of tokens whose queries, keys and values lie side by side in
    /// a row, `[b s, (heads + kv_heads + kv_heads) k]`; gradients lie so, too. With `to`, they are rounded to
    /// that type where that saves a pass, for products that round their inputs.
    fn rope_attention_joined(qkv: JoinedHeads<Self>, attending: RopeMask<'_, Self>) -> Tensor<Self, 4> {
        let RopeMask { tables_bsk, mask, scale, .. } = attending;
        Self::rope_attention(qkv.parts(), tables_bsk, mask, scale)
    }

    /// The gradients under [`rope`](Self::rope) side by side, `[b s, ..]`.
    fn rope_backward_joined(
        gradients_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
        _to: Option<DType>,
    ) -> Tensor<Self, 2> {
        let parts = Self::rope_backward(gradients_bshk, tables_bsk).map(|x_bshk| {
            let [b, s, h, k] = x_bshk.dims();
            x_bshk.reshape([b * s, h * k])
        });
        Tensor::cat(parts.into(), 1)
    }

    /// Inputs of [`attention`](Self::attention) as it reads them: what a pass on a tape keeps, so that its
    /// backward pass need not arrange them again.
    fn attention_inputs(inputs_bshk: [Tensor<Self, 4>; 3], _mask: &AttentionMask) -> [Tensor<Self, 4>; 3] {
        inputs_bshk
    }

    /// Gradients of [`attention`](Self::attention) as those read them that made its inputs.
    fn attention_gradients(gradients_bshk: [Tensor<Self, 4>; 3]) -> [Tensor<Self, 4>; 3] {
        gradients_bshk
    }

    /// [`attention`](Self::attention), and what its backward pass needs besides the inputs.
    fn attention_saving(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> AttentionOutput<Self> {
        let out_bshk = reference::attention(q_bshk, k_bshk, v_bshk, mask, scale);
        AttentionOutput { out_bshk, lse_bsh: None }
    }

    /// The gradients of q, k and v under [`attention`](Self::attention).
    fn attention_backward(
        saved: AttentionSaved<Self>,
        mask: &AttentionMask,
        scale: f64,
        dout_bshk: Tensor<Self, 4>,
    ) -> [Tensor<Self, 4>; 3] {
        backward::attention(saved, mask, scale, dout_bshk)
    }

    /// `softmax(q k^T + added) v` without a scale: queries, keys and values `[b, queries or keys, heads, k]`;
    /// returns `[b, queries, heads, k]`. What is added to the scores is `[b or 1, heads or 1, queries or 1,
    /// keys]` each. One of them may be tracked, `[1, heads, queries, keys]`; of several the first is.
    fn biased_attention(inputs_bshk: [Tensor<Self, 4>; 3], added: &[Tensor<Self, 4>]) -> Tensor<Self, 4> {
        let [q_bhsk, k_bhsk, v_bhsk] = inputs_bshk.map(|x_bshk| x_bshk.swap_dims(1, 2));
        let weights = Self::biased_softmax(q_bhsk.matmul(k_bhsk.swap_dims(2, 3)), added);
        Self::heads_inside(weights.matmul(v_bhsk))
    }

    /// The gradients of queries, keys and values, `[b, s, heads, k]`, under
    /// [`biased_attention`](Self::biased_attention), from these by head, `[b, heads, s, k]`, and weights `w`:
    ///
    /// ```text
    /// dv = w^T dout     dw = dout v^T     dq = ds k     dk = ds^T q
    /// ```
    ///
    /// and, if it `wants_dadded`, that of something added to the scores of all batch rows alike, `[1, heads,
    /// s, s]`.
    fn biased_attention_backward(
        [q_bhsk, k_bhsk, v_bhsk]: [Tensor<Self, 4>; 3],
        weights: Tensor<Self, 4>,
        dout_bshk: Tensor<Self, 4>,
        wants_dadded: bool,
    ) -> ([Tensor<Self, 4>; 3], Option<Tensor<Self, 4>>) {
        let dout_bhsk = dout_bshk.swap_dims(1, 2);
        let dv_bhsk = weights.clone().swap_dims(2, 3).matmul(dout_bhsk.clone());
        let dscores = Self::softmax_backward(weights, dout_bhsk.matmul(v_bhsk.swap_dims(2, 3)));
        let dk_bhsk = dscores.clone().swap_dims(2, 3).matmul(q_bhsk);
        let dadded = wants_dadded.then(|| dscores.clone().sum_dim(0));
        ([dscores.matmul(k_bhsk), dk_bhsk, dv_bhsk].map(Self::heads_inside), dadded)
    }

    /// `softmax(scores + added)` of scores `[b, heads, queries, keys]`.
    fn biased_softmax(scores: Tensor<Self, 4>, added: &[Tensor<Self, 4>]) -> Tensor<Self, 4> {
        reference::biased_softmax(scores, added)
    }

    /// The gradient of scores whose softmax these weights are.
    fn softmax_backward(weights: Tensor<Self, 4>, dweights: Tensor<Self, 4>) -> Tensor<Self, 4> {
        backward::softmax(weights, dweights)
    }

    /// From `[b, heads, s, k]` to `[b, s, heads, k]`, as it is read next: row by row.
    fn heads_inside(x_bhsk: Tensor<Self, 4>) -> Tensor<Self, 4> {
        x_bhsk.swap_dims(1, 2)
    }
}
