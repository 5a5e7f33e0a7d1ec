//! Layer recompute: a tower of blocks whose forward pass keeps as little as asked, and whose backward pass runs again what was
//! not kept, one block at a time (arXiv 1604.06174; the modes are those of arXiv 2205.05198).
//!
//! ```text
//! mode        kept per block                      run again in the backward pass
//! none        both halves' graphs                 nothing
//! selective   attention's graph, the MLP's input  the MLP
//! full        the block's input                   everything
//! every: n    as `full` in blocks 0, n, 2n, ..    those blocks
//! ```
//!
//! Blocks below the first that trains run without a tape and keep nothing at all, unless something below the tower trains.
//!
//! Whatever the mode, a block is differentiated as the same two segments ([`segment`]), attention then MLP, with the gradient
//! handed over in between. Gradients are therefore bitwise equal across modes wherever an operation gives the same bits twice.
//! Parameter gradients leave for [`FlatGrads`] as soon as their segment is done, so at no time do more than one segment's
//! exist on the device.
//!
//! What this module does not do: know what a block computes.

pub mod segment;

use burn::tensor::Tensor;
use coxswain_proto::run_spec::Recompute;

use super::block::Block;
use crate::{
    kernels::Tape,
    params::{FlatGrads, ParamScope, Trainables},
};
use segment::{Input, Recorded, Segment};

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

/// A [`Block`] in its micro-batch's context, as a layer without side inputs.
pub struct InContext<'a, B: Tape<Base = B>, K: Block<B>> {
    /// The block.
    pub block: &'a K,
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

/// Blocks run one after another under one recompute mode.
pub struct Tower<'a, B: Tape<Base = B>, L> {
    /// The blocks, first to last.
    pub layers: Vec<L>,
    /// Values of all trainables.
    pub trainables: &'a Trainables<B>,
    /// What the forward pass keeps.
    pub mode: Recompute,
    /// Further inputs that every block sees; their gradients are summed over the blocks.
    pub sides: Vec<Input<B>>,
}

/// What one forward pass kept, for one backward pass.
pub struct Trace<'a, B: Tape<Base = B>> {
    /// One entry per layer from `first` on.
    kept: Vec<Kept<'a, B>>,
    first: usize,
    below_trains: bool,
}

/// What is kept of one layer.
enum Kept<'a, B: Tape<Base = B>> {
    Input(Tensor<B, 2>),
    Attention { attention: Recorded<'a, B>, mlp_input: Tensor<B, 2> },
    Both { attention: Recorded<'a, B>, mlp: Recorded<'a, B> },
}

/// Gradients of what went into a tower.
pub struct TowerGradient<B: Tape<Base = B>> {
    /// By the tower's input; none when nothing below trains.
    pub input: Option<Tensor<B, 2>>,
    /// By each side input; none where it is not tracked, or not used.
    pub sides: Vec<Option<Tensor<B, 2>>>,
}

impl<'a, B: Tape<Base = B>, L: Layer<B>> Tower<'a, B, L> {
    /// Runs every layer. `below_trains` asks for the gradient of `x_nd` in the backward pass.
    pub fn forward(&self, x_nd: Tensor<B, 2>, below_trains: bool) -> (Tensor<B, 2>, Trace<'a, B>) {
        let first_trained = self.layers.iter().position(Layer::trains).unwrap_or(self.layers.len());
        let first = if below_trains { 0 } else { first_trained };
        let mut trace = Trace { kept: Vec::with_capacity(self.layers.len() - first), first, below_trains };
        let mut x_nd = x_nd;
        for index in 0..self.layers.len() {
            if index < first {
                x_nd = self.plain(index, x_nd);
                continue;
            }
            let (y_nd, kept) = self.keep(index, x_nd, below_trains || index > first);
            trace.kept.push(kept);
            x_nd = y_nd;
        }
        (x_nd, trace)
    }

    /// Runs every layer and keeps nothing.
    pub fn run(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        (0..self.layers.len()).fold(x_nd, |x_nd, index| self.plain(index, x_nd))
    }

    /// Carries `dy_nd`, the gradient of the output, back through the layers; parameter gradients are added to `grads`.
    pub fn backward(
        &self,
        trace: Trace<'a, B>,
        dy_nd: Tensor<B, 2>,
        grads: &mut FlatGrads,
    ) -> TowerGradient<B> {
        let Trace { kept, first, below_trains } = trace;
        let mut sides: Vec<Option<Tensor<B, 2>>> = self.sides.iter().map(|_| None).collect();
        let mut dy = Some(dy_nd);
        for (offset, kept) in kept.into_iter().enumerate().rev() {
            let index = first + offset;
            let Some(dy_nd) = dy.take() else { break };
            let (attention, mlp) = self.restore(index, kept, below_trains || index > first);
            let mut gradients = mlp.backward(dy_nd, grads).into_iter();
            let dh = gradients.next().flatten();
            accumulate(&mut sides, gradients);
            let Some(dh_nd) = dh else { break };
            let mut gradients = attention.backward(dh_nd, grads).into_iter();
            dy = gradients.next().flatten();
            accumulate(&mut sides, gradients);
        }
        TowerGradient { input: if below_trains { dy } else { None }, sides }
    }

    fn mode_of(&self, index: usize) -> Recompute {
        match self.mode {
            Recompute::Every(n) if index.is_multiple_of(n.max(1)) => Recompute::Full,
            Recompute::Every(_) => Recompute::None,
            mode => mode,
        }
    }

    fn keep(&self, index: usize, x_nd: Tensor<B, 2>, track_x: bool) -> (Tensor<B, 2>, Kept<'a, B>) {
        match self.mode_of(index) {
            Recompute::Full => (self.plain(index, x_nd.clone()), Kept::Input(x_nd)),
            Recompute::Selective => {
                let attention = self.attention(index, x_nd, track_x);
                let mlp_input = attention.output();
                let inputs = self.inputs(mlp_input.clone());
                let y_nd = MlpHalf(&self.layers[index]).run(&ParamScope::frozen(self.trainables), &inputs);
                (y_nd, Kept::Attention { attention, mlp_input })
            }
            Recompute::None | Recompute::Every(_) => {
                let attention = self.attention(index, x_nd, track_x);
                let mlp = self.mlp(index, attention.output());
                (mlp.output(), Kept::Both { attention, mlp })
            }
        }
    }

    /// The two recorded halves, run again where they were not kept.
    fn restore(&self, index: usize, kept: Kept<'a, B>, track_x: bool) -> (Recorded<'a, B>, Recorded<'a, B>) {
        match kept {
            Kept::Both { attention, mlp } => (attention, mlp),
            Kept::Attention { attention, mlp_input } => (attention, self.mlp(index, mlp_input)),
            Kept::Input(x_nd) => {
                let attention = self.attention(index, x_nd, track_x);
                let mlp = self.mlp(index, attention.output());
                (attention, mlp)
            }
        }
    }

    fn plain(&self, index: usize, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        let params = ParamScope::frozen(self.trainables);
        let layer = &self.layers[index];
        let h_nd = layer.attention_half(&params, &self.inputs(x_nd));
        layer.mlp_half(&params, &self.inputs(h_nd))
    }

    fn attention(&self, index: usize, x_nd: Tensor<B, 2>, track_x: bool) -> Recorded<'a, B> {
        Recorded::run(
            &AttentionHalf(&self.layers[index]),
            self.trainables,
            self.tracked_inputs(x_nd, track_x),
        )
    }

    /// The MLP's input is always tracked: the attention half below it waits for the gradient.
    fn mlp(&self, index: usize, h_nd: Tensor<B, 2>) -> Recorded<'a, B> {
        Recorded::run(&MlpHalf(&self.layers[index]), self.trainables, self.tracked_inputs(h_nd, true))
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
