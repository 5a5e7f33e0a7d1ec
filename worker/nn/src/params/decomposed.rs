//! DoRA (arXiv 2402.09353): a linear layer whose weight is split in magnitude and direction, with PEFT's
//! meaning.
//!
//! ```text
//! g = m / |W + s B A|          a factor for each output; to the gradient the norms are constants
//! y = g (x W^T + s (x A^T) B^T) + b
//! y = x W^T + b + (g - 1) x' W^T + g s (x' A^T) B^T        where dropout leaves x' of x
//! ```
//!
//! Plain operations on tensors; the norms take `W + s B A` as a tensor while they are made. What this file
//! does not do: keep anything for recompute. Such a layer runs again whole.

use burn::tensor::{DType, Tensor};

use crate::kernels::{LinearLayer, LinearOps, Tape};

/// The output of `layer`, which has an update, with magnitudes `m_o`.
pub(super) fn linear<T: Tape>(x_ni: Tensor<T, 2>, layer: LinearLayer<T>, m_o: Tensor<T, 1>) -> Tensor<T, 2> {
    let LinearLayer { w_oi, bias_o, update } = layer;
    let update = update.expect("magnitudes are those of an update");
    let outputs = m_o.dims()[0];
    let norms_o = row_norms::<T>(&w_oi, [&update.a_ri, &update.b_or], update.scale);
    let g_1o = (m_o / norms_o).reshape([1, outputs]);
    let read_ni = update.input(x_ni.clone());
    let plain = |x_ni, w_oi| <T as LinearOps>::linear(x_ni, w_oi, None);
    let down_nr = plain(read_ni.clone(), update.a_ri) * update.scale;
    let low_no = plain(down_nr, update.b_or);
    if update.dropout.is_some() {
        let base_no = <T as LinearOps>::linear(x_ni, w_oi.clone(), bias_o);
        return base_no + plain(read_ni, w_oi) * (g_1o.clone() - 1.0) + low_no * g_1o;
    }
    let y_no = (plain(read_ni, w_oi) + low_no) * g_1o;
    match bias_o {
        Some(bias_o) => y_no + bias_o.reshape([1, outputs]),
        None => y_no,
    }
}

/// `|W + s B A|` of each row, a constant.
fn row_norms<T: Tape>(w_oi: &Tensor<T, 2>, [a_ri, b_or]: [&Tensor<T, 2>; 2], scale: f64) -> Tensor<T, 1> {
    let [w_oi, a_ri, b_or] = [w_oi, a_ri, b_or].map(|tensor| T::lower(tensor.clone()));
    let w_oi = if w_oi.dtype() == DType::F32 { w_oi } else { w_oi.cast(DType::F32) };
    let composed_oi = w_oi + b_or.matmul(a_ri) * scale;
    T::lift((composed_oi.clone() * composed_oi).sum_dim(1).sqrt().squeeze_dim(1))
}
