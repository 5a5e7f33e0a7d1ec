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

use crate::kernels::{LinearLayer, LinearOps, LowRank, ModelBackend, Tape, Weight};

/// The output of `layer`, which has an update, with magnitudes `m_o`.
pub(super) fn linear<T: Tape>(x_ni: Tensor<T, 2>, layer: LinearLayer<T>, m_o: Tensor<T, 1>) -> Tensor<T, 2> {
    let LinearLayer { w_oi, bias_o, update } = layer;
    let update = update.expect("magnitudes are those of an update");
    let outputs = m_o.dims()[0];
    let norms_o = row_norms::<T>(&w_oi, [&update.a_ri, &update.b_or], update.scale);
    let g_1o = (m_o / norms_o).reshape([1, outputs]);
    let read_ni = read(&update, x_ni.clone());
    let plain = |x_ni, w_oi: Weight<T>| <T as LinearOps>::linear(x_ni, w_oi, None);
    let down_nr = plain(read_ni.clone(), update.a_ri.into()) * update.scale;
    let low_no = plain(down_nr, update.b_or.into());
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

/// What the update reads. Where there are no values nothing is drawn: a plan asks for the bytes of billions.
fn read<T: Tape>(update: &LowRank<T>, x_ni: Tensor<T, 2>) -> Tensor<T, 2> {
    if update.dropout.is_none() || <T::Base as ModelBackend>::VALUES {
        return update.input(x_ni);
    }
    let factors_ni = Tensor::<T, 2>::zeros(x_ni.dims(), (&x_ni.device(), DType::F32));
    let dtype = x_ni.dtype();
    x_ni * factors_ni.cast(dtype)
}

/// `|W + s B A|` of each row, a constant.
fn row_norms<T: Tape>(w_oi: &Weight<T>, [a_ri, b_or]: [&Tensor<T, 2>; 2], scale: f64) -> Tensor<T, 1> {
    let w_oi = &w_oi.clone().into_tensor(&a_ri.device());
    let [w_oi, a_ri, b_or] = [w_oi, a_ri, b_or].map(|tensor| T::lower(tensor.clone()));
    let w_oi = if w_oi.dtype() == DType::F32 { w_oi } else { w_oi.cast(DType::F32) };
    let composed_oi = w_oi + b_or.matmul(a_ri) * scale;
    T::lift((composed_oi.clone() * composed_oi).sum_dim(1).sqrt().squeeze_dim(1))
}

#[cfg(test)]
mod tests {
    use burn::backend::Autodiff;

    use super::*;
    use crate::kernels::{Dropout, DropoutRows, sizes::Sizes};

    /// As many elements as a plan asks for in an instant, and nothing could hold.
    #[test]
    fn a_plan_draws_no_dropout() {
        let (rows, features) = (1 << 24, 1 << 20);
        let of = |shape: [usize; 2]| Tensor::<Autodiff<Sizes>, 2>::zeros(shape, &Default::default());
        let dropout = Some(Dropout { rows: DropoutRows::new(Vec::new(), None), module: 1, rate: 0.5 });
        let update = LowRank { a_ri: of([2, features]), b_or: of([4, 2]), scale: 1.0, dropout };
        assert_eq!(read(&update, of([rows, features])).dims(), [rows, features]);
    }
}
