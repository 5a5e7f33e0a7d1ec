//! Norms, activations, roundings and losses of slices.

use burn::{backend::Flex, tensor::Tensor};

use super::{
    border::{Values, WeightValues, changed, is_f32, tensor},
    cross_entropy, linear, norm, pointwise, rounding,
};
use crate::{
    kernels::{CrossEntropy, RowOps, backward, reference},
    profile,
};

impl RowOps for Flex {
    fn rms_norm(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        let _op = profile::operation("RMS norm");
        if !is_f32(&x_nd) {
            return reference::rms_norm(x_nd, gain_d, eps);
        }
        let (shape, x, gain) = (x_nd.dims(), Values::from_tensor(x_nd), Values::from_tensor(gain_d));
        assert_eq!(gain.get().len(), shape[1], "rms_norm: one gain per feature");
        tensor(norm::rms(x.get(), gain.get(), eps as f32), shape)
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        let _op = profile::operation("RMS norm, backward");
        if !is_f32(&x_nd) {
            return backward::rms_norm(x_nd, gain_d, dy_nd, eps);
        }
        let (shape, x, gain, dy) =
            (x_nd.dims(), Values::from_tensor(x_nd), Values::from_tensor(gain_d), Values::from_tensor(dy_nd));
        tensor(norm::rms_backward(x.get(), gain.get(), dy.get(), eps as f32), shape)
    }

    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let _op = profile::operation("SwiGLU");
        if !is_f32(&gate_nf) {
            return reference::swiglu(gate_nf, up_nf);
        }
        let shape = gate_nf.dims();
        assert_eq!(shape, up_nf.dims(), "swiglu: gate and up have one shape");
        tensor(pointwise::swiglu(Values::from_tensor(gate_nf).get(), Values::from_tensor(up_nf).get()), shape)
    }

    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let _op = profile::operation("SwiGLU, backward");
        if !is_f32(&gate_nf) {
            return backward::swiglu(gate_nf, up_nf, dy_nf);
        }
        let shape = gate_nf.dims();
        let (gate, up, dy) =
            (Values::from_tensor(gate_nf), Values::from_tensor(up_nf), Values::from_tensor(dy_nf));
        let (dgate, dup) = pointwise::swiglu_backward(gate.get(), up.get(), dy.get());
        (tensor(dgate, shape), tensor(dup, shape))
    }

    fn linear_bias_gradient(dy_no: Tensor<Self, 2>) -> Tensor<Self, 1> {
        let _op = profile::operation("linear, bias gradient");
        if !is_f32(&dy_no) {
            return backward::linear_bias(dy_no);
        }
        let shape = dy_no.dims();
        tensor(linear::column_sums(Values::from_tensor(dy_no).dense(shape)), [shape[1]])
    }

    fn layer_norm(x_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        let _op = profile::operation("layer norm");
        if !is_f32(&x_nd) {
            return reference::layer_norm(x_nd, eps);
        }
        let shape = x_nd.dims();
        tensor(norm::layer(Values::from_tensor(x_nd).get(), shape[1], None, eps as f32), shape)
    }

    fn layer_norm_backward(x_nd: Tensor<Self, 2>, dy_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        let _op = profile::operation("layer norm, backward");
        if !is_f32(&x_nd) {
            return backward::layer_norm(x_nd, dy_nd, eps);
        }
        let shape = x_nd.dims();
        let (x, dy) = (Values::from_tensor(x_nd), Values::from_tensor(dy_nd));
        tensor(norm::layer_backward(x.get(), shape[1], None, dy.get(), eps as f32), shape)
    }

    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        let _op = profile::operation("modulated layer norm");
        if !is_f32(&x_nd) {
            return reference::modulated_layer_norm(x_nd, scale_bd, shift_bd, eps);
        }
        let (shape, [batch, dim]) = (x_nd.dims(), scale_bd.dims());
        assert!(
            dim == shape[1] && shift_bd.dims() == [batch, dim],
            "modulated_layer_norm: scale and shift are [b, d]"
        );
        assert!(
            batch > 0 && shape[0].is_multiple_of(batch),
            "modulated_layer_norm: the rows are b runs of one length"
        );
        let (x, scale, shift) =
            (Values::from_tensor(x_nd), Values::from_tensor(scale_bd), Values::from_tensor(shift_bd));
        let modulation = norm::Modulation { scale_bd: scale.get(), shift_bd: shift.get() };
        tensor(norm::layer(x.get(), dim, Some(modulation), eps as f32), shape)
    }

    fn modulated_layer_norm_backward(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> [Tensor<Self, 2>; 3] {
        let _op = profile::operation("modulated layer norm, backward");
        if !is_f32(&x_nd) {
            return backward::modulated_layer_norm(x_nd, scale_bd, dy_nd, eps);
        }
        let (shape, modulation) = (x_nd.dims(), scale_bd.dims());
        let (x, scale, dy) =
            (Values::from_tensor(x_nd), Values::from_tensor(scale_bd), Values::from_tensor(dy_nd));
        let dx = norm::layer_backward(x.get(), shape[1], Some(scale.get()), dy.get(), eps as f32);
        let (dscale, dshift) = norm::modulation_backward(x.get(), modulation, dy.get(), eps as f32);
        [tensor(dx, shape), tensor(dscale, modulation), tensor(dshift, modulation)]
    }

    fn rounded(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let _op = profile::operation("rounding");
        if !is_f32(&x_nd) {
            return reference::rounded(x_nd);
        }
        changed(x_nd, rounding::round)
    }

    fn rounded_sum(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let _op = profile::operation("rounding");
        if !is_f32(&x_nd) || !is_f32(&y_nd) {
            return reference::rounded(x_nd + y_nd);
        }
        let x = Values::from_tensor(x_nd);
        changed(y_nd, |sum| rounding::add_rounding(x.get(), sum))
    }

    fn narrowed(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let _op = profile::operation("conversion to bf16");
        let shape = x_nd.dims();
        tensor(rounding::narrowed(Values::from_tensor(x_nd).get()), shape)
    }

    fn widened(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let _op = profile::operation("conversion from bf16");
        match WeightValues::from_weight(x_nd.clone().into()).get() {
            linear::WeightView::Bf16(values) => tensor(rounding::widened(values), x_nd.dims()),
            _ => x_nd,
        }
    }

    fn cross_entropy(logits_nv: Tensor<Self, 2>, targets: &[u32], gradient: bool) -> CrossEntropy<Self> {
        let _op = profile::operation("cross entropy");
        if !is_f32(&logits_nv) {
            return reference::cross_entropy(logits_nv, targets, gradient);
        }
        let [n, v] = logits_nv.dims();
        assert_eq!(n, targets.len(), "cross_entropy: a target for each row");
        if !gradient {
            let rows = cross_entropy::forward(Values::from_tensor(logits_nv).get(), v, targets);
            return CrossEntropy { rows, dlogits_nv: None };
        }
        let mut rows = Vec::new();
        let dlogits_nv = changed(logits_nv, |x| rows = cross_entropy::backward(x, v, targets));
        CrossEntropy { rows, dlogits_nv: Some(dlogits_nv) }
    }

    fn gelu_tanh(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let _op = profile::operation("GELU");
        if !is_f32(&x_nf) {
            return reference::gelu_tanh(x_nf);
        }
        let shape = x_nf.dims();
        tensor(pointwise::gelu_tanh(Values::from_tensor(x_nf).get()), shape)
    }

    fn gelu_tanh_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let _op = profile::operation("GELU, backward");
        if !is_f32(&x_nf) {
            return backward::gelu_tanh(x_nf, dy_nf);
        }
        let shape = x_nf.dims();
        tensor(
            pointwise::gelu_tanh_backward(Values::from_tensor(x_nf).get(), Values::from_tensor(dy_nf).get()),
            shape,
        )
    }
}
