//! Norms, activations and roundings, a kernel each.

use burn::tensor::{DType, Tensor};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, kernel::into_contiguous};
use half::{bf16, f16};

use super::{
    launch::{floats, primitive, wrapped},
    pointwise, rows,
};
use crate::kernels::{AdaNorm, RowOps};

impl<R, F, I, BT> RowOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn rms_norm(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        wrapped(rows::rms_norm::<R, f32>(floats(x_nd), floats(gain_d), eps))
    }

    fn rms_norm_for_rounding(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        eps: f64,
        to: DType,
    ) -> Tensor<Self, 2> {
        let (x, gain) = (floats(x_nd), floats(gain_d));
        wrapped(match to {
            DType::F16 => rows::rms_norm::<R, f16>(x, gain, eps),
            _ => rows::rms_norm::<R, bf16>(x, gain, eps),
        })
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        wrapped(rows::rms_norm_backward(floats(x_nd), floats(gain_d), floats(dy_nd), None, eps))
    }

    fn rms_norm_backward_residual(
        sum_nd: Tensor<Self, 2>,
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        let (x, gain, dy, sum) = (floats(x_nd), floats(gain_d), floats(dy_nd), floats(sum_nd));
        wrapped(rows::rms_norm_backward(x, gain, dy, Some(sum), eps))
    }

    fn layer_norm(x_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        wrapped(rows::layer_norm(floats(x_nd), None, eps))
    }

    fn layer_norm_backward(x_nd: Tensor<Self, 2>, dy_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        let (dx_nd, _) = rows::layer_norm_backward(floats(x_nd), None, floats(dy_nd), None, eps);
        wrapped(dx_nd)
    }

    fn layer_norm_backward_residual(
        sum_nd: Tensor<Self, 2>,
        x_nd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        let sum = Some(floats(sum_nd));
        let (dx_nd, _) = rows::layer_norm_backward(floats(x_nd), None, floats(dy_nd), sum, eps);
        wrapped(dx_nd)
    }

    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        Self::ada_layer_norm(
            x_nd,
            Tensor::cat(vec![scale_bd, shift_bd], 1),
            AdaNorm { shift_first: false, eps },
        )
    }

    fn modulated_layer_norm_backward(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> [Tensor<Self, 2>; 3] {
        let d = x_nd.dims()[1];
        // The shift is not read.
        let ada_be = Tensor::cat(vec![scale_bd.clone(), scale_bd], 1);
        let how = AdaNorm { shift_first: false, eps };
        let [dx_nd, dada_be] = Self::ada_layer_norm_backward(None, x_nd, ada_be, dy_nd, how);
        [dx_nd, dada_be.clone().narrow(1, 0, d), dada_be.narrow(1, d, d)]
    }

    fn ada_layer_norm(x_nd: Tensor<Self, 2>, ada_be: Tensor<Self, 2>, how: AdaNorm) -> Tensor<Self, 2> {
        wrapped(rows::layer_norm(floats(x_nd), Some((floats(ada_be), how.shift_first)), how.eps))
    }

    fn ada_layer_norm_backward(
        sum_nd: Option<Tensor<Self, 2>>,
        x_nd: Tensor<Self, 2>,
        ada_be: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        how: AdaNorm,
    ) -> [Tensor<Self, 2>; 2] {
        let (ada, dy) = (floats(ada_be), floats(dy_nd));
        let modulation = Some((ada.clone(), how.shift_first));
        let (dx, products) =
            rows::layer_norm_backward(floats(x_nd), modulation, dy.clone(), sum_nd.map(floats), how.eps);
        [wrapped(dx), wrapped(rows::ada_gradient(ada, how.shift_first, products, dy))]
    }

    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::swiglu::<R, f32>(floats(gate_nf), floats(up_nf)))
    }

    fn swiglu_for_rounding(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>, to: DType) -> Tensor<Self, 2> {
        let (gate, up) = (floats(gate_nf), floats(up_nf));
        wrapped(match to {
            DType::F16 => pointwise::swiglu::<R, f16>(gate, up),
            _ => pointwise::swiglu::<R, bf16>(gate, up),
        })
    }

    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let [dgate, dup] = pointwise::swiglu_backward(floats(gate_nf), floats(up_nf), floats(dy_nf));
        (wrapped(dgate), wrapped(dup))
    }

    fn swiglu_joined(gate_up_ne: Tensor<Self, 2>, to: Option<DType>) -> Tensor<Self, 2> {
        let gate_up = into_contiguous(primitive(gate_up_ne));
        wrapped(match (gate_up.dtype, to) {
            (DType::F32, None) => pointwise::swiglu_joined::<R, f32, f32>(gate_up),
            (DType::F32, Some(DType::F16)) => pointwise::swiglu_joined::<R, f32, f16>(gate_up),
            (DType::F32, Some(_)) => pointwise::swiglu_joined::<R, f32, bf16>(gate_up),
            _ => pointwise::swiglu_joined::<R, bf16, bf16>(gate_up),
        })
    }

    fn swiglu_joined_backward(
        gate_up_ne: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
        to: Option<DType>,
    ) -> Tensor<Self, 2> {
        let (gate_up, dy) = (into_contiguous(primitive(gate_up_ne)), floats(dy_nf));
        wrapped(match (gate_up.dtype, to) {
            (DType::F32, None) => pointwise::swiglu_joined_backward::<R, f32, f32>(gate_up, dy),
            (DType::F32, Some(DType::F16)) => pointwise::swiglu_joined_backward::<R, f32, f16>(gate_up, dy),
            (DType::F32, Some(_)) => pointwise::swiglu_joined_backward::<R, f32, bf16>(gate_up, dy),
            _ => pointwise::swiglu_joined_backward::<R, bf16, bf16>(gate_up, dy),
        })
    }

    fn gelu_tanh(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::gelu_tanh(floats(x_nf)))
    }

    fn gelu_tanh_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::gelu_tanh_backward(floats(x_nf), floats(dy_nf)))
    }

    fn gelu_erf(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::gelu_erf(floats(x_nf)))
    }

    fn gelu_erf_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::gelu_erf_backward(floats(x_nf), floats(dy_nf)))
    }

    fn rounded(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::rounded(floats(x_nd)))
    }

    fn rounded_sum(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::rounded_sum(floats(x_nd), floats(y_nd)))
    }
}
