//! The operations a transformer spends its time in, on burn tensors.
//!
//! [`ModelBackend`] is burn's `Backend` plus those operations. Each has a reference written with burn's own tensor
//! operations ([`reference`]), which any backend gets for nothing, and which its fused version is tested against. A fused
//! version overrides the method; under autodiff it registers one node with a hand-written backward pass instead of a
//! chain of small ones.
//!
//! What this module does not do: know any model. Shapes are in the docs; frozen arguments (gains, rotary tables) get no gradient.

pub mod reference;

use std::{ops::Range, sync::Arc};

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, backend::Backend};

/// Which keys a query may attend to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttentionMask {
    /// Every key of the same batch row.
    Full,
    /// Keys of the given range of each batch row (`[b]` ranges): padding is left out.
    Keys(Arc<[Range<u32>]>),
    /// Keys at or before the query, within the given range of each batch row.
    Causal(Arc<[Range<u32>]>),
    /// One batch row cut into consecutive segments that do not see each other: `[0, e1, e2, .., s]` (`cu_seqlens`).
    Segments(Arc<[u32]>),
}

/// A low-rank update `scale * b a` of a linear layer's weight, never composed (arXiv 2106.09685).
#[derive(Clone, Debug)]
pub struct LowRank<B: Backend> {
    /// Down projection, `[r, i]` (`lora_A` of PEFT).
    pub a_ri: Tensor<B, 2>,
    /// Up projection, `[o, r]` (`lora_B` of PEFT).
    pub b_or: Tensor<B, 2>,
    /// `alpha / r`, or `alpha / sqrt(r)`.
    pub scale: f64,
}

/// A backend that the model runs on.
pub trait ModelBackend: Backend {
    /// `x * rsqrt(mean(x^2, last) + eps) * gain` (arXiv 1910.07467). `x_nd`, `gain_d` frozen; returns `[n, d]`.
    fn rms_norm(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        reference::rms_norm(x_nd, gain_d, eps)
    }

    /// `silu(gate) * up` (arXiv 2002.05202). Both `[n, f]`.
    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        reference::swiglu(gate_nf, up_nf)
    }

    /// Rotary embedding in the rotate-half convention: `x * cos + rotate_half(x) * sin`, with `rotate_half([a | b]) = [-b | a]`.
    /// `x_bshk`; tables `[b, s, k]` (or `[1, s, k]`, shared by the batch), frozen.
    fn rotary(
        x_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        reference::rotary(x_bshk, cos_bsk, sin_bsk)
    }

    /// `softmax(q k^T * scale, masked) v` with grouped queries: query head `h` reads key/value head `h / (heads / kv_heads)`.
    /// `q [b, sq, heads, k]`, `k` and `v` `[b, sk, kv_heads, k]`; returns `[b, sq, heads, k]`.
    /// A query with no admissible key (left padding) gets zeros.
    fn attention(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> Tensor<Self, 4> {
        reference::attention(q_bshk, k_bshk, v_bshk, mask, scale)
    }

    /// `x w^T + bias` with a weight in the checkpoint's own layout: `x [n, i]`, `w [o, i]`, `bias [o]`; returns `[n, o]`.
    /// `w` may be bf16 under an f32 `x`; the product is f32. Gradients reach every argument that is tracked.
    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        reference::linear(x_ni, w_oi, bias_o)
    }

    /// [`linear`](Self::linear) plus a low-rank update: `x w^T + bias + scale * (x a^T) b^T`. Returns `[n, o]`.
    /// Gradients reach `x`, `a` and `b`; `w` and `bias` as in `linear`.
    fn lora_linear(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: LowRank<Self>,
    ) -> Tensor<Self, 2> {
        reference::lora_linear(x_ni, w_oi, bias_o, update)
    }

    /// Layer norm without gain or bias, then `* (1 + scale) + shift` with one scale and shift per batch row (AdaLN).
    /// `x [b * s, d]` in batch order, `scale` and `shift` `[b, d]`; returns `[b * s, d]`.
    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        reference::modulated_layer_norm(x_nd, scale_bd, shift_bd, eps)
    }

    /// Layer norm without gain or bias. `[n, d]`.
    fn layer_norm(x_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        reference::layer_norm(x_nd, eps)
    }

    /// GELU by its tanh approximation, as `gelu(approximate="tanh")`.
    fn gelu_tanh(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        reference::gelu_tanh(x_nf)
    }
}

impl ModelBackend for Flex {}
impl<B: ModelBackend> ModelBackend for Autodiff<B> {}

/// Where a forward pass runs: on a plain backend, keeping nothing, or recording for a backward pass on top of one.
///
/// Frozen tensors live on [`Tape::Base`] once and are lifted, without a copy, into whichever tape a block runs on.
pub trait Tape: ModelBackend {
    /// The plain backend underneath.
    type Base: ModelBackend<Device = Self::Device>;

    /// A tensor of the plain backend as a constant of this tape.
    fn lift<const D: usize>(tensor: Tensor<Self::Base, D>) -> Tensor<Self, D>;
}

impl Tape for Flex {
    type Base = Flex;

    fn lift<const D: usize>(tensor: Tensor<Flex, D>) -> Tensor<Flex, D> {
        tensor
    }
}

impl<B: ModelBackend> Tape for Autodiff<B> {
    type Base = B;

    fn lift<const D: usize>(tensor: Tensor<B, D>) -> Tensor<Self, D> {
        Tensor::from_inner(tensor)
    }
}
