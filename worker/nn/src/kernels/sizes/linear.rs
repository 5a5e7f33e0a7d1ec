//! Linear layers by size: on a CPU as `kernels::flex` has them, on a GPU as [`on_gpu`] says.

use burn::tensor::{DType, Tensor};

use super::{
    fused::{Fusion, held, next, raw},
    on_gpu::{self, is_on_gpu},
    products,
    router::Sizes,
};
use crate::kernels::{
    DROPOUT_BLOCK, FEW_TOKENS, GradientSlot, JoinedGradients, JoinedLayers, JoinedSaved, LinearOps, LowRank,
    LowRankGradients, LowRankSaved, PANEL_COLUMNS, Weight, WeightOps, flex::bfloat16_scratch,
    packed::PackedMatrix, precision,
};

impl WeightOps for Sizes {
    fn unpacked(parts: &[PackedMatrix<Self>]) -> Tensor<Self, 2> {
        on_gpu::unpacked(parts)
    }
}

impl LinearOps for Sizes {
    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let w_oi = w_oi.into();
        if is_on_gpu(&x_ni) {
            return on_gpu::linear(x_ni, w_oi, bias_o);
        }
        let ([rows, inputs], [outputs, _]) = (x_ni.dims(), w_oi.dims());
        let (scratch, beside) = (panels(rows, &w_oi), input_copy(rows, &w_oi));
        Fusion::new([raw(x_ni)])
            .and(held(w_oi))
            .and(bias_o.map(raw))
            .makes([rows, outputs])
            .computes(products::linear([rows, inputs, outputs]))
            .needs(scratch)
            .beside(beside)
            .one()
    }

    fn linear_input_gradient(dy_no: Tensor<Self, 2>, w_oi: impl Into<Weight<Self>>) -> Tensor<Self, 2> {
        let w_oi = w_oi.into();
        if is_on_gpu(&dy_no) {
            return on_gpu::linear_input_gradient(dy_no, w_oi);
        }
        let ([rows, outputs], [_, inputs]) = (dy_no.dims(), w_oi.dims());
        let (scratch, flops) = (panels_back(&w_oi), products::linear([rows, inputs, outputs]));
        let rounded = rounded(rows * outputs, &w_oi, outputs);
        let fused = Fusion::new([raw(dy_no)]).and(held(w_oi));
        fused.makes([rows, inputs]).computes(flops).needs(scratch).beside(rounded).one()
    }

    fn linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let ([rows, outputs], [_, inputs]) = (dy_no.dims(), x_ni.dims());
        let flops = products::linear([rows, inputs, outputs]);
        Fusion::new([raw(dy_no), raw(x_ni)]).makes([outputs, inputs]).computes(flops).one()
    }

    fn add_linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>, _sum: GradientSlot<'_>) {
        let ([rows, outputs], [_, inputs]) = (dy_no.dims(), x_ni.dims());
        Fusion::new([raw(dy_no), raw(x_ni)]).computes(products::linear([rows, inputs, outputs])).run();
    }

    fn lora_linear_saving(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let w_oi = w_oi.into();
        if is_on_gpu(&x_ni) {
            return on_gpu::lora_linear(x_ni, w_oi, bias_o, update);
        }
        let ([rows, inputs], [outputs, _], [rank, _]) = (x_ni.dims(), w_oi.dims(), update.a_ri.dims());
        let dropped = update.dropout.as_ref().map_or(0, |_| 4 * (inputs * DROPOUT_BLOCK[0].min(rows)) as u64);
        let (scratch, beside) = (panels(rows, &w_oi).max(dropped), input_copy(rows, &w_oi));
        let mut made = Fusion::new([raw(x_ni), raw(update.a_ri.clone()), raw(update.b_or.clone())])
            .and(held(w_oi))
            .and(bias_o.map(raw))
            .makes([rows, outputs])
            .makes([rows, rank])
            .computes(products::linear([rows, inputs, outputs]))
            .computes(products::linear([rows, inputs, rank]) + products::linear([rows, rank, outputs]))
            .needs(scratch)
            .beside(beside)
            .run();
        (next(&mut made), next(&mut made))
    }

    fn lora_linear_backward(
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
    ) -> LowRankGradients<Self> {
        if is_on_gpu(&dy_no) {
            return on_gpu::lora_linear_backward(saved, dy_no, wants_dx);
        }
        let LowRankSaved { x_ni, down_nr, w_oi, update } = saved;
        let ([rows, inputs], [outputs, _], [rank, _]) = (x_ni.dims(), w_oi.dims(), update.a_ri.dims());
        let dropped = update.dropout.as_ref().map_or(0, |_| 4 * (rows * DROPOUT_BLOCK[1].min(inputs)) as u64);
        let scratch = panels_back(&w_oi).max(dropped);
        let rounded = if wants_dx { rounded(rows * outputs, &w_oi, outputs) } else { 0 };
        // Through `b`, then the gradients of both; the input's by way of `a`, and by way of the weight.
        let [dense, down, up] =
            [[inputs, outputs], [inputs, rank], [rank, outputs]].map(|[i, o]| products::linear([rows, i, o]));
        let fused = Fusion::new([x_ni, down_nr, update.a_ri, update.b_or, dy_no].map(raw))
            .and(held(w_oi))
            .makes([rank, inputs])
            .makes([outputs, rank])
            .computes(2 * up + down)
            .needs(scratch);
        let fused = if wants_dx { fused.makes([rows, inputs]).computes(dense + down) } else { fused };
        let mut made = fused.beside(rows * rank + rounded).run();
        let (da_ri, db_or) = (next(&mut made), next(&mut made));
        LowRankGradients { dx_ni: wants_dx.then(|| next(&mut made)), da_ri, db_or }
    }

    fn joined_saving(
        x_ni: Tensor<Self, 2>,
        layers: &JoinedLayers<Self>,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 2>>) {
        on_gpu::joined(x_ni, layers)
    }

    fn joined_backward(
        saved: JoinedSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
        sum_ni: Option<Tensor<Self, 2>>,
    ) -> JoinedGradients<Self> {
        on_gpu::joined_backward(saved, dy_no, wants_dx, sum_ni)
    }
}

/// Whether the weight is multiplied as it is, over an inner dimension of `depth`.
fn is_half(weight: &Weight<Sizes>, depth: usize) -> bool {
    weight.dtype() == Some(DType::BF16) && precision::multiplies_bfloat16(depth)
}

/// Values of float32 that take as much as so many rounded ones; none where nothing is rounded.
fn rounded(values: usize, weight: &Weight<Sizes>, depth: usize) -> usize {
    if is_half(weight, depth) { values / 2 } else { 0 }
}

/// Values of the copy that a forward pass makes of its input.
fn input_copy(rows: usize, weight: &Weight<Sizes>) -> usize {
    let inputs = weight.dims()[1];
    match is_half(weight, inputs) {
        true => rounded(rows * inputs, weight, inputs),
        false if rows <= FEW_TOKENS => rows * inputs,
        false => 0,
    }
}

/// Panels of the weight that a thread transposes or converts.
fn panels(rows: usize, weight: &Weight<Sizes>) -> u64 {
    let [outputs, inputs] = weight.dims();
    if is_half(weight, inputs) {
        return 4 * bfloat16_scratch(inputs) as u64;
    }
    let panel = PANEL_COLUMNS.min(outputs) * inputs;
    let buffer = if rows <= FEW_TOKENS { PANEL_COLUMNS.min(outputs) * rows } else { panel };
    4 * (buffer + if weight.dtype() == Some(DType::F32) { 0 } else { panel }) as u64
}

/// Panels of the weight for the gradient of its input.
fn panels_back(weight: &Weight<Sizes>) -> u64 {
    let [outputs, inputs] = weight.dims();
    if is_half(weight, outputs) {
        return 4 * bfloat16_scratch(outputs) as u64;
    }
    4 * (PANEL_COLUMNS.min(inputs) * outputs) as u64
}
