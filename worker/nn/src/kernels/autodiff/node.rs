//! A node of burn's autodiff graph that is a closure: [`record`] registers it, and it owns exactly what the
//! backward method needs.

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

pub type Plain<B> = <B as BackendTypes>::FloatTensorPrimitive;
pub type TrackedTensor<B> = <Autodiff<B> as BackendTypes>::FloatTensorPrimitive;
/// Gradients of a node's inputs; none where an input is not tracked.
pub type InputGradients<B, const N: usize> = [Option<Plain<B>>; N];
type PullResidual<B, const N: usize> =
    Box<dyn FnOnce(Plain<B>, Option<Plain<B>>) -> InputGradients<B, N> + Send>;
/// Takes the gradient of the output to those of the inputs.
pub enum PullBack<B: BackendTypes, const N: usize> {
    /// As they are.
    Apart(Box<dyn FnOnce(Plain<B>) -> InputGradients<B, N> + Send>),
    /// The first one together with what it is so far, by way of others who read the input: one pass less over
    /// it than a sum of its own.
    Residual(PullResidual<B, N>),
}

/// A node whose output is not known yet.
pub type PendingNode<B, const N: usize> = OpsPrep<Node, B, State<B, N>, NoCheckpointing, N>;

pub fn tracked<B: Backend, const D: usize>(x: Tensor<Autodiff<B>, D>) -> TrackedTensor<B> {
    x.into_primitive().tensor()
}

pub fn is_tracked<B: Backend, const D: usize>(x: &Tensor<Autodiff<B>, D>) -> bool {
    tracked(x.clone()).is_tracked()
}

/// The values of a tracked tensor, shared.
pub fn plain<B: Backend, const D: usize>(x: &TrackedTensor<B>) -> Tensor<B, D> {
    from_primitive(x.primitive.clone())
}

pub fn from_primitive<B: Backend, const D: usize>(x: Plain<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

pub fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> Plain<B> {
    x.into_primitive().tensor()
}

/// `output` as a function of `inputs`; `pull_back` runs at most once, and not at all if no input is tracked.
pub fn record<B: Backend, const N: usize, const D: usize>(
    inputs: [&TrackedTensor<B>; N],
    output: Tensor<B, D>,
    pull_back: impl FnOnce(Tensor<B, D>) -> InputGradients<B, N> + Send + 'static,
) -> Tensor<Autodiff<B>, D> {
    finish(Node.prepare(inputs.map(|input| input.node.clone())), output, pull_back)
}

/// `output` as a function of `inputs`, with a gradient of the first input that is added to what it is so far,
/// if it is anything.
pub fn record_residual<B: Backend, const N: usize, const D: usize>(
    inputs: [&TrackedTensor<B>; N],
    output: Tensor<B, D>,
    pull_back: impl FnOnce(Tensor<B, D>, Option<Tensor<B, D>>) -> InputGradients<B, N> + Send + 'static,
) -> Tensor<Autodiff<B>, D> {
    let pull_back =
        move |gradient, sum: Option<Plain<B>>| pull_back(from_primitive(gradient), sum.map(from_primitive));
    finish_by(Node.prepare(inputs.map(|input| input.node.clone())), output, || {
        PullBack::Residual(Box::new(pull_back))
    })
}

/// [`record`] for a node whose inputs' values may be used up already.
pub fn finish<B: Backend, const N: usize, const D: usize>(
    node: PendingNode<B, N>,
    output: Tensor<B, D>,
    pull_back: impl FnOnce(Tensor<B, D>) -> InputGradients<B, N> + Send + 'static,
) -> Tensor<Autodiff<B>, D> {
    finish_by(node, output, || PullBack::Apart(Box::new(move |gradient| pull_back(from_primitive(gradient)))))
}

fn finish_by<B: Backend, const N: usize, const D: usize>(
    node: PendingNode<B, N>,
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
pub struct Node;

/// A closure that runs once, in the shape burn wants of a state.
pub struct State<B: Backend, const N: usize>(Arc<Mutex<Option<PullBack<B, N>>>>);

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
            PullBack::Residual(pull_back) => {
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
