//! The images of a micro-batch through the vision tower and back.
//!
//! The blocks run in parts, each up to a merger: those whose outputs are streams, and the last. Where nothing
//! of the tower trains, no trace is left of it.

use std::ops::Range;

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::Tape,
    params::{GradientSums, ParamScope, Trainables},
    recompute::{
        Retention, Tower, Trace,
        segment::{Input, RecordedSegment, Segment},
    },
};

use super::{
    dropout::ModelRows,
    sums::{sum, trains},
    vision::{MergerPlace, StemContext, VisionStem, VisionTower},
};
use crate::{
    pretrained::{prompts::Prompts, stack::InStack},
    vision_language::model::PassError,
};

/// What images become.
#[derive(Clone)]
pub struct ImageFeatures<B: Tape<Base = B>> {
    /// What takes the places of image tokens, `[m, d]`.
    pub features_md: Tensor<B, 2>,
    /// What is added to them behind the first decoder layers, `[m, d]` each.
    pub streams_md: Vec<Tensor<B, 2>>,
}

/// A vision tower with the images of one micro-batch and the trainables' values.
pub struct ImagePass<'a, B: Tape<Base = B>, V: VisionTower<B>> {
    /// The tower.
    pub vision: &'a V,
    /// The images' context.
    pub context: &'a StemContext<B, V::Stem>,
    /// Values of what trains of it, at least.
    pub trainables: &'a Trainables<B>,
    /// What the forward pass keeps.
    pub retention: Retention,
    /// Rows of a pass whose adapters drop some of what they read.
    pub dropout: Option<&'a ModelRows<B>>,
}

/// What a forward pass kept of a tower of which something trains.
pub struct ImageTrace<'a, B: Tape<Base = B>> {
    /// None where the patch embedding does not train.
    embed: Option<RecordedSegment<'a, B>>,
    /// What each merger kept, in order; the last is the tower's own.
    parts: Vec<ImagePart<'a, B>>,
}

struct ImagePart<'a, B: Tape<Base = B>> {
    range: Range<usize>,
    blocks: Trace<'a, B>,
    /// None where neither it nor anything below it trains.
    merger: Option<RecordedSegment<'a, B>>,
}

impl<B: Tape<Base = B>> ImageTrace<'_, B> {
    /// Whether the gradient of the tower's features is wanted.
    pub fn wants_features(&self) -> bool {
        self.parts.last().is_some_and(|part| part.merger.is_some())
    }

    /// Whether the gradient of a stream is wanted.
    pub fn wants_stream(&self, stream: usize) -> bool {
        stream + 1 < self.parts.len() && self.parts[stream].merger.is_some()
    }
}

impl<'a, B: Tape<Base = B>, V: VisionTower<B>> ImagePass<'a, B, V> {
    /// What the images become, and what is kept for [`ImagePass::backward`] if anything trains.
    pub fn forward(
        &self,
        batch: Prompts<'_>,
    ) -> Result<(ImageFeatures<B>, Option<ImageTrace<'a, B>>), PassError> {
        let stem = self.vision.stem();
        let x_pi = stem.patches(&batch.pieces(), self.context)?;
        let (mut x_pd, embed) = if stem.embed_trains() {
            let embed =
                RecordedSegment::run(&PatchEmbedding(self), self.trainables, vec![Input::constant(x_pi)]);
            (embed.output(), Some(embed))
        } else {
            (stem.embed(&ParamScope::<B>::frozen(self.trainables), x_pi, self.context), None)
        };
        let (mut tracked, mut parts, mut merged) = (embed.is_some(), Vec::new(), Vec::new());
        for (place, range) in self.parts() {
            let tower = self.tower(range.clone());
            let above = tracked || trains(&tower.layers);
            let (y_pd, blocks) = tower.forward(x_pd, tracked)?;
            (tracked, x_pd) = (above, y_pd);
            let merger = MergerSegment { pass: self, place };
            let merger = if tracked || self.vision.merger_trains(place) {
                let input = Input { value: x_pd.clone(), tracked };
                let rows = self.dropout.map(|rows| rows.merged.clone());
                let params = ParamScope::tracked(self.trainables).dropping(rows);
                let merger = RecordedSegment::run_in(params, &merger, vec![input]);
                merged.push(merger.output());
                Some(merger)
            } else {
                let params = ParamScope::<B>::frozen(self.trainables);
                merged.push(merger.run(&params, std::slice::from_ref(&x_pd)));
                None
            };
            parts.push(ImagePart { range, blocks, merger });
        }
        let wanted = parts.iter().any(|part| part.merger.is_some());
        Ok((features(merged), wanted.then_some(ImageTrace { embed, parts })))
    }

    /// What the images become, without a trace.
    pub fn run(&self, batch: Prompts<'_>) -> Result<ImageFeatures<B>, PassError> {
        let (stem, params) = (self.vision.stem(), ParamScope::<B>::frozen(self.trainables));
        let x_pi = stem.patches(&batch.pieces(), self.context)?;
        let (mut x_pd, mut merged) = (stem.embed(&params, x_pi, self.context), Vec::new());
        for (place, range) in self.parts() {
            x_pd = self.tower(range).run(x_pd)?;
            merged.push(MergerSegment { pass: self, place }.run(&params, std::slice::from_ref(&x_pd)));
        }
        Ok(features(merged))
    }

    /// Carries the gradients of features and streams back, those that are there.
    pub fn backward(
        &self,
        trace: ImageTrace<'a, B>,
        features_md: Option<Tensor<B, 2>>,
        streams_md: Vec<Option<Tensor<B, 2>>>,
        grads: &mut dyn GradientSums<B>,
    ) -> Result<(), PassError> {
        let ImageTrace { embed, parts } = trace;
        let gradients = streams_md.into_iter().chain([features_md]);
        // What comes down from above; none where nothing below trains.
        let mut above = None;
        for (ImagePart { range, blocks, merger }, gradient) in
            parts.into_iter().zip(gradients).collect::<Vec<_>>().into_iter().rev()
        {
            if let (Some(merger), Some(gradient_md)) = (merger, gradient) {
                above = sum(above, merger.backward(gradient_md, grads).into_iter().next().flatten());
            }
            if let Some(dx_pd) = above.take() {
                above = self.tower(range).backward(blocks, dx_pd, grads)?.input;
            }
        }
        if let (Some(embed), Some(dx_pd)) = (embed, above) {
            embed.backward(dx_pd, grads);
        }
        Ok(())
    }

    /// The mergers in order, and the blocks that run before each and behind the one below it.
    fn parts(&self) -> impl Iterator<Item = (MergerPlace, Range<usize>)> {
        let leaves = self.vision.leaves_behind();
        let count = self.vision.stem().blocks().count();
        let begin = move |part: usize| part.checked_sub(1).map_or(0, |before| leaves[before] + 1);
        let of_streams = leaves
            .iter()
            .enumerate()
            .map(move |(number, last)| (MergerPlace::Stream(number), begin(number)..last + 1));
        of_streams.chain([(MergerPlace::Last, begin(leaves.len())..count)])
    }

    fn tower(&self, range: Range<usize>) -> Tower<'a, B, StemLayers<'a, B, V>> {
        let Self { context, trainables, retention, .. } = *self;
        let layers = InStack { stack: self.vision.stem().blocks(), range, context };
        let dropout = self.dropout.map(|rows| rows.patches.clone());
        Tower { layers, trainables, retention, sides: vec![], dropout }
    }
}

type StemLayers<'a, B, V> = InStack<'a, B, <<V as VisionTower<B>>::Stem as VisionStem<B>>::Block>;

/// Features of the mergers' outputs in order: streams, then features.
fn features<B: Tape<Base = B>>(mut merged: Vec<Tensor<B, 2>>) -> ImageFeatures<B> {
    let features_md = merged.pop().expect("every tower has a merger behind its last block");
    ImageFeatures { features_md, streams_md: merged }
}

struct PatchEmbedding<'p, 'a, B: Tape<Base = B>, V: VisionTower<B>>(&'p ImagePass<'a, B, V>);

impl<B: Tape<Base = B>, V: VisionTower<B>> Segment<B> for PatchEmbedding<'_, '_, B, V> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.vision.stem().embed(params, inputs[0].clone(), self.0.context)
    }
}

struct MergerSegment<'p, 'a, B: Tape<Base = B>, V: VisionTower<B>> {
    pass: &'p ImagePass<'a, B, V>,
    place: MergerPlace,
}

impl<B: Tape<Base = B>, V: VisionTower<B>> Segment<B> for MergerSegment<'_, '_, B, V> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.pass.vision.merge(params, inputs[0].clone(), self.place, self.pass.context)
    }
}
