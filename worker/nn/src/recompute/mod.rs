//! Layer recompute: a tower of blocks whose forward pass keeps as little as asked, and whose backward pass
//! runs again what was not kept, one half of a block at a time (arXiv 1604.06174; the modes are those of
//! arXiv 2205.05198).
//!
//! ```text
//! mode        kept per block                                      run again in the backward pass
//! none        both halves' graphs                                 nothing
//! selective   both halves' inputs, outputs of linear layers       norms, activations, attention, linear
//!             that cost most for their size                       layers marked as cheap for their size
//! full        both halves' inputs                                 everything but each half's last product
//! every: n    as `full` in blocks 0, n, 2n, ..                    the same in those blocks
//! ```
//!
//! Three things keep the price below that of a second forward pass. A half's last product is added to the
//! residual stream, and the sum is the next half's input, which is kept: it is not needed again. With the
//! MLP's input kept, the two halves are run again one after the other, so only one's graph exists at a time.
//! And selective recompute gives a linear layer its value back from [`Notes`]: its gradient needs its input,
//! not its output.
//!
//! What selective recompute keeps is chosen by multiplications per value that is not kept. In a gated MLP
//! three values in four of a block lie between its products; norm, gate and attention weights cost next to
//! nothing again, one of the two wide products an eighth of a LoRA step, both a quarter.
//!
//! Blocks below the first that trains run without a tape and keep nothing at all, unless something below the
//! tower trains.
//!
//! Whatever the mode, a block is differentiated as the same two segments ([`segment`]), attention then MLP,
//! with the gradient handed over in between. Gradients are therefore bitwise equal across modes wherever an
//! operation gives the same bits twice. With activations in bfloat16 that holds because whatever a mode may
//! keep is rounded where it is made, in all modes, and kept without loss in two bytes a value ([`held`]);
//! what runs again, graphs that are kept, and gradients are float32. Under `none` rounding saves nothing.
//! Parameter gradients leave for [`GradientSums`] as soon as their segment is done, so at no time do more
//! than one segment's exist on the device.
//!
//! A tower is handed its layers one after another ([`Layers`]), forward ascending, backward descending, and
//! keeps none of them beyond its step: so layers need not all be there at once. In the modes that run a block
//! again its weights are asked for again.
//!
//! A block that trains below an adapter's dropout drops the same elements whenever it runs
//! (`kernels::dropout`).
//!
//! What this module does not do: know what a block computes, or where its weights are.

pub mod segment;

use std::{convert::Infallible, ops::ControlFlow};

use crate::dtypes::ActivationsDtype;
use burn::tensor::Tensor;
use coxswain_proto::run_spec::Recompute;

use super::block::{Block, BlockRef};
use crate::{
    kernels::{DropoutRows, Tape},
    memory,
    params::{GradientSums, Notes, ParamScope, Trainables, held},
    profile,
};
use segment::{Input, RecordedSegment, Segment};

/// A block of a tower: two residual halves over `inputs[0]`, with the tower's side inputs in `inputs[1..]`.
pub trait Layer<B: Tape<Base = B>> {
    /// `x + attention(norm(x))`.
    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2>;

    /// `x + mlp(norm(x))`.
    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2>;

    /// Whether anything in this block trains.
    fn trains(&self) -> bool;
}

/// The layers of a tower, wherever their weights are.
pub trait Layers<B: Tape<Base = B>> {
    /// One of them.
    type Layer: Layer<B>;
    /// Why one cannot be had.
    type Fault;

    /// How many there are.
    fn count(&self) -> usize;

    /// Whether anything in a layer trains.
    fn trains(&self, index: usize) -> bool;

    /// Hands the layers of `order` to `step`, one after another, until it breaks off; what the last step
    /// left.
    fn fold<A>(
        &self,
        order: impl Iterator<Item = usize>,
        start: A,
        step: impl FnMut(A, usize, &Self::Layer) -> ControlFlow<A, A>,
    ) -> Result<A, Self::Fault>;
}

impl<B: Tape<Base = B>, L: Layer<B>> Layers<B> for Vec<L> {
    type Layer = L;
    type Fault = Infallible;

    fn count(&self) -> usize {
        self.len()
    }

    fn trains(&self, index: usize) -> bool {
        self[index].trains()
    }

    fn fold<A>(
        &self,
        order: impl Iterator<Item = usize>,
        start: A,
        mut step: impl FnMut(A, usize, &L) -> ControlFlow<A, A>,
    ) -> Result<A, Infallible> {
        Ok(fold_held(order, start, |state, index| step(state, index, &self[index])))
    }
}

/// [`Layers::fold`] for layers that are all there.
pub fn fold_held<A>(
    mut order: impl Iterator<Item = usize>,
    start: A,
    step: impl FnMut(A, usize) -> ControlFlow<A, A>,
) -> A {
    match order.try_fold(start, step) {
        ControlFlow::Continue(state) | ControlFlow::Break(state) => state,
    }
}

/// A [`Block`] in its micro-batch's context, as a layer without side inputs.
pub struct InContext<'a, B: Tape<Base = B>, K: Block<B>> {
    /// The block.
    pub block: BlockRef<'a, K>,
    /// Rotary tables and masks of the micro-batch.
    pub context: &'a K::Context,
}

impl<B: Tape<Base = B>, K: Block<B>> Layer<B> for InContext<'_, B, K> {
    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        self.block.attention_half(params, inputs[0].clone(), self.context)
    }

    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        self.block.mlp_half(params, inputs[0].clone(), self.context)
    }

    fn trains(&self) -> bool {
        self.block.trains()
    }
}

struct AttentionHalf<'l, L>(&'l L);
struct MlpHalf<'l, L>(&'l L);

impl<B: Tape<Base = B>, L: Layer<B>> Segment<B> for AttentionHalf<'_, L> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.attention_half(params, inputs)
    }
}

impl<B: Tape<Base = B>, L: Layer<B>> Segment<B> for MlpHalf<'_, L> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.mlp_half(params, inputs)
    }
}

/// What a forward pass leaves to the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// What of each block.
    pub recompute: Recompute,
    /// In which precision; part of what is computed, whatever is kept.
    pub activations: ActivationsDtype,
}

impl Retention {
    /// With nothing rounded.
    pub const fn in_float32(recompute: Recompute) -> Self {
        Self { recompute, activations: ActivationsDtype::Float32 }
    }
}

/// Blocks run one after another under one recompute mode.
pub struct Tower<'a, B: Tape<Base = B>, S> {
    /// The blocks, first to last.
    pub layers: S,
    /// Values of all trainables.
    pub trainables: &'a Trainables<B>,
    /// What the forward pass keeps.
    pub retention: Retention,
    /// Further inputs that every block sees; their gradients are summed over the blocks.
    pub sides: Vec<Input<B>>,
    /// The rows of the blocks' inputs in a pass whose adapters drop some of them; [`Tower::run`] never does.
    pub dropout: Option<DropoutRows<B>>,
}

/// What one forward pass kept, for one backward pass.
pub struct Trace<'a, B: Tape<Base = B>> {
    /// One entry per layer from `first` on.
    kept: Vec<LayerTrace<'a, B>>,
    first: usize,
    below_trains: bool,
}

/// What is kept of one layer.
enum LayerTrace<'a, B: Tape<Base = B>> {
    /// Inputs, packed, and notes of both halves: attention, MLP.
    Inputs([(Tensor<B, 2>, Notes<B>); 2]),
    /// Both halves' graphs.
    Graphs(Box<[RecordedSegment<'a, B>; 2]>),
}

/// What is kept of half a layer.
enum Half<'a, B: Tape<Base = B>> {
    Kept((Tensor<B, 2>, Notes<B>)),
    Recorded(RecordedSegment<'a, B>),
}

/// Gradients of what went into a tower.
pub struct TowerGradient<B: Tape<Base = B>> {
    /// By the tower's input; none when nothing below trains.
    pub input: Option<Tensor<B, 2>>,
    /// By each side input; none where it is not tracked, or not used.
    pub sides: Vec<Option<Tensor<B, 2>>>,
}

impl<'a, B: Tape<Base = B>, S: Layers<B>> Tower<'a, B, S> {
    /// Runs every layer. `below_trains` asks for the gradient of `x_nd` in the backward pass.
    pub fn forward(
        &self,
        x_nd: Tensor<B, 2>,
        below_trains: bool,
    ) -> Result<(Tensor<B, 2>, Trace<'a, B>), S::Fault> {
        let count = self.layers.count();
        let first_trained = (0..count).find(|&index| self.layers.trains(index)).unwrap_or(count);
        let first = if below_trains { 0 } else { first_trained };
        let mut trace = Trace { kept: Vec::with_capacity(count - first), first, below_trains };
        let x_nd = self.rounded(x_nd);
        let y_nd = self.layers.fold(0..count, x_nd, |x_nd, index, layer| {
            memory::check();
            let _layer = profile::layer(index);
            if index < first {
                return ControlFlow::Continue(self.plain(layer, x_nd));
            }
            let (y_nd, kept) = self.keep(index, layer, x_nd, below_trains || index > first);
            trace.kept.push(kept);
            ControlFlow::Continue(y_nd)
        })?;
        Ok((y_nd, trace))
    }

    /// Runs every layer and keeps nothing.
    pub fn run(&self, x_nd: Tensor<B, 2>) -> Result<Tensor<B, 2>, S::Fault> {
        let x_nd = self.rounded(x_nd);
        self.layers.fold(0..self.layers.count(), x_nd, |x_nd, index, layer| {
            memory::check();
            let _layer = profile::layer(index);
            ControlFlow::Continue(self.plain(layer, x_nd))
        })
    }

    /// Carries `dy_nd`, the gradient of the output, back through the layers; parameter gradients are added to
    /// `grads`.
    pub fn backward(
        &self,
        trace: Trace<'a, B>,
        dy_nd: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) -> Result<TowerGradient<B>, S::Fault> {
        let Trace { mut kept, first, below_trains } = trace;
        let mut sides: Vec<Option<Tensor<B, 2>>> = self.sides.iter().map(|_| None).collect();
        let order = (first..first + kept.len()).rev();
        let dx = self.layers.fold(order, Some(dy_nd), |dy, index, layer| {
            let (Some(dy_nd), Some(kept)) = (dy, kept.pop()) else { return ControlFlow::Break(None) };
            memory::check();
            let _layer = profile::layer(index);
            let (attention, mlp) = match kept {
                LayerTrace::Graphs(graphs) => {
                    let [attention, mlp] = *graphs;
                    (Half::Recorded(attention), Half::Recorded(mlp))
                }
                LayerTrace::Inputs([attention, mlp]) => (Half::Kept(attention), Half::Kept(mlp)),
            };
            let mut gradients = self.again(&MlpHalf(layer), mlp, true).backward(dy_nd, grads).into_iter();
            let dh = gradients.next().flatten();
            accumulate(&mut sides, gradients);
            let Some(dh_nd) = dh else { return ControlFlow::Break(None) };
            let attention = self.again(&AttentionHalf(layer), attention, below_trains || index > first);
            let mut gradients = attention.backward(dh_nd, grads).into_iter();
            let dx = gradients.next().flatten();
            accumulate(&mut sides, gradients);
            match dx {
                Some(_) => ControlFlow::Continue(dx),
                None => ControlFlow::Break(None),
            }
        })?;
        Ok(TowerGradient { input: if below_trains { dx } else { None }, sides })
    }

    fn mode_of(&self, index: usize) -> Recompute {
        match self.retention.recompute {
            Recompute::Every(n) if index.is_multiple_of(n.max(1)) => Recompute::Full,
            Recompute::Every(_) => Recompute::None,
            mode => mode,
        }
    }

    fn keep(
        &self,
        index: usize,
        layer: &S::Layer,
        x_nd: Tensor<B, 2>,
        track_x: bool,
    ) -> (Tensor<B, 2>, LayerTrace<'a, B>) {
        let outputs = match self.mode_of(index) {
            Recompute::Full => false,
            Recompute::Selective => true,
            Recompute::None | Recompute::Every(_) | Recompute::Auto => {
                let attention = self.record(&AttentionHalf(layer), x_nd, track_x, None);
                // The MLP's input is always tracked: the attention half below it waits for the gradient.
                let mlp = self.record(&MlpHalf(layer), attention.output(), true, None);
                return (mlp.output(), LayerTrace::Graphs(Box::new([attention, mlp])));
            }
        };
        // An input is packed when its half has run: until then the half needs it as it is.
        let packed = |x_nd| held::packed(self.retention.activations, x_nd);
        let (h_nd, of_attention) = self.note(&AttentionHalf(layer), x_nd.clone(), outputs);
        let attention = (packed(x_nd), of_attention);
        let (y_nd, of_mlp) = self.note(&MlpHalf(layer), h_nd.clone(), outputs);
        (y_nd, LayerTrace::Inputs([attention, (packed(h_nd), of_mlp)]))
    }

    /// Half a block without a tape, taking notes.
    fn note(&self, half: &impl Segment<B>, x_nd: Tensor<B, 2>, outputs: bool) -> (Tensor<B, 2>, Notes<B>) {
        let params = ParamScope::noting(self.trainables, outputs)
            .holding(self.retention.activations)
            .dropping(self.dropout.clone());
        let y_nd = half.run(&params, &self.inputs(x_nd));
        (y_nd, params.into_notes())
    }

    /// Half a block on a tape of its own; with notes if it has run before.
    fn record(
        &self,
        half: &impl Segment<B>,
        x_nd: Tensor<B, 2>,
        track_x: bool,
        notes: Option<Notes<B>>,
    ) -> RecordedSegment<'a, B> {
        let params = match notes {
            Some(notes) => ParamScope::recalling(self.trainables, notes),
            None => ParamScope::tracked(self.trainables),
        };
        let params = params.holding(self.retention.activations).dropping(self.dropout.clone());
        RecordedSegment::run_in(params, half, self.tracked_inputs(x_nd, track_x))
    }

    /// A half's graph: the one that was kept, or a new one from what was kept.
    fn again(&self, half: &impl Segment<B>, kept: Half<'a, B>, track_x: bool) -> RecordedSegment<'a, B> {
        match kept {
            Half::Recorded(recorded) => recorded,
            Half::Kept((x_nd, notes)) => {
                let _again = profile::part("recompute");
                self.record(half, held::unpacked(x_nd), track_x, Some(notes))
            }
        }
    }

    fn plain(&self, layer: &S::Layer, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        let params = ParamScope::frozen(self.trainables).holding(self.retention.activations);
        let h_nd = layer.attention_half(&params, &self.inputs(x_nd));
        layer.mlp_half(&params, &self.inputs(h_nd))
    }

    /// The tower's input as its first block keeps it.
    fn rounded(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        held::rounded(self.retention.activations, x_nd)
    }

    fn inputs(&self, x_nd: Tensor<B, 2>) -> Vec<Tensor<B, 2>> {
        std::iter::once(x_nd).chain(self.sides.iter().map(|side| side.value.clone())).collect()
    }

    fn tracked_inputs(&self, x_nd: Tensor<B, 2>, tracked: bool) -> Vec<Input<B>> {
        std::iter::once(Input { value: x_nd, tracked }).chain(self.sides.iter().cloned()).collect()
    }
}

/// Adds each layer's side gradients to the sums.
fn accumulate<B: Tape<Base = B>>(
    sums: &mut [Option<Tensor<B, 2>>],
    gradients: impl Iterator<Item = Option<Tensor<B, 2>>>,
) {
    for (sum, gradient) in sums.iter_mut().zip(gradients) {
        *sum = match (sum.take(), gradient) {
            (Some(sum), Some(gradient)) => Some(sum + gradient),
            (sum, gradient) => sum.or(gradient),
        };
    }
}

#[cfg(test)]
mod tests;
