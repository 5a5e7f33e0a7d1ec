//! A Qwen2.5 language model of the `small` preset, made of the operations directly.

use burn::tensor::Tensor;
use coxswain_nn::kernels::{AttentionMask, AttentionOps, LowRank, Tape};

use crate::cases::{A, BATCH, F, HEAD, HEADS, HIDDEN, INTER, KV_HEADS, RANK, SEQ, backward, leaf, random};

/// One projection with its low-rank update.
struct Projection {
    w_oi: Tensor<F, 2>,
    bias_o: Option<Tensor<F, 1>>,
    a_ri: Tensor<F, 2>,
    b_or: Tensor<F, 2>,
}

impl Projection {
    fn new(inputs: usize, outputs: usize, biased: bool) -> Self {
        let bias_o = biased.then(|| random([outputs]));
        Self {
            w_oi: random([outputs, inputs]),
            bias_o,
            a_ri: random([RANK, inputs]),
            b_or: random([outputs, RANK]),
        }
    }

    fn forward<T: Pass>(&self, x_ni: Tensor<T, 2>) -> Tensor<T, 2> {
        let update =
            LowRank { a_ri: T::trained(&self.a_ri), b_or: T::trained(&self.b_or), scale: 1.0, dropout: None };
        T::lora_linear(x_ni, T::lift(self.w_oi.clone()), self.bias_o.clone().map(T::lift), update)
    }
}

/// A tape, and what a trained parameter is on it.
trait Pass: Tape<Base = F> {
    fn trained(x: &Tensor<F, 2>) -> Tensor<Self, 2>;
}

impl Pass for F {
    fn trained(x: &Tensor<F, 2>) -> Tensor<F, 2> {
        x.clone()
    }
}

impl Pass for A {
    fn trained(x: &Tensor<F, 2>) -> Tensor<A, 2> {
        leaf(x)
    }
}

struct Layer {
    norms: [Tensor<F, 1>; 2],
    qkvo: [Projection; 4],
    gate_up_down: [Projection; 3],
}

/// All layers, and the tables they share.
pub struct Decoder {
    layers: Vec<Layer>,
    cos_bsk: Tensor<F, 3>,
    sin_bsk: Tensor<F, 3>,
    mask: AttentionMask,
}

impl Layer {
    fn new() -> Self {
        let kv = KV_HEADS * HEAD;
        Self {
            norms: [random([HIDDEN]), random([HIDDEN])],
            qkvo: [(HIDDEN, true), (kv, true), (kv, true), (HIDDEN, false)]
                .map(|(outputs, biased)| Projection::new(HIDDEN, outputs, biased)),
            gate_up_down: [
                Projection::new(HIDDEN, INTER, false),
                Projection::new(HIDDEN, INTER, false),
                Projection::new(INTER, HIDDEN, false),
            ],
        }
    }

    fn forward<T: Pass>(&self, x_nd: Tensor<T, 2>, shared: &Decoder) -> Tensor<T, 2> {
        let [q, k, v, o] = &self.qkvo;
        let tables = || (T::lift(shared.cos_bsk.clone()), T::lift(shared.sin_bsk.clone()));
        let y_nd = T::rms_norm(x_nd.clone(), T::lift(self.norms[0].clone()), 1e-6);
        let heads = |y: Tensor<T, 2>, heads: usize| y.reshape([BATCH, SEQ, heads, HEAD]);
        let rotated = |y| T::rotary(y, tables().0, tables().1);
        let q_bshk = rotated(heads(q.forward(y_nd.clone()), HEADS));
        let k_bshk = rotated(heads(k.forward(y_nd.clone()), KV_HEADS));
        let v_bshk = heads(v.forward(y_nd), KV_HEADS);
        let y_bshk = <T as AttentionOps>::attention(q_bshk, k_bshk, v_bshk, &shared.mask, 0.125);
        let x_nd = x_nd + o.forward(y_bshk.reshape([BATCH * SEQ, HIDDEN]));

        let [gate, up, down] = &self.gate_up_down;
        let y_nd = T::rms_norm(x_nd.clone(), T::lift(self.norms[1].clone()), 1e-6);
        let y_nf = T::swiglu(gate.forward(y_nd.clone()), up.forward(y_nd));
        x_nd + down.forward(y_nf)
    }
}

impl Decoder {
    /// A model of random weights.
    pub fn new(layers: usize) -> Self {
        Self {
            layers: (0..layers).map(|_| Layer::new()).collect(),
            cos_bsk: random([BATCH, SEQ, HEAD]),
            sin_bsk: random([BATCH, SEQ, HEAD]),
            mask: AttentionMask::Causal([0..SEQ as u32, 0..SEQ as u32].into()),
        }
    }

    /// Forward without recording.
    pub fn forward(&self, x_nd: Tensor<F, 2>) -> Tensor<F, 2> {
        self.layers.iter().fold(x_nd, |x, layer| layer.forward(x, self))
    }

    /// Forward and backward over one graph.
    pub fn both(&self, x_nd: Tensor<F, 2>) {
        backward(self.layers.iter().fold(leaf(&x_nd), |x, layer| layer.forward(x, self)));
    }

    /// Forward keeping every layer's input, then layer by layer again under autodiff.
    pub fn both_recomputing(&self, x_nd: Tensor<F, 2>) {
        let mut inputs = vec![x_nd];
        for layer in &self.layers {
            inputs.push(layer.forward(inputs[inputs.len() - 1].clone(), self));
        }
        let mut dy_nd = inputs.pop().map(|y| y.ones_like());
        for (layer, x_nd) in self.layers.iter().zip(inputs).rev() {
            let x_nd = leaf(&x_nd);
            let y_nd = layer.forward(x_nd.clone(), self);
            let seed = dy_nd.take().map(Tensor::from_inner);
            let loss = seed.map(|seed| (y_nd * seed).sum());
            dy_nd = loss.and_then(|loss| x_nd.grad(&loss.backward()));
        }
        std::hint::black_box(dy_nd);
    }
}
