//! A segment: the smallest piece of the model that is recorded and differentiated by itself.
//!
//! A [`Segment`] is a function of a few tensors and of trainables. [`RecordedSegment::run`] runs it on a tape
//! of its own, whose leaves are the tracked inputs and the parameters used; [`RecordedSegment::backward`]
//! takes the gradient of the output and gives those of the inputs. Chaining segments by hand is what lets the
//! model drop each tape as soon as it is used, instead of holding one graph from the pixels to the loss.
//!
//! burn starts a backward pass from a tensor with a gradient of ones. To start from a gradient that comes
//! from above, one more node is put on top of the output ([`Seed`]), which holds that gradient and hands it
//! down. `(y * dy).sum()` would do the same with three more passes over the output.

use burn::{
    backend::Autodiff,
    tensor::{Shape, Tensor, TensorMetadata, TensorPrimitive, backend::Backend},
};
use burn_autodiff::{
    checkpoint::{base::Checkpointer, strategy::NoCheckpointing},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};

use crate::{
    kernels::Tape,
    params::{GradientSums, ParamScope, Trainables},
};

/// A differentiable function of a few `[n, d]` tensors and of trainables.
pub trait Segment<B: Tape<Base = B>> {
    /// The function, on any tape.
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2>;
}

/// An input of a segment.
#[derive(Clone, Debug)]
pub struct Input<B: Backend> {
    /// Value.
    pub value: Tensor<B, 2>,
    /// Whether its gradient is wanted.
    pub tracked: bool,
}

impl<B: Backend> Input<B> {
    /// An input whose gradient is wanted.
    pub fn tracked(value: Tensor<B, 2>) -> Self {
        Self { value, tracked: true }
    }

    /// An input that is constant.
    pub fn constant(value: Tensor<B, 2>) -> Self {
        Self { value, tracked: false }
    }
}

/// A segment that has run forward on its own tape.
pub struct RecordedSegment<'a, B: Tape<Base = B>> {
    params: ParamScope<'a, Autodiff<B>>,
    inputs: Vec<Tensor<Autodiff<B>, 2>>,
    output: Tensor<Autodiff<B>, 2>,
}

impl<'a, B: Tape<Base = B>> RecordedSegment<'a, B> {
    /// Runs `segment` on a new tape.
    pub fn run(segment: &impl Segment<B>, trainables: &'a Trainables<B>, inputs: Vec<Input<B>>) -> Self {
        Self::run_in(ParamScope::tracked(trainables), segment, inputs)
    }

    /// Runs `segment` in a scope that may hold notes of an earlier run.
    pub fn run_in(
        params: ParamScope<'a, Autodiff<B>>,
        segment: &impl Segment<B>,
        inputs: Vec<Input<B>>,
    ) -> Self {
        let inputs: Vec<_> = inputs
            .into_iter()
            .map(|input| {
                let leaf = Tensor::from_inner(input.value);
                if input.tracked { leaf.require_grad() } else { leaf }
            })
            .collect();
        let output = segment.run(&params, &inputs);
        Self { params, inputs, output }
    }

    /// The output's value.
    pub fn output(&self) -> Tensor<B, 2> {
        self.output.clone().inner()
    }

    /// Carries the gradient of the output back: parameter gradients are added to `grads`, those of the inputs
    /// returned, none for an input that is not tracked or has no part in the output.
    pub fn backward(self, dy_nd: Tensor<B, 2>, grads: &mut dyn GradientSums<B>) -> Vec<Option<Tensor<B, 2>>> {
        let Some(root) = seeded(self.output, dy_nd) else {
            return self.inputs.iter().map(|_| None).collect();
        };
        let mut gradients = root.backward();
        self.params.collect(&mut gradients, grads);
        self.inputs.iter().map(|leaf| leaf.grad_remove(&mut gradients)).collect()
    }
}

/// A node without a value of interest: when the backward pass reaches it, the gradient below it is the one it
/// holds.
#[derive(Debug)]
struct Seed;

impl<B: Backend> Backward<B, 1> for Seed {
    type State = B::FloatTensorPrimitive;

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let [parent] = ops.parents;
        if let Some(parent) = parent {
            gradients.register::<B>(parent.id, ops.state);
        }
    }
}

/// A tensor to call `backward` on, so that `y_nd` has the gradient `dy_nd`. None if nothing under `y_nd` is
/// tracked.
fn seeded<B: Backend>(y_nd: Tensor<Autodiff<B>, 2>, dy_nd: Tensor<B, 2>) -> Option<Tensor<Autodiff<B>, 1>> {
    assert_eq!(y_nd.dims(), dy_nd.dims(), "the gradient has another shape than the output");
    let y = y_nd.into_primitive().tensor();
    let (device, dtype) = (B::float_device(&y.primitive), y.primitive.dtype());
    match Seed.prepare::<NoCheckpointing>([y.node]).compute_bound().stateful() {
        OpsKind::UnTracked(_) => None,
        OpsKind::Tracked(prep) => {
            // It is not read, so it is not written.
            let value = B::float_empty(Shape::new([1]), &device, dtype.into());
            let root = prep.finish(dy_nd.into_primitive().tensor(), value);
            Some(Tensor::from_primitive(TensorPrimitive::Float(root)))
        }
    }
}
