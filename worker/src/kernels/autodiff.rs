//! Every operation as one node of burn's autodiff graph.
//!
//! Forward, an operation runs on the backend underneath; if any input is tracked, [`record`] registers one node that owns
//! exactly what the backward method of that backend needs, as a closure. Nothing is kept for an input that is not tracked.
//!
//! What it does not do: burn's own per-operation checkpointing (layers are recomputed as a whole instead).

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use burn::{
    backend::Autodiff,
    tensor::{
        Tensor, TensorPrimitive,
        backend::{AutodiffBackend, Backend, BackendTypes},
    },
};
use burn_autodiff::{
    checkpoint::{base::Checkpointer, strategy::NoCheckpointing},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind, OpsPrep},
};

use super::{AttentionMask, AttentionSaved, LinearLayer, LowRank, LowRankSaved, ModelBackend, Onto};

type Plain<B> = <B as BackendTypes>::FloatTensorPrimitive;
type Tracked<B> = <Autodiff<B> as BackendTypes>::FloatTensorPrimitive;
/// Gradients of a node's inputs; none where an input is not tracked.
type Pulled<B, const N: usize> = [Option<Plain<B>>; N];
/// Takes the gradient of the output to those of the inputs.
enum PullBack<B: BackendTypes, const N: usize> {
    /// As they are.
    Apart(Box<dyn FnOnce(Plain<B>) -> Pulled<B, N> + Send>),
    /// The first one together with what it is so far, by way of others who read the input: one pass less over it than a sum of its own.
    Onto(Box<dyn FnOnce(Plain<B>, Option<Plain<B>>) -> Pulled<B, N> + Send>),
}

/// A node whose output is not known yet.
type Unfinished<B, const N: usize> = OpsPrep<Node, B, State<B, N>, NoCheckpointing, N>;

impl<B: ModelBackend> ModelBackend for Autodiff<B> {
    type Flat = Vec<f32>;

    fn rms_norm(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        let (x, gain_d) = (tracked(x_nd), gain_d.inner());
        let y_nd = B::rms_norm(plain(&x), gain_d.clone(), eps);
        let x_nd = plain::<B, 2>(&x);
        record_onto([&x], y_nd, move |dy_nd, sum| {
            [Some(primitive(match sum {
                Some(sum_nd) => B::rms_norm_backward_onto(sum_nd, x_nd, gain_d, dy_nd, eps),
                None => B::rms_norm_backward(x_nd, gain_d, dy_nd, eps),
            }))]
        })
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

    fn turned_attention(
        inputs_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
        mask: &AttentionMask,
        scale: f64,
    ) -> Tensor<Self, 4> {
        let (inputs, tables_bsk) = (inputs_bshk.map(tracked), tables_bsk.map(Tensor::inner));
        // Inputs are used up: what is turned is kept, and not what was. Their places in the graph stay taken until the node is there.
        let places = inputs.each_ref().map(|input| input.rc.clone());
        let node = Node.prepare(inputs.each_ref().map(|input| input.node.clone()));
        let inputs_bshk = inputs.map(|input| from_primitive::<B, 4>(input.primitive));
        let [q_bshk, k_bshk, v_bshk] = B::turned(inputs_bshk, tables_bsk.clone());
        let output = B::attention_saving(q_bshk.clone(), k_bshk.clone(), v_bshk.clone(), mask, scale);
        let (out_bshk, mask) = (output.out_bshk.clone(), mask.clone());
        let saved = AttentionSaved { q_bshk, k_bshk, v_bshk, output };
        let out_bshk = finish(node, out_bshk, move |dout_bshk| {
            let gradients = B::attention_backward(saved, &mask, scale, dout_bshk);
            B::turned_backward(gradients, tables_bsk).map(|gradient| Some(primitive(gradient)))
        });
        drop(places);
        out_bshk
    }

    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let (x, w, bias) = (tracked(x_ni), tracked(w_oi), bias_o.map(tracked));
        let y_no = <B as ModelBackend>::linear(plain(&x), plain(&w), bias.as_ref().map(plain));
        linear_node(x, w, bias, y_no)
    }

    fn linear_known(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        y_no: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        linear_node(tracked(x_ni), tracked(w_oi), bias_o.map(tracked), y_no.inner())
    }

    fn lora_linear(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: LowRank<Self>,
    ) -> Tensor<Self, 2> {
        if is_tracked(&w_oi) || bias_o.as_ref().is_some_and(is_tracked) {
            // Rare: the weight trains beside its update.
            let down_nr = <Self as ModelBackend>::linear(x_ni.clone(), update.a_ri, None) * update.scale;
            return <Self as ModelBackend>::linear(x_ni, w_oi, bias_o)
                + <Self as ModelBackend>::linear(down_nr, update.b_or, None);
        }
        let (x, a, b) = (tracked(x_ni), tracked(update.a_ri), tracked(update.b_or));
        let (w_oi, bias_o) = (w_oi.inner(), bias_o.map(Tensor::inner));
        let update = LowRank { a_ri: plain(&a), b_or: plain(&b), scale: update.scale };
        let (y_no, down_nr) = B::lora_linear_saving(plain(&x), w_oi.clone(), bias_o, &update);
        lora_linear_node([x, a, b], (w_oi, update.scale), (y_no, down_nr))
    }

    fn lora_linear_known(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        update: LowRank<Self>,
        (y_no, down_nr): (Tensor<Self, 2>, Tensor<Self, 2>),
    ) -> Tensor<Self, 2> {
        assert!(
            !is_tracked(&w_oi),
            "a weight that trains beside its update has no value known from elsewhere"
        );
        let inputs = [tracked(x_ni), tracked(update.a_ri), tracked(update.b_or)];
        lora_linear_node(inputs, (w_oi.inner(), update.scale), (y_no.inner(), down_nr.inner()))
    }

    fn lora_linear_onto(
        onto: Onto<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: LowRank<Self>,
    ) -> Tensor<Self, 2> {
        onto.plus(Self::lora_linear(x_ni, w_oi, bias_o, update))
    }

    fn sum_unread(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let (x, y) = (tracked(x_nd), tracked(y_nd));
        record([&x, &y], plain::<B, 2>(&x), |dy_nd| {
            [dy_nd.clone(), dy_nd].map(|dy_nd| Some(primitive(dy_nd)))
        })
    }

    fn linears(x_ni: Tensor<Self, 2>, layers: Vec<LinearLayer<Self>>) -> Vec<Tensor<Self, 2>> {
        let trains_beside = |layer: &LinearLayer<Self>| {
            layer.update.is_some()
                && (is_tracked(&layer.w_oi) || layer.bias_o.as_ref().is_some_and(is_tracked))
        };
        if layers.iter().any(trains_beside) {
            let each = layers.into_iter().map(|LinearLayer { w_oi, bias_o, update }| match update {
                Some(update) => Self::lora_linear(x_ni.clone(), w_oi, bias_o, update),
                None => <Self as ModelBackend>::linear(x_ni.clone(), w_oi, bias_o),
            });
            return each.collect();
        }
        let plain_layers = layers.iter().cloned().map(|LinearLayer { w_oi, bias_o, update }| LinearLayer {
            w_oi: w_oi.inner(),
            bias_o: bias_o.map(Tensor::inner),
            update: update.map(|LowRank { a_ri, b_or, scale }| LowRank {
                a_ri: a_ri.inner(),
                b_or: b_or.inner(),
                scale,
            }),
        });
        let x = tracked(x_ni);
        let values = B::linears_saving(plain(&x), plain_layers.collect());
        let nodes = layers.into_iter().zip(values).map(|(layer, (y_no, down_nr))| {
            let LinearLayer { w_oi, bias_o, update } = layer;
            match (update, down_nr) {
                (Some(LowRank { a_ri, b_or, scale }), Some(down_nr)) => {
                    let inputs = [x.clone(), tracked(a_ri), tracked(b_or)];
                    lora_linear_node(inputs, (w_oi.inner(), scale), (y_no, down_nr))
                }
                _ => linear_node(x.clone(), tracked(w_oi), bias_o.map(tracked), y_no),
            }
        });
        nodes.collect()
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
        let y_nd = <B as ModelBackend>::layer_norm(x_nd.clone(), eps);
        record([&x], y_nd, move |dy_nd| [Some(primitive(B::layer_norm_backward(x_nd, dy_nd, eps)))])
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

/// See [`Tape::linear_leaving_weight`](super::Tape::linear_leaving_weight), whose value is `y`. The leaf is a parent of the node, so that the node
/// is recorded even if nothing else is tracked, and never gets a gradient from it.
pub(super) fn linear_leaving_weight<B: ModelBackend>(
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

/// The node of [`ModelBackend::linear`] with the value `y_no`.
fn linear_node<B: ModelBackend>(
    x: Tracked<B>,
    w: Tracked<B>,
    bias: Option<Tracked<B>>,
    y_no: Tensor<B, 2>,
) -> Tensor<Autodiff<B>, 2> {
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

/// The node of [`ModelBackend::lora_linear`] under a frozen weight: inputs `x`, `a`, `b`; values as `lora_linear_saving` returns them.
fn lora_linear_node<B: ModelBackend>(
    [x, a, b]: [Tracked<B>; 3],
    (w_oi, scale): (Tensor<B, 2>, f64),
    (y_no, down_nr): (Tensor<B, 2>, Tensor<B, 2>),
) -> Tensor<Autodiff<B>, 2> {
    let update = LowRank { a_ri: plain(&a), b_or: plain(&b), scale };
    let saved = LowRankSaved { x_ni: plain(&x), down_nr, w_oi, update };
    let wants_dx = x.is_tracked();
    record_onto([&x, &a, &b], y_no, move |dy_no, sum| {
        let gradients = match sum {
            Some(sum_ni) => B::lora_linear_backward_onto(sum_ni, saved, dy_no),
            None => B::lora_linear_backward(saved, dy_no, wants_dx),
        };
        [gradients.dx_ni.map(primitive), Some(primitive(gradients.da_ri)), Some(primitive(gradients.db_or))]
    })
}

fn tracked<B: Backend, const D: usize>(x: Tensor<Autodiff<B>, D>) -> Tracked<B> {
    x.into_primitive().tensor()
}

fn is_tracked<B: Backend, const D: usize>(x: &Tensor<Autodiff<B>, D>) -> bool {
    tracked(x.clone()).is_tracked()
}

/// The values of a tracked tensor, shared.
fn plain<B: Backend, const D: usize>(x: &Tracked<B>) -> Tensor<B, D> {
    from_primitive(x.primitive.clone())
}

fn from_primitive<B: Backend, const D: usize>(x: Plain<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> Plain<B> {
    x.into_primitive().tensor()
}

/// `output` as a function of `inputs`; `pull_back` runs at most once, and not at all if no input is tracked.
fn record<B: Backend, const N: usize, const D: usize>(
    inputs: [&Tracked<B>; N],
    output: Tensor<B, D>,
    pull_back: impl FnOnce(Tensor<B, D>) -> Pulled<B, N> + Send + 'static,
) -> Tensor<Autodiff<B>, D> {
    finish(Node.prepare(inputs.map(|input| input.node.clone())), output, pull_back)
}

/// The same with a gradient of the first input that is added to what it is so far, if it is anything.
fn record_onto<B: Backend, const N: usize, const D: usize>(
    inputs: [&Tracked<B>; N],
    output: Tensor<B, D>,
    pull_back: impl FnOnce(Tensor<B, D>, Option<Tensor<B, D>>) -> Pulled<B, N> + Send + 'static,
) -> Tensor<Autodiff<B>, D> {
    let pull_back =
        move |gradient, sum: Option<Plain<B>>| pull_back(from_primitive(gradient), sum.map(from_primitive));
    finish_by(Node.prepare(inputs.map(|input| input.node.clone())), output, || {
        PullBack::Onto(Box::new(pull_back))
    })
}

/// [`record`] for a node whose inputs' values may be used up already.
fn finish<B: Backend, const N: usize, const D: usize>(
    node: Unfinished<B, N>,
    output: Tensor<B, D>,
    pull_back: impl FnOnce(Tensor<B, D>) -> Pulled<B, N> + Send + 'static,
) -> Tensor<Autodiff<B>, D> {
    finish_by(node, output, || PullBack::Apart(Box::new(move |gradient| pull_back(from_primitive(gradient)))))
}

fn finish_by<B: Backend, const N: usize, const D: usize>(
    node: Unfinished<B, N>,
    output: Tensor<B, D>,
    pull_back: impl FnOnce() -> PullBack<B, N>,
) -> Tensor<Autodiff<B>, D> {
    let output = primitive(output);
    let output = match node.compute_bound().stateful() {
        OpsKind::UnTracked(node) => node.finish(output),
        OpsKind::Tracked(node) => node.finish(State(Arc::new(Mutex::new(Some(pull_back())))), output),
    };
    Tensor::from_primitive(TensorPrimitive::Float(output))
}

/// The node of every operation; what it does is in its [`State`].
#[derive(Debug)]
struct Node;

/// A closure that runs once, in the shape burn wants of a state.
struct State<B: Backend, const N: usize>(Arc<Mutex<Option<PullBack<B, N>>>>);

impl<B: Backend, const N: usize> Clone for State<B, N> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: Backend, const N: usize> fmt::Debug for State<B, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("State")
    }
}

impl<B: Backend, const N: usize> Backward<B, N> for Node {
    type State = State<B, N>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let pull_back = ops.state.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gradients = match pull_back.expect("burn runs a node's backward pass once") {
            PullBack::Apart(pull_back) => pull_back(gradient),
            PullBack::Onto(pull_back) => {
                let sum = ops.parents[0].as_ref().and_then(|parent| {
                    // burn takes out what is known of a tensor, so here is one of the parent's name.
                    let mut named = <Autodiff<B> as AutodiffBackend>::from_inner(gradient.clone());
                    named.node = parent.clone();
                    grads.remove::<B>(&named)
                });
                pull_back(gradient, sum)
            }
        };
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}
