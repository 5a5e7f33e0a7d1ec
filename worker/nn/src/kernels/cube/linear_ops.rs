//! Linear layers on an accelerator.

use burn::tensor::Tensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::{
    joined,
    launch::{floats, primitive, wrapped},
    linear,
    pointwise::Finish,
    product, quantized,
};
use crate::kernels::{
    JoinedGradients, JoinedLayers, JoinedSaved, LinearLayer, LinearOps, LowRank, LowRankGradients,
    LowRankSaved, Residual, Weight, WeightOps, packed::PackedMatrix,
};

impl<R, F, I, BT> WeightOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn unpacked(parts: &[PackedMatrix<Self>]) -> Tensor<Self, 2> {
        wrapped(quantized::unpacked(parts))
    }
}

impl<R, F, I, BT> LinearOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn product<const D: usize>(x: Tensor<Self, D>, y: Tensor<Self, D>) -> Tensor<Self, D> {
        wrapped(product::product(primitive(x), primitive(y)))
    }

    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let w_oi = w_oi.into().into_tensor(&x_ni.device());
        let finish = Finish { bias_o: bias_o.map(floats), ..Finish::default() };
        linear::finished(x_ni, w_oi.transpose(), finish)
    }

    fn linear_residual(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let w_oi = w_oi.into().into_tensor(&x_ni.device());
        linear::finished(x_ni, w_oi.transpose(), linear::finish(Some(residual), bias_o))
    }

    fn linear_input_gradient(dy_no: Tensor<Self, 2>, w_oi: impl Into<Weight<Self>>) -> Tensor<Self, 2> {
        let w_oi = w_oi.into().into_tensor(&dy_no.device());
        linear::rounded_like(dy_no, w_oi)
    }

    fn linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>) -> Tensor<Self, 2> {
        Self::product(dy_no.transpose(), x_ni)
    }

    fn lora_linear_saving(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        linear::updated(x_ni, w_oi.into(), update, linear::finish(None, bias_o))
    }

    fn linears_saving(
        x_ni: Tensor<Self, 2>,
        layers: Vec<LinearLayer<Self>>,
    ) -> Vec<(Tensor<Self, 2>, Option<Tensor<Self, 2>>)> {
        linear::together(x_ni, layers)
    }

    fn lora_linear_residual_saving(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        linear::updated(x_ni, w_oi.into(), update, linear::finish(Some(residual), bias_o))
    }

    fn lora_linear_backward(
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
    ) -> LowRankGradients<Self> {
        linear::pulled(saved, dy_no, wants_dx.then(Finish::default))
    }

    fn lora_linear_backward_residual(
        sum_ni: Tensor<Self, 2>,
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
    ) -> LowRankGradients<Self> {
        linear::pulled(saved, dy_no, Some(Finish { more_no: Some(floats(sum_ni)), ..Finish::default() }))
    }

    fn joined_saving(
        x_ni: Tensor<Self, 2>,
        layers: &JoinedLayers<Self>,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 2>>) {
        if joined::fits(layers) { joined::forward(x_ni, layers) } else { Self::apart_saving(x_ni, layers) }
    }

    fn joined_backward(
        saved: JoinedSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
        sum_ni: Option<Tensor<Self, 2>>,
    ) -> JoinedGradients<Self> {
        match joined::fits(&saved.layers) {
            true => joined::backward(saved, dy_no, wants_dx, sum_ni),
            false => Self::apart_backward(saved, dy_no, wants_dx, sum_ni),
        }
    }
}
