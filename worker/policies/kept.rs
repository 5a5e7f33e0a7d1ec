//! What a forward pass keeps of a segment for its backward pass: the graph, or what it is made of again.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{DropoutRows, Tape},
    params::{ParamScope, Trainables},
    recompute::segment::{Input, RecordedSegment, Segment},
};
use coxswain_proto::run_spec::Recompute;

/// A segment's graph, or its inputs.
pub(crate) enum KeptSegment<'a, B: Tape<Base = B>> {
    Graph(RecordedSegment<'a, B>),
    Inputs(Vec<Input<B>>),
}

impl<'a, B: Tape<Base = B>> KeptSegment<'a, B> {
    /// Runs a segment; its output, and what is kept of it.
    pub fn run(
        segment: &impl Segment<B>,
        trainables: &'a Trainables<B>,
        recompute: Recompute,
        inputs: Vec<Input<B>>,
        dropout: Option<DropoutRows<B>>,
    ) -> (Tensor<B, 2>, Self) {
        if matches!(recompute, Recompute::None | Recompute::Auto) {
            let graph = recorded(segment, trainables, inputs, dropout);
            return (graph.output(), Self::Graph(graph));
        }
        let values: Vec<_> = inputs.iter().map(|input| input.value.clone()).collect();
        let params = ParamScope::<B>::frozen(trainables).dropping(dropout);
        (segment.run(&params, &values), Self::Inputs(inputs))
    }

    /// The segment's graph, recorded again if it was not kept.
    pub fn again(
        self,
        segment: &impl Segment<B>,
        trainables: &'a Trainables<B>,
        dropout: Option<DropoutRows<B>>,
    ) -> RecordedSegment<'a, B> {
        match self {
            Self::Graph(graph) => graph,
            Self::Inputs(inputs) => recorded(segment, trainables, inputs, dropout),
        }
    }
}

/// A segment on a tape, whose adapters drop what they do of these rows.
pub(crate) fn recorded<'a, B: Tape<Base = B>>(
    segment: &impl Segment<B>,
    trainables: &'a Trainables<B>,
    inputs: Vec<Input<B>>,
    dropout: Option<DropoutRows<B>>,
) -> RecordedSegment<'a, B> {
    RecordedSegment::run_in(ParamScope::tracked(trainables).dropping(dropout), segment, inputs)
}
