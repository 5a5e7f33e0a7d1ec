//! Operations on rows of values: norms, activations, roundings, losses.

use burn::tensor::{DType, Tensor, TensorPrimitive, activation, backend::Backend};

use super::{
    backward,
    operands::{AdaNorm, CrossEntropy, Residual},
    reference,
};

/// What a backend does row by row, or value by value.
pub trait RowOps: Backend {
    /// `x * rsqrt(mean(x^2, last) + eps) * gain` (arXiv 1910.07467). `x_nd`, `gain_d`; returns `[n, d]`.
    fn rms_norm(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        reference::rms_norm(x_nd, gain_d, eps)
    }

    /// [`rms_norm`](Self::rms_norm) for products that round their inputs to a half-precision type: rounded
    /// already, where that saves a pass.
    fn rms_norm_for_rounding(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        eps: f64,
        _to: DType,
    ) -> Tensor<Self, 2> {
        Self::rms_norm(x_nd, gain_d, eps)
    }

    /// The gradient of `x` under [`rms_norm`](Self::rms_norm).
    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        backward::rms_norm(x_nd, gain_d, dy_nd, eps)
    }

    /// [`rms_norm_backward`](Self::rms_norm_backward) added to `sum`, the gradient of `x` by way of its other
    /// readers.
    fn rms_norm_backward_residual(
        sum_nd: Tensor<Self, 2>,
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        Self::rms_norm_backward(x_nd, gain_d, dy_nd, eps) + sum_nd
    }

    /// The gradient of the gain under [`rms_norm`](Self::rms_norm): the rows' sum of `dy * x *
    /// rsqrt(mean(x^2) + eps)`.
    fn rms_norm_gain_gradient(x_nd: Tensor<Self, 2>, dy_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 1> {
        let ones_d = Tensor::ones([x_nd.dims()[1]], &x_nd.device());
        Self::linear_bias_gradient(dy_nd * Self::rms_norm(x_nd, ones_d, eps))
    }

    /// `silu(gate) * up` (arXiv 2002.05202). Both `[n, f]`.
    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        reference::swiglu(gate_nf, up_nf)
    }

    /// [`swiglu`](Self::swiglu) for products that round their inputs, likewise.
    fn swiglu_for_rounding(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>, _to: DType) -> Tensor<Self, 2> {
        Self::swiglu(gate_nf, up_nf)
    }

    /// The gradients of gate and up under [`swiglu`](Self::swiglu).
    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        backward::swiglu(gate_nf, up_nf, dy_nf)
    }

    /// [`swiglu`](Self::swiglu) of rows in which both lie side by side, `[n, 2 f]`. With `to`, for products
    /// that round their inputs to that type, likewise.
    fn swiglu_joined(gate_up_ne: Tensor<Self, 2>, _to: Option<DType>) -> Tensor<Self, 2> {
        let [gate_nf, up_nf] = halves(gate_up_ne);
        Self::swiglu(gate_nf, up_nf)
    }

    /// The gradient of both, `[n, 2 f]`; rounded likewise.
    fn swiglu_joined_backward(
        gate_up_ne: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
        _to: Option<DType>,
    ) -> Tensor<Self, 2> {
        let [gate_nf, up_nf] = halves(gate_up_ne);
        let (dgate_nf, dup_nf) = Self::swiglu_backward(gate_nf, up_nf, dy_nf);
        Tensor::cat(vec![dgate_nf, dup_nf], 1)
    }

    /// The sum of the rows of `dy`: the gradient of a bias.
    fn linear_bias_gradient(dy_no: Tensor<Self, 2>) -> Tensor<Self, 1> {
        backward::linear_bias(dy_no)
    }

    /// `x + y` whose value is never read: nothing is computed, and under autodiff the node is that of a sum.
    fn sum_unread(x_nd: Tensor<Self, 2>, _y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        x_nd
    }

    /// Layer norm without gain or bias, then `* (1 + scale) + shift` with one scale and shift per batch row
    /// (AdaLN). `x [b * s, d]` in batch order, `scale` and `shift` `[b, d]`; returns `[b * s, d]`.
    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        reference::modulated_layer_norm(x_nd, scale_bd, shift_bd, eps)
    }

    /// The gradients of `x`, scale and shift under [`modulated_layer_norm`](Self::modulated_layer_norm).
    fn modulated_layer_norm_backward(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> [Tensor<Self, 2>; 3] {
        backward::modulated_layer_norm(x_nd, scale_bd, dy_nd, eps)
    }

    /// [`modulated_layer_norm`](Self::modulated_layer_norm) by scale and shift side by side, `ada [b, 2 d]`.
    fn ada_layer_norm(x_nd: Tensor<Self, 2>, ada_be: Tensor<Self, 2>, how: AdaNorm) -> Tensor<Self, 2> {
        let d = x_nd.dims()[1];
        let [scale_bd, shift_bd] = how.halves([0, d].map(|start| ada_be.clone().narrow(1, start, d)));
        Self::modulated_layer_norm(x_nd, scale_bd, shift_bd, how.eps)
    }

    /// The gradients of `x` and of scale and shift under [`ada_layer_norm`](Self::ada_layer_norm); the first
    /// added to `sum`, the gradient of `x` by way of others who read it, if there is one.
    fn ada_layer_norm_backward(
        sum_nd: Option<Tensor<Self, 2>>,
        x_nd: Tensor<Self, 2>,
        ada_be: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        how: AdaNorm,
    ) -> [Tensor<Self, 2>; 2] {
        let d = x_nd.dims()[1];
        let [scale_bd, _] = how.halves([0, d].map(|start| ada_be.clone().narrow(1, start, d)));
        let [dx_nd, dscale_bd, dshift_bd] =
            Self::modulated_layer_norm_backward(x_nd, scale_bd, dy_nd, how.eps);
        let dada_be = Tensor::cat(how.halves([dscale_bd, dshift_bd]).into(), 1);
        [
            match sum_nd {
                Some(sum_nd) => dx_nd + sum_nd,
                None => dx_nd,
            },
            dada_be,
        ]
    }

    /// Layer norm without gain or bias. `[n, d]`.
    fn layer_norm(x_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        reference::layer_norm(x_nd, eps)
    }

    /// The gradient of `x` under [`layer_norm`](Self::layer_norm).
    fn layer_norm_backward(x_nd: Tensor<Self, 2>, dy_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        backward::layer_norm(x_nd, dy_nd, eps)
    }

    /// The gradient of `x` under [`layer_norm`](Self::layer_norm), added to `sum`, its gradient by way of
    /// others who read it.
    fn layer_norm_backward_residual(
        sum_nd: Tensor<Self, 2>,
        x_nd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        Self::layer_norm_backward(x_nd, dy_nd, eps) + sum_nd
    }

    /// `x` rounded to bfloat16, in its own type. The gradient passes as it is, as under autocast: a
    /// rounding's own is zero almost everywhere.
    fn rounded(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        reference::rounded(x_nd)
    }

    /// `x + y`, rounded likewise.
    fn rounded_sum(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        reference::rounded(x_nd + y_nd)
    }

    /// `x` as bfloat16, rounded where it has to be.
    fn narrowed(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        x_nd.cast(DType::BF16)
    }

    /// A bfloat16 `x` as float32.
    fn widened(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        x_nd.cast(DType::F32)
    }

    /// GELU by its tanh approximation, as `gelu(approximate="tanh")`.
    fn gelu_tanh(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        reference::gelu_tanh(x_nf)
    }

    /// The gradient of `x` under [`gelu_tanh`](Self::gelu_tanh).
    fn gelu_tanh_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        backward::gelu_tanh(x_nf, dy_nf)
    }

    /// GELU by the error function, `x (1 + erf(x / sqrt 2)) / 2` (arXiv 1606.08415).
    fn gelu_erf(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        activation::gelu(x_nf)
    }

    /// The gradient of `x` under [`gelu_erf`](Self::gelu_erf). burn's own is exact where a backend has it,
    /// and else that of the tanh approximation, which is off by a thousandth.
    fn gelu_erf_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let [x, dy] = [x_nf, dy_nf].map(|tensor| tensor.into_primitive().tensor());
        Tensor::from_primitive(TensorPrimitive::Float(Self::gelu_backward(x, dy)))
    }

    /// Cross entropy of rows of logits `[n, v]`, each against one target below `v`.
    ///
    /// Of each row `log(sum exp(x)) - x_t`, and `x_t - max(x)`, which is zero where the target is what would
    /// be said: `[n, 2]` in host memory. With `gradient` the gradient of the losses' sum by the logits,
    /// `softmax(x) - onehot(t)`, where they lay if nobody else has them.
    fn cross_entropy(logits_nv: Tensor<Self, 2>, targets: &[u32], gradient: bool) -> CrossEntropy<Self> {
        reference::cross_entropy(logits_nv, targets, gradient)
    }
}

/// The two halves of rows.
fn halves<B: Backend>(x_ne: Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
    let f = x_ne.dims()[1] / 2;
    [x_ne.clone().narrow(1, 0, f), x_ne.narrow(1, f, f)]
}

impl<B: RowOps> Residual<B> {
    /// The sum.
    pub fn plus(self, y_no: Tensor<B, 2>) -> Tensor<B, 2> {
        if self.rounded { B::rounded_sum(self.x_no, y_no) } else { self.x_no + y_no }
    }
}
