//! The operations on accelerators: any backend of burn's under its fusion, which is what burn's CUDA backend is.
//!
//! Elementwise operations are the references in burn's own operations: fusion compiles each chain of them into one kernel. What it
//! does not fuse is here.
//!
//! | operation | on an accelerator |
//! |---|---|
//! | products with a bfloat16 weight | the other side is rounded to bfloat16, tensor cores add up in float32, the result is widened again; the weight is never copied |
//! | products of float32 alone (LoRA, expert, sensor) | float32 |
//! | attention | [`blocked`](super::blocked): tile by tile, segment by segment, never the whole matrix of scores |
//!
//! Activations, gradients and everything that trains are float32, as `torch.autocast` keeps its master weights; what a product
//! rounds is what PyTorch rounds there. Where activations are held in bfloat16 (`params::held`) they are cast there and back, in the kernel
//! of what fusion joins them with.
//!
//! What this module does not do: name a backend. Nothing is instantiated here; the crate that names one pays for it once.

use burn::tensor::{DType, Tensor, backend::Backend};
use burn_fusion::{Fusion, FusionBackend};

use super::{AttentionMask, AttentionOutput, AttentionSaved, ModelBackend, Tape, blocked, reference};

impl<F: FusionBackend> ModelBackend for Fusion<F> {
    fn attention_saving(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> AttentionOutput<Self> {
        blocked::attention(q_bshk, k_bshk, v_bshk, mask, scale)
    }

    fn attention_backward(
        saved: AttentionSaved<Self>,
        mask: &AttentionMask,
        scale: f64,
        dout_bshk: Tensor<Self, 4>,
    ) -> [Tensor<Self, 4>; 3] {
        blocked::attention_backward(saved, mask, scale, dout_bshk)
    }

    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let dtype = x_ni.dtype();
        let y_no = product(x_ni, w_oi.transpose());
        match bias_o {
            Some(bias_o) => y_no + bias_o.cast(dtype).unsqueeze(),
            None => y_no,
        }
    }

    fn linear_input_gradient(dy_no: Tensor<Self, 2>, w_oi: Tensor<Self, 2>) -> Tensor<Self, 2> {
        product(dy_no, w_oi)
    }
}

/// `x w` in the type of `x`. Where `w` is narrower, `x` is rounded to its type: the weight of a layer is read once and copied never.
fn product<B: Backend>(x_nk: Tensor<B, 2>, w_ko: Tensor<B, 2>) -> Tensor<B, 2> {
    match (x_nk.dtype(), w_ko.dtype()) {
        (wide, narrow @ DType::BF16) if wide != narrow => x_nk.cast(narrow).matmul(w_ko).cast(wide),
        (dtype, _) => x_nk.matmul(reference::same_dtype(w_ko, dtype)),
    }
}

impl<F: FusionBackend> Tape for Fusion<F> {
    type Base = Self;

    fn lift<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }

    fn lower<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }
}
