//! A half of a network run forward and back, keeping of it what the recompute mode says.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::Tape,
    memory,
    params::{GradientSums, ParamScope, Trainables},
    recompute::{
        Retention, Tower, Trace,
        segment::{Input, RecordedSegment, Segment},
    },
};
use coxswain_proto::run_spec::Recompute;

use super::{
    mlp::MlpHalf,
    transformer::{TokenBlock, TransformerHalf},
};

/// Encoder or decoder: rows to rows.
#[derive(Clone, Debug)]
pub enum Half {
    /// Linear layers.
    Mlp(MlpHalf),
    /// Attention between tokens.
    Transformer(Box<TransformerHalf>),
}

/// With what a half runs.
pub struct HalfRun<'a, B: Tape<Base = B>> {
    /// Values of what trains, and of constants.
    pub trainables: &'a Trainables<B>,
    /// What the forward pass keeps.
    pub recompute: Recompute,
}

/// What a forward pass kept of a half.
pub enum HalfTrace<'a, B: Tape<Base = B>> {
    /// A half of linear layers.
    Mlp(KeptSegment<'a, B>),
    /// First part, blocks, last part.
    Transformer(Box<(KeptSegment<'a, B>, Trace<'a, B>, KeptSegment<'a, B>)>),
}

/// What is kept of a segment: its graph, or its input to run it again.
pub enum KeptSegment<'a, B: Tape<Base = B>> {
    /// The graph.
    Graph(RecordedSegment<'a, B>),
    /// The input.
    Input(Input<B>),
}

impl Half {
    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        match self {
            Self::Mlp(mlp) => mlp.trains(),
            Self::Transformer(half) => half.trains(),
        }
    }

    /// The output, `[n, o]`, and what is kept for [`Half::backward`].
    pub fn forward<'a, B: Tape<Base = B>>(
        &self,
        run: &HalfRun<'a, B>,
        input: Input<B>,
    ) -> (Tensor<B, 2>, HalfTrace<'a, B>) {
        match self {
            Self::Mlp(mlp) => {
                let (y_no, kept) = run.keep(mlp, input);
                (y_no, HalfTrace::Mlp(kept))
            }
            Self::Transformer(half) => {
                let below = input.tracked || half.first.trains();
                let (x_nd, first) = run.keep(&half.first, input);
                let tower = run.tower(half);
                let Ok((x_nd, trace)) = tower.forward(x_nd, below);
                let tracked = below || half.blocks_train::<B>();
                let (y_no, last) = run.keep(&half.last, Input { value: x_nd, tracked });
                (y_no, HalfTrace::Transformer(Box::new((first, trace, last))))
            }
        }
    }

    /// The output alone.
    pub fn plain<B: Tape<Base = B>>(&self, trainables: &Trainables<B>, x_ni: Tensor<B, 2>) -> Tensor<B, 2> {
        let (run, params) =
            (HalfRun { trainables, recompute: Recompute::None }, ParamScope::frozen(trainables));
        match self {
            Self::Mlp(mlp) => mlp.run(&params, &[x_ni]),
            Self::Transformer(half) => {
                let Ok(x_nd) = run.tower(half).run(half.first.run(&params, &[x_ni]));
                half.last.run(&params, &[x_nd])
            }
        }
    }

    /// Carries the gradient of the output back; that of the input, if it is tracked.
    pub fn backward<'a, B: Tape<Base = B>>(
        &self,
        run: &HalfRun<'a, B>,
        trace: HalfTrace<'a, B>,
        dy_no: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) -> Option<Tensor<B, 2>> {
        match (self, trace) {
            (Self::Mlp(mlp), HalfTrace::Mlp(kept)) => run.back(mlp, kept, dy_no, grads),
            (Self::Transformer(half), HalfTrace::Transformer(kept)) => {
                let (first, trace, last) = *kept;
                let dx_nd = run.back(&half.last, last, dy_no, grads)?;
                let Ok(below) = run.tower(half).backward(trace, dx_nd, grads);
                run.back(&half.first, first, below.input?, grads)
            }
            _ => unreachable!("a half is carried back by what it kept"),
        }
    }
}

impl TransformerHalf {
    fn blocks_train<B: Tape<Base = B>>(&self) -> bool {
        self.blocks.iter().any(coxswain_nn::recompute::Layer::<B>::trains)
    }
}

impl<'a, B: Tape<Base = B>> HalfRun<'a, B> {
    fn keep(&self, segment: &impl Segment<B>, input: Input<B>) -> (Tensor<B, 2>, KeptSegment<'a, B>) {
        memory::check();
        if matches!(self.recompute, Recompute::None | Recompute::Auto) {
            let graph = RecordedSegment::run(segment, self.trainables, vec![input]);
            return (graph.output(), KeptSegment::Graph(graph));
        }
        let params = ParamScope::<B>::frozen(self.trainables);
        (segment.run(&params, std::slice::from_ref(&input.value)), KeptSegment::Input(input))
    }

    fn back(
        &self,
        segment: &impl Segment<B>,
        kept: KeptSegment<'a, B>,
        dy_no: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) -> Option<Tensor<B, 2>> {
        memory::check();
        let graph = match kept {
            KeptSegment::Graph(graph) => graph,
            KeptSegment::Input(input) => RecordedSegment::run(segment, self.trainables, vec![input]),
        };
        graph.backward(dy_no, grads).pop().flatten()
    }

    fn tower(&self, half: &TransformerHalf) -> Tower<'a, B, Vec<TokenBlock>> {
        let Self { trainables, recompute } = *self;
        let retention = Retention::in_float32(recompute);
        Tower { layers: half.blocks.clone(), trainables, retention, sides: Vec::new(), dropout: None }
    }
}
