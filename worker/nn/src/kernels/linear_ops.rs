//! Linear layers: products with a weight, alone, with a low-rank update, beside each other, on top of a
//! residual.

use burn::tensor::Tensor;

use super::{
    backward,
    operands::{
        GradientSlot, JoinedGradients, JoinedLayers, JoinedSaved, LinearLayer, LowRank, LowRankGradients,
        LowRankSaved, Residual,
    },
    reference,
    row_ops::RowOps,
    weight::{Weight, WeightOps},
};

/// How a backend multiplies. What a product is added to may be rounded on the way: that is of the rows.
pub trait LinearOps: RowOps + WeightOps {
    /// `x y` of each pair of matrices in a batch, `[.., n, k]` and `[.., k, o]`, of one type; in float32 or
    /// the type of both.
    fn product<const D: usize>(x: Tensor<Self, D>, y: Tensor<Self, D>) -> Tensor<Self, D> {
        x.matmul(y)
    }

    /// `x w^T + bias` with a weight in the checkpoint's own layout: `x [n, i]`, `w [o, i]`, `bias [o]`;
    /// returns `[n, o]`. `w` may be bf16, or of few bits, under an f32 `x`; the product is f32. Gradients
    /// reach every argument that is tracked.
    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let w_oi = w_oi.into().into_tensor(&x_ni.device());
        reference::linear(x_ni, w_oi, bias_o)
    }

    /// `dy w`: the gradient of `x` under [`linear`](Self::linear), in the type of `dy`.
    fn linear_input_gradient(dy_no: Tensor<Self, 2>, w_oi: impl Into<Weight<Self>>) -> Tensor<Self, 2> {
        let w_oi = w_oi.into().into_tensor(&dy_no.device());
        backward::linear_input(dy_no, w_oi)
    }

    /// `dy^T x`: the gradient of `w` under [`linear`](Self::linear).
    fn linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>) -> Tensor<Self, 2> {
        backward::linear_weight(dy_no, x_ni)
    }

    /// [`linear_weight_gradient`](Self::linear_weight_gradient) added to a sum in host memory.
    ///
    /// The weights of a trained head outnumber the values of its micro-batch by far: where memory is shared
    /// with the host, a gradient that is made where it is summed costs one pass over it instead of three.
    fn add_linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>, sum: GradientSlot<'_>) {
        let gradient = Self::linear_weight_gradient(dy_no, x_ni).into_data().convert::<f32>();
        sum.add(gradient.as_slice().expect("converted to f32"));
    }

    /// [`linear`](Self::linear) plus a low-rank update: `x w^T + bias + scale * (x a^T) b^T`. Returns `[n,
    /// o]`. Gradients reach `x`, `a` and `b`; `w` and `bias` as in `linear`.
    fn lora_linear(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: LowRank<Self>,
    ) -> Tensor<Self, 2> {
        Self::lora_linear_saving(x_ni, w_oi, bias_o, &update).0
    }

    /// Linear layers of one input: each [`linear`](Self::linear), or [`lora_linear`](Self::lora_linear) where
    /// it has an update.
    fn linears(x_ni: Tensor<Self, 2>, layers: Vec<LinearLayer<Self>>) -> Vec<Tensor<Self, 2>> {
        Self::linears_saving(x_ni, layers).into_iter().map(|(y_no, _)| y_no).collect()
    }

    /// [`linears`](Self::linears), and `scale * x a^T` of each update.
    fn linears_saving(
        x_ni: Tensor<Self, 2>,
        layers: Vec<LinearLayer<Self>>,
    ) -> Vec<(Tensor<Self, 2>, Option<Tensor<Self, 2>>)> {
        let each = layers.into_iter().map(|LinearLayer { w_oi, bias_o, update }| match update {
            Some(update) => {
                let (y_no, down_nr) = Self::lora_linear_saving(x_ni.clone(), w_oi, bias_o, &update);
                (y_no, Some(down_nr))
            }
            None => (<Self as LinearOps>::linear(x_ni.clone(), w_oi, bias_o), None),
        });
        each.collect()
    }

    /// `residual` plus [`linear`](Self::linear).
    fn linear_residual(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        residual.plus(<Self as LinearOps>::linear(x_ni, w_oi, bias_o))
    }

    /// `residual` plus [`lora_linear`](Self::lora_linear).
    fn lora_linear_residual(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: LowRank<Self>,
    ) -> Tensor<Self, 2> {
        Self::lora_linear_residual_saving(residual, x_ni, w_oi, bias_o, &update).0
    }

    /// [`linear`](Self::linear) whose value is known already: nothing is computed, and under autodiff the
    /// node is the same.
    fn linear_cached(
        _x_ni: Tensor<Self, 2>,
        _w_oi: impl Into<Weight<Self>>,
        _bias_o: Option<Tensor<Self, 1>>,
        y_no: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        y_no
    }

    /// [`lora_linear`](Self::lora_linear) whose value is known already; `known` is what
    /// [`lora_linear_saving`](Self::lora_linear_saving) returned.
    fn lora_linear_cached(
        _x_ni: Tensor<Self, 2>,
        _w_oi: impl Into<Weight<Self>>,
        _update: LowRank<Self>,
        known: (Tensor<Self, 2>, Tensor<Self, 2>),
    ) -> Tensor<Self, 2> {
        known.0
    }

    /// [`lora_linear`](Self::lora_linear), and `scale * x a^T`.
    fn lora_linear_saving(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let (low_no, down_nr) = reference::low_rank(x_ni.clone(), update);
        (<Self as LinearOps>::linear(x_ni, w_oi, bias_o) + low_no, down_nr)
    }

    /// [`lora_linear_residual`](Self::lora_linear_residual), and `scale * x a^T`.
    fn lora_linear_residual_saving(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let (y_no, down_nr) = Self::lora_linear_saving(x_ni, w_oi, bias_o, update);
        (residual.plus(y_no), down_nr)
    }

    /// The gradients of `x` (if `wants_dx`), `a` and `b` under [`lora_linear`](Self::lora_linear).
    fn lora_linear_backward(
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
    ) -> LowRankGradients<Self> {
        let dense_ni = wants_dx.then(|| Self::linear_input_gradient(dy_no.clone(), saved.w_oi.clone()));
        backward::low_rank(saved, dy_no, wants_dx).beside(dense_ni)
    }

    /// The gradients under [`lora_linear`](Self::lora_linear), that of `x` added to `sum`, its gradient by
    /// way of others who read it.
    fn lora_linear_backward_residual(
        sum_ni: Tensor<Self, 2>,
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
    ) -> LowRankGradients<Self> {
        Self::lora_linear_backward(saved, dy_no, true).with_residual(sum_ni)
    }

    /// Layers of one input as one product: each [`linear`](Self::linear), or
    /// [`lora_linear`](Self::lora_linear), the outputs side by side. Gradients reach `x` and the updates.
    fn joined(x_ni: Tensor<Self, 2>, layers: JoinedLayers<Self>) -> Tensor<Self, 2> {
        Self::joined_saving(x_ni, &layers).0
    }

    /// The product of [`joined`](Self::joined), and `scale * x a^T` of each update, side by side.
    fn joined_saving(
        x_ni: Tensor<Self, 2>,
        layers: &JoinedLayers<Self>,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 2>>) {
        Self::apart_saving(x_ni, layers)
    }

    /// [`joined`](Self::joined) whose value is known already; `known` is what
    /// [`joined_saving`](Self::joined_saving) returned.
    fn joined_cached(
        _x_ni: Tensor<Self, 2>,
        _layers: JoinedLayers<Self>,
        known: (Tensor<Self, 2>, Option<Tensor<Self, 2>>),
    ) -> Tensor<Self, 2> {
        known.0
    }

    /// The gradients of `x` (if `wants_dx`, and added to `sum_ni`, that by way of others who read it) and of
    /// the updates under [`joined`](Self::joined).
    fn joined_backward(
        saved: JoinedSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
        sum_ni: Option<Tensor<Self, 2>>,
    ) -> JoinedGradients<Self> {
        Self::apart_backward(saved, dy_no, wants_dx, sum_ni)
    }

    /// [`joined_saving`](Self::joined_saving) layer by layer: where a product of its own costs nothing, and
    /// for sizes that have no kernels.
    fn apart_saving(
        x_ni: Tensor<Self, 2>,
        layers: &JoinedLayers<Self>,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 2>>) {
        let (ys, downs): (Vec<_>, Vec<_>) = Self::linears_saving(x_ni, layers.apart()).into_iter().unzip();
        let downs: Vec<_> = downs.into_iter().flatten().collect();
        (Tensor::cat(ys, 1), (!downs.is_empty()).then(|| Tensor::cat(downs, 1)))
    }

    /// [`joined_backward`](Self::joined_backward) layer by layer.
    fn apart_backward(
        saved: JoinedSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
        sum_ni: Option<Tensor<Self, 2>>,
    ) -> JoinedGradients<Self> {
        let JoinedSaved { x_ni, down_nr, layers } = saved;
        let (mut dx_ni, mut updates, mut from, mut rank_from) = (sum_ni, Vec::new(), 0, 0);
        for LinearLayer { w_oi, update, .. } in layers.apart() {
            let outputs = w_oi.dims()[0];
            let dy_no = dy_no.clone().narrow(1, from, outputs);
            from += outputs;
            let made = match update.zip(down_nr.clone()) {
                None => wants_dx.then(|| Self::linear_input_gradient(dy_no, w_oi)),
                Some((update, down_nr)) => {
                    let rank = update.a_ri.dims()[0];
                    let down_nr = down_nr.narrow(1, rank_from, rank);
                    rank_from += rank;
                    let saved = LowRankSaved { x_ni: x_ni.clone(), down_nr, w_oi, update };
                    let gradients = Self::lora_linear_backward(saved, dy_no, wants_dx);
                    updates.push([gradients.da_ri, gradients.db_or]);
                    gradients.dx_ni
                }
            };
            dx_ni = match (dx_ni, made) {
                (Some(sum_ni), Some(made_ni)) => Some(sum_ni + made_ni),
                (sum_ni, made_ni) => sum_ni.or(made_ni),
            };
        }
        JoinedGradients { dx_ni, updates }
    }
}
