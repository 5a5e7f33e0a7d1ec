//! The nodes of linear layers, whose values may be known from elsewhere.

use burn::{backend::Autodiff, tensor::Tensor};

use super::node::{TrackedTensor, plain, primitive, record, record_residual, tracked};
use crate::kernels::{
    JoinedGradients, JoinedLayers, JoinedSaved, LowRank, LowRankSaved, ModelBackend, Weight,
};

/// See [`Tape::linear_leaving_weight`](super::super::Tape::linear_leaving_weight), whose value is `y`. The
/// leaf is a parent of the node, so that the node is recorded even if nothing else is tracked, and never gets
/// a gradient from it.
pub fn linear_leaving_weight<B: ModelBackend>(
    y_no: Tensor<B, 2>,
    x_ni: Tensor<Autodiff<B>, 2>,
    w_oi: Tensor<Autodiff<B>, 2>,
    bias_o: Option<Tensor<Autodiff<B>, 1>>,
    leave: impl FnOnce(Tensor<B, 2>, Tensor<B, 2>) + Send + 'static,
) -> Tensor<Autodiff<B>, 2> {
    let (x, leaf, bias) = (tracked(x_ni), tracked(w_oi), bias_o.map(tracked));
    let w_for_dx = x.is_tracked().then(|| plain::<B, 2>(&leaf));
    let left = leaf.is_tracked().then(|| (leave, plain::<B, 2>(&x)));
    let pull_back = move |dy_no: Tensor<B, 2>| {
        if let Some((leave, x_ni)) = left {
            leave(dy_no.clone(), x_ni);
        }
        w_for_dx.map(|w_oi| primitive(B::linear_input_gradient(dy_no, w_oi)))
    };
    match bias {
        None => record([&x, &leaf], y_no, move |dy_no| [pull_back(dy_no), None]),
        Some(bias) => {
            let wants_db = bias.is_tracked();
            record([&x, &leaf, &bias], y_no, move |dy_no: Tensor<B, 2>| {
                let db = wants_db.then(|| primitive(B::linear_bias_gradient(dy_no.clone())));
                [pull_back(dy_no), None, db]
            })
        }
    }
}

/// The node of [`LinearOps::linear`] with the value `y_no`.
pub(super) fn linear_node<B: ModelBackend>(
    x: TrackedTensor<B>,
    w_oi: Weight<Autodiff<B>>,
    bias: Option<TrackedTensor<B>>,
    y_no: Tensor<B, 2>,
) -> Tensor<Autodiff<B>, 2> {
    let w = match w_oi {
        Weight::Dense(w_oi) => tracked(w_oi),
        few_bits => return quantized_node(x, few_bits.inner(), bias, y_no),
    };
    let w_for_dx = x.is_tracked().then(|| plain::<B, 2>(&w));
    let x_for_dw = w.is_tracked().then(|| plain::<B, 2>(&x));
    let w_dtype = plain::<B, 2>(&w).dtype();
    let dx = |dy_no: &Tensor<B, 2>, w_oi| primitive(B::linear_input_gradient(dy_no.clone(), w_oi));
    let dw = move |dy_no: &Tensor<B, 2>, x_ni| {
        let dw_oi = B::linear_weight_gradient(dy_no.clone(), x_ni);
        primitive(if dw_oi.dtype() == w_dtype { dw_oi } else { dw_oi.cast(w_dtype) })
    };
    match bias {
        None => record([&x, &w], y_no, move |dy_no: Tensor<B, 2>| {
            [w_for_dx.map(|w_oi| dx(&dy_no, w_oi)), x_for_dw.map(|x_ni| dw(&dy_no, x_ni))]
        }),
        Some(bias) => {
            let wants_db = bias.is_tracked();
            record([&x, &w, &bias], y_no, move |dy_no: Tensor<B, 2>| {
                let db = wants_db.then(|| primitive(B::linear_bias_gradient(dy_no.clone())));
                [w_for_dx.map(|w_oi| dx(&dy_no, w_oi)), x_for_dw.map(|x_ni| dw(&dy_no, x_ni)), db]
            })
        }
    }
}

/// The node of [`LinearOps::linear`] with a weight that is no tensor.
fn quantized_node<B: ModelBackend>(
    x: TrackedTensor<B>,
    w_oi: Weight<B>,
    bias: Option<TrackedTensor<B>>,
    y_no: Tensor<B, 2>,
) -> Tensor<Autodiff<B>, 2> {
    let w_for_dx = x.is_tracked().then_some(w_oi);
    let dx = move |dy_no| w_for_dx.map(|w_oi| primitive(B::linear_input_gradient(dy_no, w_oi)));
    match bias {
        None => record([&x], y_no, move |dy_no| [dx(dy_no)]),
        Some(bias) => {
            let wants_db = bias.is_tracked();
            record([&x, &bias], y_no, move |dy_no: Tensor<B, 2>| {
                let db = wants_db.then(|| primitive(B::linear_bias_gradient(dy_no.clone())));
                [dx(dy_no), db]
            })
        }
    }
}

/// The node of [`LinearOps::lora_linear`] under a frozen weight: inputs `x`, and `a` and `b` of `update`;
/// values as `lora_linear_saving` returns them.
pub(super) fn lora_linear_node<B: ModelBackend>(
    [x, a, b]: [TrackedTensor<B>; 3],
    w_oi: Weight<B>,
    update: LowRank<B>,
    y_no: Tensor<B, 2>,
    down_nr: Tensor<B, 2>,
) -> Tensor<Autodiff<B>, 2> {
    let saved = LowRankSaved { x_ni: plain(&x), down_nr, w_oi, update };
    let wants_dx = x.is_tracked();
    record_residual([&x, &a, &b], y_no, move |dy_no, sum| {
        let gradients = match sum {
            Some(sum_ni) => B::lora_linear_backward_residual(sum_ni, saved, dy_no),
            None => B::lora_linear_backward(saved, dy_no, wants_dx),
        };
        [gradients.dx_ni.map(primitive), Some(primitive(gradients.da_ri)), Some(primitive(gradients.db_or))]
    })
}

/// The node of [`LinearOps::joined`]; `known` as `joined_saving` returns it. Inputs are `x`, and `a` and `b`
/// of as many updates as there are.
pub(super) fn joined_node<B: ModelBackend>(
    x: TrackedTensor<B>,
    layers: JoinedLayers<Autodiff<B>>,
    known: (Tensor<B, 2>, Option<Tensor<B, 2>>),
) -> Tensor<Autodiff<B>, 2> {
    match layers.updates.len() {
        0 => joined_node_of::<B, 1>(x, layers, known),
        1 => joined_node_of::<B, 3>(x, layers, known),
        2 => joined_node_of::<B, 5>(x, layers, known),
        3 => joined_node_of::<B, 7>(x, layers, known),
        more => unreachable!("{more} layers are joined nowhere"),
    }
}

fn joined_node_of<B: ModelBackend, const N: usize>(
    x: TrackedTensor<B>,
    layers: JoinedLayers<Autodiff<B>>,
    known: (Tensor<B, 2>, Option<Tensor<B, 2>>),
) -> Tensor<Autodiff<B>, 2> {
    let (y_no, down_nr) = known;
    let matrices = layers.updates.iter().flat_map(|update| [&update.a_ri, &update.b_or]);
    let factors: Vec<_> = matrices.map(|matrix| tracked(matrix.clone())).collect();
    let inputs: [&TrackedTensor<B>; N] =
        std::array::from_fn(|number| if number == 0 { &x } else { &factors[number - 1] });
    let saved = JoinedSaved { x_ni: plain(&x), down_nr, layers: joined_inner(layers) };
    let wants_dx = x.is_tracked();
    record_residual(inputs, y_no, move |dy_no, sum_ni| {
        let JoinedGradients { dx_ni, updates } = B::joined_backward(saved, dy_no, wants_dx, sum_ni);
        let all = std::iter::once(dx_ni).chain(updates.into_iter().flatten().map(Some));
        let mut all = all.map(|gradient| gradient.map(primitive));
        std::array::from_fn(|_| all.next().flatten())
    })
}

/// An update without its graph.
pub(super) fn inner<B: ModelBackend>(update: LowRank<Autodiff<B>>) -> LowRank<B> {
    let LowRank { a_ri, b_or, scale, dropout } = update;
    LowRank {
        a_ri: a_ri.inner(),
        b_or: b_or.inner(),
        scale,
        dropout: dropout.map(|dropout| dropout.changed(Tensor::inner)),
    }
}

/// Joined layers as they are underneath.
pub(super) fn joined_inner<B: ModelBackend>(layers: JoinedLayers<Autodiff<B>>) -> JoinedLayers<B> {
    let JoinedLayers { w_oi, bias_o, updates, outputs, rounded } = layers;
    JoinedLayers {
        w_oi: w_oi.inner(),
        bias_o: bias_o.map(Tensor::inner),
        updates: updates.into_iter().map(inner).collect(),
        outputs,
        rounded,
    }
}
