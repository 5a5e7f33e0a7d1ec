//! Linear layers of slices.

use burn::{backend::Flex, tensor::Tensor};

use super::{
    border::{Values, WeightValues, has_weight_path, is_f32, tensor},
    linear,
};
use crate::{
    kernels::{
        Dropout, GradientSlot, LinearOps, LowRank, LowRankGradients, LowRankSaved, Weight, WeightOps,
        backward, reference,
    },
    profile,
};

impl WeightOps for Flex {}

impl LinearOps for Flex {
    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let _op = profile::operation("linear");
        let w_oi = w_oi.into();
        if !has_weight_path(&x_ni, &w_oi) {
            let w_oi = w_oi.into_tensor(&x_ni.device());
            return reference::linear(x_ni, w_oi, bias_o);
        }
        let ([tokens, inputs], [outputs, w_inputs]) = (x_ni.dims(), w_oi.dims());
        assert_eq!(inputs, w_inputs, "linear: x and w differ in input features");
        let (x, w, bias) =
            (Values::from_tensor(x_ni), WeightValues::from_weight(w_oi), bias_o.map(Values::from_tensor));
        let y = linear::forward(x.dense([tokens, inputs]), w.get(), bias.as_ref().map(Values::get), None);
        tensor(y, [tokens, outputs])
    }

    fn linear_input_gradient(dy_no: Tensor<Self, 2>, w_oi: impl Into<Weight<Self>>) -> Tensor<Self, 2> {
        let _op = profile::operation("linear, input gradient");
        let w_oi = w_oi.into();
        if !has_weight_path(&dy_no, &w_oi) {
            let w_oi = w_oi.into_tensor(&dy_no.device());
            return backward::linear_input(dy_no, w_oi);
        }
        let ([tokens, outputs], [_, inputs]) = (dy_no.dims(), w_oi.dims());
        let (dy, w) = (Values::from_tensor(dy_no), WeightValues::from_weight(w_oi));
        tensor(linear::input_gradient(dy.dense([tokens, outputs]), w.get(), None), [tokens, inputs])
    }

    fn linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let _op = profile::operation("linear, weight gradient");
        if !is_f32(&x_ni) {
            return backward::linear_weight(dy_no, x_ni);
        }
        let ([tokens, outputs], [_, inputs]) = (dy_no.dims(), x_ni.dims());
        let (dy, x) = (Values::from_tensor(dy_no), Values::from_tensor(x_ni));
        let dw = linear::weight_gradient(dy.dense([tokens, outputs]), x.dense([tokens, inputs]));
        tensor(dw, [outputs, inputs])
    }

    fn add_linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>, sum: GradientSlot<'_>) {
        let _op = profile::operation("linear, weight gradient");
        let ([tokens, outputs], [_, inputs]) = (dy_no.dims(), x_ni.dims());
        let (dy, x) = (Values::from_tensor(dy_no), Values::from_tensor(x_ni));
        linear::add_weight_gradient(dy.dense([tokens, outputs]), x.dense([tokens, inputs]), sum);
    }

    fn lora_linear_saving(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let _op = profile::operation("LoRA linear");
        let w_oi = w_oi.into();
        if !has_weight_path(&x_ni, &w_oi) {
            let w_oi = w_oi.into_tensor(&x_ni.device());
            return reference::lora_linear_saving(x_ni, w_oi, bias_o, update);
        }
        let ([tokens, inputs], [outputs, _], [rank, _]) = (x_ni.dims(), w_oi.dims(), update.a_ri.dims());
        assert_eq!(
            [update.a_ri.dims()[1], w_oi.dims()[1]],
            [inputs; 2],
            "lora_linear: input features differ"
        );
        assert_eq!(update.b_or.dims(), [outputs, rank], "lora_linear: b must be [o, r]");
        let (x, w, bias) =
            (Values::from_tensor(x_ni), WeightValues::from_weight(w_oi), bias_o.map(Values::from_tensor));
        let (a, b) = (Values::from_tensor(update.a_ri.clone()), Values::from_tensor(update.b_or.clone()));
        let x = x.dense([tokens, inputs]);
        let (a, scale) = (a.dense([rank, inputs]), update.scale as f32);
        let down = match &update.dropout {
            Some(dropout) => linear::masked_down(x, dropout.mask(), a, scale),
            None => linear::down(x, a, scale),
        };
        let low_rank = linear::Update {
            inner_nr: linear::DenseView { data: &down, shape: [tokens, rank] },
            outer_rc: b.dense([outputs, rank]).mat().t(),
            mask: None,
        };
        let y = linear::forward(x, w.get(), bias.as_ref().map(Values::get), Some(low_rank));
        (tensor(y, [tokens, outputs]), tensor(down, [tokens, rank]))
    }

    fn lora_linear_backward(
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
    ) -> LowRankGradients<Self> {
        let _op = profile::operation("LoRA linear, backward");
        let LowRankSaved { x_ni, down_nr, w_oi, update } = saved;
        if !has_weight_path(&x_ni, &w_oi) {
            return backward::lora_linear(LowRankSaved { x_ni, down_nr, w_oi, update }, dy_no, wants_dx);
        }
        let ([tokens, inputs], [outputs, _], [rank, _]) = (x_ni.dims(), w_oi.dims(), update.a_ri.dims());
        let (x, dy, w, down) = (
            Values::from_tensor(x_ni),
            Values::from_tensor(dy_no),
            WeightValues::from_weight(w_oi),
            Values::from_tensor(down_nr),
        );
        let (a, b) = (Values::from_tensor(update.a_ri), Values::from_tensor(update.b_or));
        let dy = dy.dense([tokens, outputs]);
        let ddown = linear::up_transposed(dy, b.dense([outputs, rank]), update.scale as f32);
        let ddown = linear::DenseView { data: &ddown, shape: [tokens, rank] };
        let mask = update.dropout.as_ref().map(Dropout::mask);
        let dx = wants_dx.then(|| {
            let outer_rc = a.dense([rank, inputs]).mat();
            let low_rank = linear::Update { inner_nr: ddown, outer_rc, mask };
            tensor(linear::input_gradient(dy, w.get(), Some(low_rank)), [tokens, inputs])
        });
        let x = x.dense([tokens, inputs]);
        let da = match mask {
            Some(mask) => linear::masked_weight_gradient(ddown, x, mask),
            None => linear::weight_gradient(ddown, x),
        };
        LowRankGradients {
            dx_ni: dx,
            da_ri: tensor(da, [rank, inputs]),
            db_or: tensor(linear::weight_gradient(dy, down.dense([tokens, rank])), [outputs, rank]),
        }
    }
}
