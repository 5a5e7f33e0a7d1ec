//! Every operation as one node of burn's autodiff graph.
//!
//! Forward, an operation runs on the backend underneath; if any input is tracked, [`record`] registers one
//! node that owns exactly what the backward method of that backend needs, as a closure. Nothing is kept for
//! an input that is not tracked.
//!
//! ```text
//! here     operations
//! linear   the nodes of linear layers
//! node     a closure as a node
//! ```
//!
//! What it does not do: burn's own per-operation checkpointing (layers are recomputed as a whole instead).

mod linear;
mod node;

use burn::{
    backend::Autodiff,
    tensor::{DType, Tensor},
};
use burn_autodiff::ops::Backward;

pub(super) use self::linear::linear_leaving_weight;
use self::{
    linear::{inner, joined_inner, joined_node, linear_node, lora_linear_node},
    node::{
        Node, TrackedTensor, finish, from_primitive, is_tracked, plain, primitive, record, record_residual,
        tracked,
    },
};
use super::{
    AdaNorm, AttentionMask, AttentionOps, AttentionSaved, FlatOps, JoinedHeads, JoinedLayers, LinearLayer,
    LinearOps, LowRank, ModelBackend, Residual, RopeMask, RowOps, Weight, WeightOps, packed::PackedMatrix,
};

/// Frees what passes that were broken off have recorded. burn does so at the end of a backward pass only
/// (`cleanup_orphaned_entries` in burn-autodiff 0.21), so the smallest one is run.
pub fn free_broken_off<B: ModelBackend>(device: &B::Device) {
    Tensor::<Autodiff<B>, 1>::zeros([1], device).require_grad().backward();
}

impl<B: ModelBackend> RowOps for Autodiff<B> {
    fn rms_norm(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        rms_norm_node(tracked(x_nd), tracked(gain_d), eps, |x_nd, gain_d| B::rms_norm(x_nd, gain_d, eps))
    }

    fn rms_norm_for_rounding(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        eps: f64,
        to: DType,
    ) -> Tensor<Self, 2> {
        let value = |x_nd, gain_d| B::rms_norm_for_rounding(x_nd, gain_d, eps, to);
        rms_norm_node(tracked(x_nd), tracked(gain_d), eps, value)
    }

    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (gate, up) = (tracked(gate_nf), tracked(up_nf));
        let (gate_nf, up_nf) = (plain::<B, 2>(&gate), plain::<B, 2>(&up));
        let y_nf = B::swiglu(gate_nf.clone(), up_nf.clone());
        record([&gate, &up], y_nf, move |dy_nf| {
            let (dgate, dup) = B::swiglu_backward(gate_nf, up_nf, dy_nf);
            [Some(primitive(dgate)), Some(primitive(dup))]
        })
    }

    fn swiglu_joined(gate_up_ne: Tensor<Self, 2>, to: Option<DType>) -> Tensor<Self, 2> {
        let gate_up = tracked(gate_up_ne);
        let gate_up_ne = plain::<B, 2>(&gate_up);
        let y_nf = B::swiglu_joined(gate_up_ne.clone(), to);
        record([&gate_up], y_nf, move |dy_nf| {
            [Some(primitive(B::swiglu_joined_backward(gate_up_ne, dy_nf, to)))]
        })
    }

    fn sum_unread(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (x, y) = (tracked(x_nd), tracked(y_nd));
        record([&x, &y], plain::<B, 2>(&x), |dy_nd| {
            [dy_nd.clone(), dy_nd].map(|dy_nd| Some(primitive(dy_nd)))
        })
    }

    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        let inputs = [tracked(x_nd), tracked(scale_bd), tracked(shift_bd)];
        let [x_nd, scale_bd, shift_bd] = inputs.each_ref().map(plain::<B, 2>);
        let y_nd = B::modulated_layer_norm(x_nd.clone(), scale_bd.clone(), shift_bd, eps);
        record(inputs.each_ref(), y_nd, move |dy_nd| {
            B::modulated_layer_norm_backward(x_nd, scale_bd, dy_nd, eps)
                .map(|gradient| Some(primitive(gradient)))
        })
    }

    fn layer_norm(x_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        let x = tracked(x_nd);
        let x_nd = plain::<B, 2>(&x);
        let y_nd = <B as RowOps>::layer_norm(x_nd.clone(), eps);
        record_residual([&x], y_nd, move |dy_nd, sum| {
            [Some(primitive(match sum {
                Some(sum_nd) => B::layer_norm_backward_residual(sum_nd, x_nd, dy_nd, eps),
                None => B::layer_norm_backward(x_nd, dy_nd, eps),
            }))]
        })
    }

    fn ada_layer_norm(x_nd: Tensor<Self, 2>, ada_be: Tensor<Self, 2>, how: AdaNorm) -> Tensor<Self, 2> {
        let inputs = [tracked(x_nd), tracked(ada_be)];
        let [x_nd, ada_be] = inputs.each_ref().map(plain::<B, 2>);
        let y_nd = B::ada_layer_norm(x_nd.clone(), ada_be.clone(), how);
        record_residual(inputs.each_ref(), y_nd, move |dy_nd, sum| {
            B::ada_layer_norm_backward(sum, x_nd, ada_be, dy_nd, how)
                .map(|gradient| Some(primitive(gradient)))
        })
    }

    fn rounded(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let x = tracked(x_nd);
        let node = Node.prepare([x.node]);
        finish(node, B::rounded(from_primitive(x.primitive)), |dy_nd| [Some(primitive(dy_nd))])
    }

    fn rounded_sum(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (x, y) = (tracked(x_nd), tracked(y_nd));
        let node = Node.prepare([x.node, y.node]);
        let sum_nd = B::rounded_sum(from_primitive(x.primitive), from_primitive(y.primitive));
        finish(node, sum_nd, |dy_nd| [dy_nd.clone(), dy_nd].map(|dy_nd| Some(primitive(dy_nd))))
    }

    fn gelu_tanh(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let x = tracked(x_nf);
        let x_nf = plain::<B, 2>(&x);
        let y_nf = B::gelu_tanh(x_nf.clone());
        record([&x], y_nf, move |dy_nf| [Some(primitive(B::gelu_tanh_backward(x_nf, dy_nf)))])
    }

    fn gelu_erf(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let x = tracked(x_nf);
        let x_nf = plain::<B, 2>(&x);
        let y_nf = B::gelu_erf(x_nf.clone());
        record([&x], y_nf, move |dy_nf| [Some(primitive(B::gelu_erf_backward(x_nf, dy_nf)))])
    }
}

impl<B: ModelBackend> AttentionOps for Autodiff<B> {
    fn rotary(
        x_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        let (x, cos_bsk, sin_bsk) = (tracked(x_bshk), cos_bsk.inner(), sin_bsk.inner());
        let y_bshk = B::rotary(plain(&x), cos_bsk.clone(), sin_bsk.clone());
        record([&x], y_bshk, move |dy_bshk| [Some(primitive(B::rotary_backward(dy_bshk, cos_bsk, sin_bsk)))])
    }

    fn attention(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> Tensor<Self, 4> {
        let inputs = [tracked(q_bshk), tracked(k_bshk), tracked(v_bshk)];
        let [q_bshk, k_bshk, v_bshk] = B::attention_inputs(inputs.each_ref().map(plain::<B, 4>), mask);
        let output = B::attention_saving(q_bshk.clone(), k_bshk.clone(), v_bshk.clone(), mask, scale);
        let (out_bshk, mask) = (output.out_bshk.clone(), mask.clone());
        let saved = AttentionSaved { q_bshk, k_bshk, v_bshk, output };
        record(inputs.each_ref(), out_bshk, move |dout_bshk| {
            let gradients = B::attention_backward(saved, &mask, scale, dout_bshk);
            B::attention_gradients(gradients).map(|gradient| Some(primitive(gradient)))
        })
    }

    fn biased_attention(inputs_bshk: [Tensor<Self, 4>; 3], added: &[Tensor<Self, 4>]) -> Tensor<Self, 4> {
        let inputs = inputs_bshk.map(tracked);
        let by_head_bhsk = inputs.each_ref().map(|input| plain::<B, 4>(input).swap_dims(1, 2));
        let trained = added.iter().find(|added| is_tracked(added)).cloned().map(tracked);
        let added: Vec<_> = added.iter().map(|added| added.clone().inner()).collect();
        let [q_bhsk, k_bhsk, v_bhsk] = by_head_bhsk.clone();
        let weights = B::biased_softmax(q_bhsk.matmul(k_bhsk.swap_dims(2, 3)), &added);
        let out_bshk = B::heads_inside(weights.clone().matmul(v_bhsk));
        let Some(trained) = trained else {
            return record(inputs.each_ref(), out_bshk, move |dout_bshk| {
                let (gradients, _) = B::biased_attention_backward(by_head_bhsk, weights, dout_bshk, false);
                gradients.map(|gradient| Some(primitive(gradient)))
            });
        };
        let [q, k, v] = inputs.each_ref();
        record([q, k, v, &trained], out_bshk, move |dout_bshk| {
            let ([dq, dk, dv], dadded) = B::biased_attention_backward(by_head_bhsk, weights, dout_bshk, true);
            [Some(dq), Some(dk), Some(dv), dadded].map(|gradient| gradient.map(primitive))
        })
    }

    fn rope_attention(
        inputs_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
        mask: &AttentionMask,
        scale: f64,
    ) -> Tensor<Self, 4> {
        let (inputs, tables_bsk) = (inputs_bshk.map(tracked), tables_bsk.map(Tensor::inner));
        // Inputs are used up: what is turned is kept, and not what was. Their places in the graph stay taken
        // until the node is there.
        let places = inputs.each_ref().map(|input| input.rc.clone());
        let node = Node.prepare(inputs.each_ref().map(|input| input.node.clone()));
        let inputs_bshk = inputs.map(|input| from_primitive::<B, 4>(input.primitive));
        let [q_bshk, k_bshk, v_bshk] = B::rope(inputs_bshk, tables_bsk.clone());
        let output = B::attention_saving(q_bshk.clone(), k_bshk.clone(), v_bshk.clone(), mask, scale);
        let (out_bshk, mask) = (output.out_bshk.clone(), mask.clone());
        let saved = AttentionSaved { q_bshk, k_bshk, v_bshk, output };
        let out_bshk = finish(node, out_bshk, move |dout_bshk| {
            let gradients = B::attention_backward(saved, &mask, scale, dout_bshk);
            B::rope_backward(gradients, tables_bsk).map(|gradient| Some(primitive(gradient)))
        });
        drop(places);
        out_bshk
    }

    fn rope_attention_joined(qkv: JoinedHeads<Self>, attending: RopeMask<'_, Self>) -> Tensor<Self, 4> {
        let JoinedHeads { qkv_no, rows, heads } = qkv;
        let RopeMask { tables_bsk, mask, scale, to } = attending;
        let (input, tables_bsk) = (tracked(qkv_no), tables_bsk.map(Tensor::inner));
        let (place, node) = (input.rc.clone(), Node.prepare([input.node.clone()]));
        let parts = JoinedHeads { qkv_no: from_primitive::<B, 2>(input.primitive), rows, heads }.parts();
        let [q_bshk, k_bshk, v_bshk] = B::rope(parts, tables_bsk.clone());
        let output = B::attention_saving(q_bshk.clone(), k_bshk.clone(), v_bshk.clone(), mask, scale);
        let (out_bshk, mask) = (output.out_bshk.clone(), mask.clone());
        let saved = AttentionSaved { q_bshk, k_bshk, v_bshk, output };
        let out_bshk = finish(node, out_bshk, move |dout_bshk| {
            let gradients = B::attention_backward(saved, &mask, scale, dout_bshk);
            [Some(primitive(B::rope_backward_joined(gradients, tables_bsk, to)))]
        });
        drop(place);
        out_bshk
    }
}

impl<B: ModelBackend> WeightOps for Autodiff<B> {
    fn unpacked(parts: &[PackedMatrix<Self>]) -> Tensor<Self, 2> {
        Tensor::from_inner(B::unpacked(&packed_inner(parts)))
    }
}

impl<B: ModelBackend> LinearOps for Autodiff<B> {
    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let (x, w_oi, bias) = (tracked(x_ni), w_oi.into(), bias_o.map(tracked));
        let y_no = <B as LinearOps>::linear(plain(&x), w_oi.clone().inner(), bias.as_ref().map(plain));
        linear_node(x, w_oi, bias, y_no)
    }

    fn linear_cached(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        y_no: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        linear_node(tracked(x_ni), w_oi.into(), bias_o.map(tracked), y_no.inner())
    }

    fn lora_linear(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: LowRank<Self>,
    ) -> Tensor<Self, 2> {
        let w_oi = w_oi.into();
        if w_oi.is_tracked() || bias_o.as_ref().is_some_and(is_tracked) {
            // Rare: the weight trains beside its update.
            let read_ni = update.input(x_ni.clone());
            let down_nr = <Self as LinearOps>::linear(read_ni, update.a_ri, None) * update.scale;
            return <Self as LinearOps>::linear(x_ni, w_oi, bias_o)
                + <Self as LinearOps>::linear(down_nr, update.b_or, None);
        }
        let (w_oi, bias_o) = (w_oi.inner(), bias_o.map(Tensor::inner));
        let inputs = [tracked(x_ni), tracked(update.a_ri.clone()), tracked(update.b_or.clone())];
        let update = inner(update);
        let (y_no, down_nr) = B::lora_linear_saving(plain(&inputs[0]), w_oi.clone(), bias_o, &update);
        lora_linear_node(inputs, w_oi, update, y_no, down_nr)
    }

    fn lora_linear_cached(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        update: LowRank<Self>,
        (y_no, down_nr): (Tensor<Self, 2>, Tensor<Self, 2>),
    ) -> Tensor<Self, 2> {
        let w_oi = w_oi.into();
        assert!(
            !w_oi.is_tracked(),
            "a weight that trains beside its update has no value known from elsewhere"
        );
        let inputs = [tracked(x_ni), tracked(update.a_ri.clone()), tracked(update.b_or.clone())];
        lora_linear_node(inputs, w_oi.inner(), inner(update), y_no.inner(), down_nr.inner())
    }

    fn lora_linear_residual(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: LowRank<Self>,
    ) -> Tensor<Self, 2> {
        residual.plus(Self::lora_linear(x_ni, w_oi, bias_o, update))
    }

    fn linears(x_ni: Tensor<Self, 2>, layers: Vec<LinearLayer<Self>>) -> Vec<Tensor<Self, 2>> {
        let trains_beside = |layer: &LinearLayer<Self>| {
            layer.update.is_some()
                && (layer.w_oi.is_tracked() || layer.bias_o.as_ref().is_some_and(is_tracked))
        };
        if layers.iter().any(trains_beside) {
            let each = layers.into_iter().map(|LinearLayer { w_oi, bias_o, update }| match update {
                Some(update) => Self::lora_linear(x_ni.clone(), w_oi, bias_o, update),
                None => <Self as LinearOps>::linear(x_ni.clone(), w_oi, bias_o),
            });
            return each.collect();
        }
        let plain_layers = layers.iter().cloned().map(|LinearLayer { w_oi, bias_o, update }| LinearLayer {
            w_oi: w_oi.inner(),
            bias_o: bias_o.map(Tensor::inner),
            update: update.map(inner),
        });
        let x = tracked(x_ni);
        let values = B::linears_saving(plain(&x), plain_layers.collect());
        let nodes = layers.into_iter().zip(values).map(|(layer, (y_no, down_nr))| {
            let LinearLayer { w_oi, bias_o, update } = layer;
            match (update, down_nr) {
                (Some(update), Some(down_nr)) => {
                    let inputs = [x.clone(), tracked(update.a_ri.clone()), tracked(update.b_or.clone())];
                    lora_linear_node(inputs, w_oi.inner(), inner(update), y_no, down_nr)
                }
                _ => linear_node(x.clone(), w_oi, bias_o.map(tracked), y_no),
            }
        });
        nodes.collect()
    }

    fn joined(x_ni: Tensor<Self, 2>, layers: JoinedLayers<Self>) -> Tensor<Self, 2> {
        let known = B::joined_saving(x_ni.clone().inner(), &joined_inner(layers.clone()));
        joined_node(tracked(x_ni), layers, known)
    }

    fn joined_cached(
        x_ni: Tensor<Self, 2>,
        layers: JoinedLayers<Self>,
        (y_no, down_nr): (Tensor<Self, 2>, Option<Tensor<Self, 2>>),
    ) -> Tensor<Self, 2> {
        joined_node(tracked(x_ni), layers, (y_no.inner(), down_nr.map(Tensor::inner)))
    }
}

/// A norm with this value.
fn rms_norm_node<B: ModelBackend>(
    x: TrackedTensor<B>,
    gain: TrackedTensor<B>,
    eps: f64,
    value: impl FnOnce(Tensor<B, 2>, Tensor<B, 1>) -> Tensor<B, 2>,
) -> Tensor<Autodiff<B>, 2> {
    let (x_nd, gain_d) = (plain::<B, 2>(&x), plain::<B, 1>(&gain));
    let y_nd = value(x_nd.clone(), gain_d.clone());
    let of_x = move |x_nd, gain_d, dy_nd, sum| {
        primitive(match sum {
            Some(sum_nd) => B::rms_norm_backward_residual(sum_nd, x_nd, gain_d, dy_nd, eps),
            None => B::rms_norm_backward(x_nd, gain_d, dy_nd, eps),
        })
    };
    if !gain.is_tracked() {
        return record_residual([&x], y_nd, move |dy_nd, sum| [Some(of_x(x_nd, gain_d, dy_nd, sum))]);
    }
    let wants_dx = x.is_tracked();
    record_residual([&x, &gain], y_nd, move |dy_nd: Tensor<B, 2>, sum| {
        let dgain = B::rms_norm_gain_gradient(x_nd.clone(), dy_nd.clone(), eps);
        [wants_dx.then(|| of_x(x_nd, gain_d, dy_nd, sum)), Some(primitive(dgain))]
    })
}

impl<B: ModelBackend> FlatOps for Autodiff<B> {
    type Flat = Vec<f32>;
}

impl<B: ModelBackend> ModelBackend for Autodiff<B> {}

impl<B: ModelBackend> Weight<Autodiff<B>> {
    /// Without its graph.
    fn inner(self) -> Weight<B> {
        match self {
            Self::Dense(w_oi) => Weight::Dense(w_oi.inner()),
            Self::Quantized(matrix) => Weight::Quantized(matrix),
            Self::Packed(parts) => Weight::Packed(packed_inner(&parts)),
        }
    }

    fn is_tracked(&self) -> bool {
        matches!(self, Self::Dense(w_oi) if is_tracked(w_oi))
    }
}

fn packed_inner<B: ModelBackend>(parts: &[PackedMatrix<Autodiff<B>>]) -> Vec<PackedMatrix<B>> {
    parts.iter().map(|part| part.clone().changed(Tensor::inner)).collect()
}
