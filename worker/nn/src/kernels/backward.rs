//! Backward passes of the operations, from burn's own autodiff of the [`reference`]: what a backend without a
//! backward kernel of its own runs, and what those kernels are tested against.
//!
//! An operation that is more than a matrix product is run again under [`Autodiff`], on leaves made for the
//! purpose, and differentiated there. That keeps its inputs only, at the price of a second forward pass.

use burn::{
    backend::Autodiff,
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use super::{AttentionMask, AttentionSaved, LowRankGradients, LowRankSaved, WeightOps, reference};

type Gradients<B> = <Autodiff<B> as AutodiffBackend>::Gradients;

/// See [`RowOps::rms_norm_backward`](super::RowOps::rms_norm_backward).
pub fn rms_norm<B: Backend>(
    x_nd: Tensor<B, 2>,
    gain_d: Tensor<B, 1>,
    dy_nd: Tensor<B, 2>,
    eps: f64,
) -> Tensor<B, 2> {
    let x_nd = leaf(x_nd);
    let y_nd = reference::rms_norm(x_nd.clone(), Tensor::from_inner(gain_d), eps);
    gradient(&x_nd, &pull(y_nd, dy_nd))
}

/// See [`RowOps::swiglu_backward`](super::RowOps::swiglu_backward).
pub fn swiglu<B: Backend>(
    gate_nf: Tensor<B, 2>,
    up_nf: Tensor<B, 2>,
    dy_nf: Tensor<B, 2>,
) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let (gate_nf, up_nf) = (leaf(gate_nf), leaf(up_nf));
    let gradients = pull(reference::swiglu(gate_nf.clone(), up_nf.clone()), dy_nf);
    (gradient(&gate_nf, &gradients), gradient(&up_nf, &gradients))
}

/// See [`AttentionOps::rotary_backward`](super::AttentionOps::rotary_backward). The operation is linear: any
/// `x` does.
pub fn rotary<B: Backend>(
    dy_bshk: Tensor<B, 4>,
    cos_bsk: Tensor<B, 3>,
    sin_bsk: Tensor<B, 3>,
) -> Tensor<B, 4> {
    let x_bshk = leaf(dy_bshk.clone());
    let y_bshk = reference::rotary(x_bshk.clone(), Tensor::from_inner(cos_bsk), Tensor::from_inner(sin_bsk));
    gradient(&x_bshk, &pull(y_bshk, dy_bshk))
}

/// See [`AttentionOps::softmax_backward`](super::AttentionOps::softmax_backward): `w (dw - sum(dw w))`.
pub fn softmax<B: Backend>(weights: Tensor<B, 4>, dweights: Tensor<B, 4>) -> Tensor<B, 4> {
    let along = (dweights.clone() * weights.clone()).sum_dim(3);
    (dweights - along) * weights
}

/// See [`AttentionOps::attention_backward`](super::AttentionOps::attention_backward).
pub fn attention<B: Backend>(
    saved: AttentionSaved<B>,
    mask: &AttentionMask,
    scale: f64,
    dout_bshk: Tensor<B, 4>,
) -> [Tensor<B, 4>; 3] {
    let inputs = [leaf(saved.q_bshk), leaf(saved.k_bshk), leaf(saved.v_bshk)];
    let [q_bshk, k_bshk, v_bshk] = inputs.clone();
    let gradients = pull(reference::attention(q_bshk, k_bshk, v_bshk, mask, scale), dout_bshk);
    inputs.map(|input| gradient(&input, &gradients))
}

/// See [`LinearOps::linear_input_gradient`](super::LinearOps::linear_input_gradient).
pub fn linear_input<B: Backend>(dy_no: Tensor<B, 2>, w_oi: Tensor<B, 2>) -> Tensor<B, 2> {
    let dtype = dy_no.dtype();
    dy_no.matmul(reference::same_dtype(w_oi, dtype))
}

/// See [`LinearOps::linear_weight_gradient`](super::LinearOps::linear_weight_gradient).
pub fn linear_weight<B: Backend>(dy_no: Tensor<B, 2>, x_ni: Tensor<B, 2>) -> Tensor<B, 2> {
    dy_no.transpose().matmul(x_ni)
}

/// See [`RowOps::linear_bias_gradient`](super::RowOps::linear_bias_gradient).
pub fn linear_bias<B: Backend>(dy_no: Tensor<B, 2>) -> Tensor<B, 1> {
    dy_no.sum_dim(0).squeeze_dim(0)
}

/// See [`LinearOps::lora_linear_backward`](super::LinearOps::lora_linear_backward).
pub fn lora_linear<B: WeightOps>(
    saved: LowRankSaved<B>,
    dy_no: Tensor<B, 2>,
    wants_dx: bool,
) -> LowRankGradients<B> {
    let dense_ni = wants_dx.then(|| {
        let w_oi = saved.w_oi.clone().into_tensor(&dy_no.device());
        linear_input(dy_no.clone(), w_oi)
    });
    low_rank(saved, dy_no, wants_dx).beside(dense_ni)
}

/// The gradients without the weight: what the update alone adds to the gradient of `x`, and its own
/// gradients.
pub fn low_rank<B: Backend>(
    saved: LowRankSaved<B>,
    dy_no: Tensor<B, 2>,
    wants_dx: bool,
) -> LowRankGradients<B> {
    let LowRankSaved { x_ni, down_nr, update, .. } = saved;
    let dtype = dy_no.dtype();
    let a_ri = reference::same_dtype(update.a_ri.clone(), dtype);
    let b_or = reference::same_dtype(update.b_or.clone(), dtype);
    let ddown_nr = dy_no.clone().matmul(b_or) * update.scale;
    LowRankGradients {
        dx_ni: wants_dx.then(|| update.input(ddown_nr.clone().matmul(a_ri))),
        da_ri: linear_weight(ddown_nr, update.input(x_ni)),
        db_or: linear_weight(dy_no, down_nr),
    }
}

/// See [`RowOps::modulated_layer_norm_backward`](super::RowOps::modulated_layer_norm_backward).
pub fn modulated_layer_norm<B: Backend>(
    x_nd: Tensor<B, 2>,
    scale_bd: Tensor<B, 2>,
    dy_nd: Tensor<B, 2>,
    eps: f64,
) -> [Tensor<B, 2>; 3] {
    let inputs = [leaf(x_nd), leaf(scale_bd.clone()), leaf(scale_bd.zeros_like())];
    let [x_nd, scale_bd, shift_bd] = inputs.clone();
    let gradients = pull(reference::modulated_layer_norm(x_nd, scale_bd, shift_bd, eps), dy_nd);
    inputs.map(|input| gradient(&input, &gradients))
}

/// See [`RowOps::layer_norm_backward`](super::RowOps::layer_norm_backward).
pub fn layer_norm<B: Backend>(x_nd: Tensor<B, 2>, dy_nd: Tensor<B, 2>, eps: f64) -> Tensor<B, 2> {
    let x_nd = leaf(x_nd);
    let y_nd = reference::layer_norm(x_nd.clone(), eps);
    gradient(&x_nd, &pull(y_nd, dy_nd))
}

/// See [`RowOps::gelu_tanh_backward`](super::RowOps::gelu_tanh_backward).
pub fn gelu_tanh<B: Backend>(x_nf: Tensor<B, 2>, dy_nf: Tensor<B, 2>) -> Tensor<B, 2> {
    let x_nf = leaf(x_nf);
    let y_nf = reference::gelu_tanh(x_nf.clone());
    gradient(&x_nf, &pull(y_nf, dy_nf))
}

fn leaf<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<Autodiff<B>, D> {
    Tensor::from_inner(x).require_grad()
}

/// The gradients of `sum y dy`.
fn pull<B: Backend, const D: usize>(y: Tensor<Autodiff<B>, D>, dy: Tensor<B, D>) -> Gradients<B> {
    (y * Tensor::from_inner(dy)).sum().backward()
}

fn gradient<B: Backend, const D: usize>(
    x: &Tensor<Autodiff<B>, D>,
    gradients: &Gradients<B>,
) -> Tensor<B, D> {
    x.grad(gradients).expect("every leaf made here takes part in the output")
}
