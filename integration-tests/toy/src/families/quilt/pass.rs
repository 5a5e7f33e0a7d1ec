//! One micro-batch through the model and back.
//!
//! ```text
//! pixels -> patches ┐
//! ids -> embedding -┴> blocks -> norm -> hidden states
//! ```
//!
//! A pass begins with pixels, or with kept features at one of the arrows. Where several taps are read, blocks
//! run in parts that end at each of them, and a gradient comes in at the end of each part. Forward keeps what
//! the recompute mode says of the parts above the first that trains, and nothing of those below it.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData};
use coxswain_models::{
    pretrained::{error::TokenError, job::Lap, prompts::Prompts, stack::InStack},
    vision_language::{
        PassError, Tap, VlPass,
        kept::padded,
        model::{LANGUAGE, VISION},
    },
};
use coxswain_nn::{
    kernels::Tape,
    params::{GradientSums, ParamScope},
    recompute::{
        Tower, Trace,
        segment::{Input, RecordedSegment, Segment},
    },
};

use super::{
    block::Block,
    model::Quilt,
    rows::{DropoutPlaces, PatchPlaces, RowsContext},
};

/// A model with one micro-batch's context.
pub struct Pass<'a, B: Tape<Base = B>> {
    pub model: &'a Quilt<B>,
    pub of: VlPass<'a, B>,
    pub rows: RowsContext,
    pub places: PatchPlaces,
    pub dropped: Option<DropoutPlaces<B>>,
}

/// What a pass begins with.
enum Start<B: Tape<Base = B>> {
    Pixels,
    /// Patches as tokens, `[m, d]`.
    Patches(Tensor<B, 2>),
    /// The input of a block, `[n, d]`.
    Tokens(usize, Tensor<B, 2>),
    /// The hidden states, `[n, d]`: nothing is left to run.
    Hidden(Tensor<B, 2>),
}

/// What a forward pass has kept.
pub struct PassTrace<'r, B: Tape<Base = B>> {
    /// None where patches are frozen.
    patches: Option<RecordedSegment<'r, B>>,
    /// The blocks up to each tap that was read.
    parts: Vec<(Range<usize>, Trace<'r, B>)>,
    norm: Option<RecordedSegment<'r, B>>,
    /// Whether the gradient of what was read last is wanted.
    pub wanted: bool,
}

impl<'a, B: Tape<Base = B>> Pass<'a, B> {
    /// Checks that tokens and images fit together.
    pub fn new(model: &'a Quilt<B>, of: VlPass<'a, B>) -> Result<Self, TokenError> {
        let Prompts { rows, input_ids, .. } = of.prompts;
        let dropped = of.dropout.map(|keys| DropoutPlaces::new(keys, of.prompts, &model.device));
        let places = PatchPlaces::new(&model.config, of.prompts)?;
        Ok(Self { model, of, rows: RowsContext::new(rows, input_ids.len()), places, dropped })
    }

    /// What is at each of the taps `reads`, and what [`Pass::backward`] needs.
    pub fn forward(
        &self,
        reads: &[Tap],
        lap: Lap<'_>,
    ) -> Result<(Vec<Tensor<B, 2>>, PassTrace<'a, B>), PassError> {
        let Self { model, .. } = self;
        let mut kept = PassTrace { patches: None, parts: Vec::new(), norm: None, wanted: false };
        let (mut at, mut x_nd) = match self.start() {
            Start::Hidden(hidden_nd) => return Ok((vec![hidden_nd; reads.len()], kept)),
            Start::Tokens(layer, x_nd) => (layer, x_nd),
            Start::Patches(patches_md) => {
                kept.wanted = model.table_vd.trains();
                (0, self.tokens(patches_md))
            }
            Start::Pixels => {
                let patches_md = self.patches(&mut kept)?;
                lap(VISION);
                kept.wanted = kept.patches.is_some() || model.table_vd.trains();
                (0, self.tokens(patches_md))
            }
        };
        let mut read = Vec::with_capacity(reads.len());
        for tap in reads {
            let end = self.end(*tap);
            let (y_nd, trace) = self.tower(at..end).forward(x_nd, kept.wanted)?;
            kept.wanted |= (at..end).any(|block| model.blocks.trains(block));
            kept.parts.push((at..end, trace));
            x_nd = if *tap == Tap::Final { self.hidden(y_nd, &mut kept) } else { y_nd };
            read.push(x_nd.clone());
            at = end;
        }
        lap(LANGUAGE);
        Ok((read, kept))
    }

    /// Carries the gradients of what was read back; gradients of what trains are added to `grads`.
    pub fn backward(
        &self,
        kept: PassTrace<'a, B>,
        mut gradients: Vec<Tensor<B, 2>>,
        grads: &mut dyn GradientSums<B>,
        lap: Lap<'_>,
    ) -> Result<(), PassError> {
        let PassTrace { patches, parts, mut norm, wanted } = kept;
        // What comes down from above; none where nothing below trains.
        let mut above: Option<Tensor<B, 2>> = None;
        for (range, trace) in parts.into_iter().rev().filter(|_| wanted) {
            let own = gradients.pop().and_then(|own_nd| match norm.take() {
                Some(norm) => norm.backward(own_nd, grads).into_iter().next().flatten(),
                None => Some(own_nd),
            });
            let sum = match (above.take(), own) {
                (Some(above_nd), Some(own_nd)) => Some(above_nd + own_nd),
                (one, other) => one.or(other),
            };
            let Some(dx_nd) = sum else { break };
            above = self.tower(range).backward(trace, dx_nd, grads)?.input;
        }
        lap(LANGUAGE);
        let Some(dx_nd) = above else { return Ok(()) };
        if let Some(table) = self.model.table_vd.trained() {
            let lookups = self.places.lookups(self.of.prompts.input_ids);
            grads.add_rows(self.of.trainables.layout().get(table), &lookups, dx_nd.clone());
        }
        if let Some(patches) = patches {
            patches.backward(self.places.taken(dx_nd), grads);
            lap(VISION);
        }
        Ok(())
    }

    /// What is at a tap, without a trace.
    pub fn until(&self, tap: Tap) -> Result<Tensor<B, 2>, PassError> {
        let params = ParamScope::<B>::frozen(self.of.trainables);
        let (first, x_nd) = match self.start() {
            Start::Hidden(hidden_nd) => return Ok(hidden_nd),
            Start::Tokens(layer, x_nd) => (layer, x_nd),
            start => {
                let patches_md = match start {
                    Start::Patches(patches_md) => patches_md,
                    _ => self.frozen_patches()?,
                };
                if tap == Tap::Vision {
                    return Ok(patches_md);
                }
                (0, self.tokens(patches_md))
            }
        };
        let x_nd = self.tower(first..self.end(tap)).run(x_nd)?;
        Ok(if tap == Tap::Final { self.model.normed(&params, x_nd) } else { x_nd })
    }

    fn start(&self) -> Start<B> {
        let Some(kept) = self.of.kept else { return Start::Pixels };
        let (width, Prompts { rows, input_ids, .. }) = (self.model.config.hidden_size, self.of.prompts);
        let tokens = || match padded(rows, input_ids.len(), width, kept.values) {
            Some(padded) => self.uploaded(padded, width),
            None => self.uploaded(kept.values.to_vec(), width),
        };
        match kept.tap {
            Tap::Vision => Start::Patches(self.uploaded(kept.values.to_vec(), width)),
            Tap::Layer(layer) => Start::Tokens(layer, tokens()),
            _ => Start::Hidden(tokens()),
        }
    }

    /// How many blocks lie below a tap.
    fn end(&self, tap: Tap) -> usize {
        if let Tap::Layer(layer) = tap { layer } else { self.model.blocks.count() }
    }

    /// Patches as tokens, `[m, d]`; recorded if they train.
    fn patches(&self, kept: &mut PassTrace<'a, B>) -> Result<Tensor<B, 2>, PassError> {
        if !self.model.patches.trains() || self.places.count() == 0 {
            return self.frozen_patches();
        }
        let (pixels_mi, trainables) = (self.pixels()?, self.of.trainables);
        let rows = self.dropped.as_ref().map(|dropped| dropped.patches.clone());
        let params = ParamScope::tracked(trainables).dropping(rows);
        let patches = RecordedSegment::run_in(params, &Patches(self.model), vec![Input::constant(pixels_mi)]);
        let patches_md = patches.output();
        kept.patches = Some(patches);
        Ok(patches_md)
    }

    /// Patches as tokens, `[m, d]`, not recorded.
    fn frozen_patches(&self) -> Result<Tensor<B, 2>, PassError> {
        let Self { model, of, .. } = self;
        match self.places.count() {
            0 => Ok(Tensor::zeros([0, model.config.hidden_size], &model.device)),
            _ => Ok(model.patches.forward(&ParamScope::<B>::frozen(of.trainables), self.pixels()?)),
        }
    }

    /// Pixels of all patches, `[m, i]`.
    fn pixels(&self) -> Result<Tensor<B, 2>, TokenError> {
        let (patches, width) = (self.places.count(), self.model.config.patch_values());
        // Where nothing is computed, nothing is read.
        if !B::VALUES {
            return Ok(Tensor::zeros([patches, width], &self.model.device));
        }
        let values = self.of.prompts.pieces().concat();
        match values.len() {
            found if found != patches * width => Err(TokenError::Pixels { found, patches, width }),
            _ => Ok(self.uploaded(values, width)),
        }
    }

    fn uploaded(&self, values: Vec<f32>, width: usize) -> Tensor<B, 2> {
        let (shape, device) = ([values.len() / width, width], &self.model.device);
        // Kept features are megabytes a sample; where nothing is computed, nothing is copied.
        if B::VALUES {
            Tensor::from_data(TensorData::new(values, shape), device)
        } else {
            Tensor::zeros(shape, device)
        }
    }

    /// The input of the first block: embedded tokens, patches in their places.
    fn tokens(&self, patches_md: Tensor<B, 2>) -> Tensor<B, 2> {
        let params = ParamScope::<B>::frozen(self.of.trainables);
        let x_nd = self.model.embedded(&params, self.of.prompts.input_ids);
        if self.places.count() > 0 { self.places.put(x_nd, patches_md) } else { x_nd }
    }

    /// Normed; recorded if that gradient is wanted.
    fn hidden(&self, x_nd: Tensor<B, 2>, kept: &mut PassTrace<'a, B>) -> Tensor<B, 2> {
        let tracked = kept.wanted;
        kept.wanted |= self.model.norm_d.trains();
        if !kept.wanted {
            return self.model.normed(&ParamScope::<B>::frozen(self.of.trainables), x_nd);
        }
        let norm =
            RecordedSegment::run(&Norm(self.model), self.of.trainables, vec![Input { value: x_nd, tracked }]);
        let hidden_nd = norm.output();
        kept.norm = Some(norm);
        hidden_nd
    }

    fn tower(&self, range: Range<usize>) -> Tower<'a, B, InStack<'_, B, Block<B>>> {
        let VlPass { trainables, retention, .. } = self.of;
        let layers = InStack { stack: &self.model.blocks, range, context: &self.rows };
        let dropout = self.dropped.as_ref().map(|dropped| dropped.tokens.clone());
        Tower { layers, trainables, retention, sides: Vec::new(), dropout }
    }
}

struct Patches<'a, B: Tape<Base = B>>(&'a Quilt<B>);

impl<B: Tape<Base = B>> Segment<B> for Patches<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.patches.forward(params, inputs[0].clone())
    }
}

struct Norm<'a, B: Tape<Base = B>>(&'a Quilt<B>);

impl<B: Tape<Base = B>> Segment<B> for Norm<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.normed(params, inputs[0].clone())
    }
}
