//! From the hidden states of action tokens to actions (`MLP_ActionHeader.py` of StarVLA, `action_heads.py` of
//! OpenVLA-OFT):
//!
//! ```text
//! x = relu(W_in norm(h) + b_in)                     h the hidden state, [d]; x twice as wide
//! x = x + relu(W_k norm(x) + b_k)                   k = 0, 1
//! a = W_out norm(x) + b_out                         [action]
//! ```
//!
//! Norms have gain and bias of their own and eps 1e-5. Rows are in the order sample, action: `n = b *
//! horizon`.
//!
//! Initial values: Xavier's bound, and zero for `W_out`, as the flow-matching expert begins: the first
//! prediction is the mean action of the statistics.

use burn::tensor::{Tensor, activation::relu};
use coxswain_nn::{
    dense::{Dense, DenseShape},
    kernels::{RowOps, Tape},
    params::{GradientSums, Init, ParamId, ParamScope, TrainableLayout, Trainables},
    recompute::segment::{Input, RecordedSegment, Segment},
};

use crate::vla_flow::expert::{Learning, Registrar};

/// Epsilon of the layer norms.
const EPS: f64 = 1e-5;
/// Blocks with a residual.
const BLOCKS: usize = 2;

/// Sizes of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OftShape {
    /// Width of the hidden states that it reads.
    pub context: usize,
    /// Actions per chunk.
    pub horizon: usize,
    /// Length of an action.
    pub action: usize,
}

/// The head: where its parameters lie in the flat parameter buffer.
#[derive(Clone, Debug)]
pub struct OftHead {
    horizon: usize,
    first: NormedLinear,
    blocks: [NormedLinear; BLOCKS],
    last: NormedLinear,
}

/// What a forward pass kept.
pub struct OftTrace<'a, B: Tape<Base = B>> {
    recorded: RecordedSegment<'a, B>,
    /// Samples, and tokens of each.
    rows: [usize; 2],
    horizon: usize,
}

impl OftHead {
    /// Registers all parameters under `expert.…`.
    pub fn register(layout: &mut TrainableLayout, shape: OftShape, learning: Learning<'_>) -> Self {
        let OftShape { context, horizon, action } = shape;
        let (registrar, hidden) = (&mut Registrar { layout, learning }, 2 * context);
        let mut layer = |name: &str, shape| NormedLinear::register(registrar, name, shape);
        Self {
            horizon,
            first: layer("in", DenseShape::xavier(context, hidden)),
            blocks: [0, 1].map(|k| layer(&format!("blocks.{k}"), DenseShape::xavier(hidden, hidden))),
            last: layer("out", DenseShape::zeros(hidden, action)),
        }
    }

    /// Predicts normalised actions, `[b * horizon, action]`, and keeps what the backward pass needs. `hidden`
    /// are the hidden states of `batch` samples, `[b * s, d]`, whose last tokens are action tokens.
    pub fn forward<'a, B: Tape<Base = B>>(
        &self,
        trainables: &'a Trainables<B>,
        hidden: Input<B>,
        batch: usize,
    ) -> (Tensor<B, 2>, OftTrace<'a, B>) {
        let rows = [batch, hidden.value.dims()[0] / batch];
        let states = Input { value: self.states(hidden.value, batch), tracked: hidden.tracked };
        let recorded = RecordedSegment::run(self, trainables, vec![states]);
        (recorded.output(), OftTrace { recorded, rows, horizon: self.horizon })
    }

    /// Carries the gradient of the actions back; parameter gradients are added to `grads`. Gives that of the
    /// hidden states, `[b * s, d]`, 0 at all but the action tokens; none if they are not tracked.
    pub fn backward<B: Tape<Base = B>>(
        trace: OftTrace<'_, B>,
        dactions_nc: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) -> Option<Tensor<B, 2>> {
        let OftTrace { recorded, rows: [batch, tokens], horizon } = trace;
        let dstates_nd = recorded.backward(dactions_nc, grads).into_iter().next().flatten()?;
        let width = dstates_nd.dims()[1];
        let others = Tensor::zeros([batch, tokens - horizon, width], &dstates_nd.device());
        let of_all = Tensor::cat(vec![others, dstates_nd.reshape([batch, horizon, width])], 1);
        Some(of_all.reshape([batch * tokens, width]))
    }

    /// The actions of [`OftHead::forward`] without a trace.
    pub fn actions<B: Tape<Base = B>>(
        &self,
        trainables: &Trainables<B>,
        hidden_nd: Tensor<B, 2>,
        batch: usize,
    ) -> Tensor<B, 2> {
        self.run(&ParamScope::<B>::frozen(trainables), &[self.states(hidden_nd, batch)])
    }

    /// The hidden states of the action tokens, the last of each sample, `[b * horizon, d]`.
    fn states<B: Tape<Base = B>>(&self, hidden_nd: Tensor<B, 2>, batch: usize) -> Tensor<B, 2> {
        let [rows, width] = hidden_nd.dims();
        let (tokens, horizon) = (rows / batch, self.horizon);
        assert!(tokens > horizon, "a prompt ends with an action token for each action of a chunk");
        let states_bhd = hidden_nd.reshape([batch, tokens, width]).narrow(1, tokens - horizon, horizon);
        states_bhd.reshape([batch * horizon, width])
    }
}

/// `states_nd` to `[n, action]`.
impl<B: Tape<Base = B>> Segment<B> for OftHead {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let mut x_nf = relu(self.first.apply(params, inputs[0].clone()));
        for block in &self.blocks {
            x_nf = x_nf.clone() + relu(block.apply(params, x_nf));
        }
        self.last.apply(params, x_nf)
    }
}

/// A layer norm with gain and bias, and the linear layer behind it.
#[derive(Clone, Debug)]
struct NormedLinear {
    gain: ParamId,
    bias: ParamId,
    linear: Dense,
}

impl NormedLinear {
    /// `expert.{name}.norm` and `expert.{name}.fc`.
    fn register(registrar: &mut Registrar<'_>, name: &str, shape: DenseShape) -> Self {
        Self {
            gain: registrar.tensor(&format!("{name}.norm.weight"), &[shape.inputs], Init::Ones),
            bias: registrar.tensor(&format!("{name}.norm.bias"), &[shape.inputs], Init::Zeros),
            linear: registrar.dense(&format!("{name}.fc"), shape),
        }
    }

    fn apply<T: Tape>(&self, params: &ParamScope<'_, T>, x_ni: Tensor<T, 2>) -> Tensor<T, 2> {
        let width = x_ni.dims()[1];
        let [gain, bias] = [self.gain, self.bias].map(|id| params.get::<1>(id).reshape([1, width]));
        self.linear.apply(params, <T as RowOps>::layer_norm(x_ni, EPS) * gain + bias)
    }
}
