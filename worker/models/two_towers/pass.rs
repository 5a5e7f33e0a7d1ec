//! One micro-batch through the vision-language model and back.
//!
//! ```text
//! pixels  -> vision blocks -> merger -> image tokens ┐
//! ids     -> embedding ------------------------------┴> decoder layers -> final norm -> hidden states
//! ```
//!
//! A pass begins where its [`Entry`] says: with pixels, or with kept features at one of the arrows, and then
//! nothing before it runs.
//!
//! Where the token embedding trains, the gradient goes back to the input of the first decoder layer and is
//! added to the rows that were looked up.
//!
//! Forward keeps what the recompute mode says of the parts above the first that trains, and nothing of the
//! parts below it: with adapters on the language model alone the vision tower leaves no trace. The LM head is
//! not part of it: what is made of hidden states is for the task to say.
//!
//! Where a head reads several taps, or a stream of the vision tower is added, the layers run in parts that
//! end there, and a gradient comes in, or leaves for the stream, at the end of each part.

use std::ops::Range;

use burn::tensor::Tensor;

use super::{
    dropout::ModelRows,
    embed::ImageRows,
    images::{ImageFeatures, ImagePass, ImageTrace},
    model::TwoTowers,
    streams::{AtTap, Streams},
    sums::{sum, trains},
    text::{DecoderLayer, TextContext},
    vision::{StemContext, VisionStem, VisionTower},
};
use crate::{
    pretrained::{error::TokenError, job::Lap, prompts::Prompts, stack::InStack},
    vision_language::{
        Tap,
        model::{LANGUAGE, PassError, VISION},
    },
};
use coxswain_nn::{
    kernels::Tape,
    params::{GradientSums, ParamScope, Trainables},
    recompute::{
        Retention, Tower, Trace,
        segment::{Input, RecordedSegment, Segment},
    },
};

/// What a pass through the model begins with.
#[derive(Clone)]
pub enum Entry<B: Tape<Base = B>> {
    /// The micro-batch's pixels.
    Pixels,
    /// What images become.
    Images(ImageFeatures<B>),
    /// The input of a decoder layer, `[n, d]`, and the streams that are added behind it and above.
    Layer(usize, AtTap<B>),
    /// The hidden states after the final norm, `[n, d]`: nothing is left to run.
    Hidden(Tensor<B, 2>),
}

/// Everything about a micro-batch that is known before it runs.
pub struct PassContext<B: Tape<Base = B>, V: VisionTower<B>> {
    /// Where image features are.
    pub image_rows: ImageRows,
    /// Images of each row; none where no decoder layer runs.
    pub images_per_row: Vec<usize>,
    /// None without images, and where their features are there already.
    vision: Option<StemContext<B, V::Stem>>,
    /// None where no decoder layer runs.
    text: Option<TextContext<B>>,
}

impl<B: Tape<Base = B>, V: VisionTower<B>> PassContext<B, V> {
    /// Positions, masks and tables of what is left to run where a pass begins with features of this tap, or
    /// with pixels; checks that tokens and images fit together.
    pub fn new(model: &TwoTowers<B, V>, batch: Prompts<'_>, from: Option<Tap>) -> Result<Self, TokenError> {
        if from == Some(Tap::Final) {
            let image_rows = ImageRows::new(vec![], 0);
            return Ok(Self { image_rows, images_per_row: vec![], vision: None, text: None });
        }
        let index = model.rope_index(batch.input_ids, batch.rows, batch.images)?;
        let vision = match (from, batch.images.is_empty()) {
            (None, false) => Some(model.vision.stem().context(batch.images)?),
            _ => None,
        };
        Ok(Self {
            text: Some(model.text.context(&index.position_ids, batch.rows)),
            image_rows: ImageRows::new(index.image_rows, batch.input_ids.len()),
            images_per_row: index.images_per_row,
            vision,
        })
    }
}

/// The vision-language model with one micro-batch's context and the trainables' values.
pub struct TowersPass<'a, B: Tape<Base = B>, V: VisionTower<B>> {
    /// The model.
    pub model: &'a TwoTowers<B, V>,
    /// The micro-batch's context.
    pub context: &'a PassContext<B, V>,
    /// Values of what trains of the model, at least.
    pub trainables: &'a Trainables<B>,
    /// What the forward pass keeps.
    pub retention: Retention,
    /// Rows of a pass whose adapters drop some of what they read.
    pub dropout: Option<&'a ModelRows<B>>,
}

/// What a forward pass kept.
pub struct PassTrace<'a, B: Tape<Base = B>> {
    vision: Option<ImageTrace<'a, B>>,
    text: Option<DecoderTrace<'a, B>>,
}

/// The decoder layers up to each tap that was read or stream that was added, and the final norm if that was
/// read.
struct DecoderTrace<'a, B: Tape<Base = B>> {
    parts: Vec<DecoderPart<'a, B>>,
    norm: Option<RecordedSegment<'a, B>>,
}

struct DecoderPart<'a, B: Tape<Base = B>> {
    range: Range<usize>,
    layers: Trace<'a, B>,
    /// The stream that was added behind them.
    stream: Option<usize>,
    /// Whether a tap was read there.
    read: bool,
}

impl<B: Tape<Base = B>> PassTrace<'_, B> {
    /// Whether the gradient of what was read last is wanted.
    pub fn trains(&self) -> bool {
        self.text.is_some()
    }
}

/// Hidden states on their way up.
struct Ascent<'a, B: Tape<Base = B>> {
    /// The layer that is next.
    at: usize,
    x_nd: Tensor<B, 2>,
    streams: Streams<B>,
    /// Whether anything below trains.
    tracked: bool,
    trace: DecoderTrace<'a, B>,
}

impl<'a, B: Tape<Base = B>, V: VisionTower<B>> TowersPass<'a, B, V> {
    /// What is at each of the taps `reads`, `[n, d]`, and what is kept for [`TowersPass::backward`].
    pub fn forward(
        &self,
        batch: Prompts<'_>,
        entry: Entry<B>,
        reads: &[Tap],
        lap: Lap<'_>,
    ) -> Result<(Vec<Tensor<B, 2>>, PassTrace<'a, B>), PassError> {
        let embedding_trains = self.model.embedding_trains();
        let (at, x_nd, streams, below_trains, vision) = match entry {
            Entry::Pixels => {
                let (images, vision) = match self.images() {
                    Some(images) => {
                        let (images, trace) = images.forward(batch)?;
                        (Some(images), trace)
                    }
                    None => (None, None),
                };
                lap(VISION);
                let wanted = vision.as_ref().is_some_and(ImageTrace::wants_features);
                let (x_nd, streams) = self.embed(batch, images);
                (0, x_nd, streams, wanted || embedding_trains, vision)
            }
            Entry::Images(images) => {
                let (x_nd, streams) = self.embed(batch, Some(images));
                (0, x_nd, streams, embedding_trains, None)
            }
            Entry::Layer(at, AtTap { values, streams_md }) => {
                (at, values, Streams::new(at, streams_md), false, None)
            }
            Entry::Hidden(hidden_nd) => {
                return Ok((vec![hidden_nd; reads.len()], PassTrace { vision: None, text: None }));
            }
        };
        let trace = DecoderTrace { parts: vec![], norm: None };
        let mut ascent = Ascent { at, x_nd, streams, tracked: below_trains, trace };
        let mut read = Vec::with_capacity(reads.len());
        for tap in reads {
            ascent = self.ascend(ascent, vision.as_ref(), self.end_of(*tap))?;
            if *tap == Tap::Final {
                ascent = self.norm(ascent);
            }
            read.push(ascent.x_nd.clone());
        }
        lap(LANGUAGE);
        let Ascent { tracked, trace, .. } = ascent;
        let wanted = tracked || trace.norm.is_some();
        Ok((read, PassTrace { vision, text: wanted.then_some(trace) }))
    }

    /// The layer whose input a tap is.
    fn end_of(&self, tap: Tap) -> usize {
        match tap {
            Tap::Layer(layer) => layer,
            Tap::Vision | Tap::Final => self.model.text.layers.count(),
        }
    }

    /// The decoder layers up to before `end`, streams added on the way.
    fn ascend(
        &self,
        mut ascent: Ascent<'a, B>,
        vision: Option<&ImageTrace<'a, B>>,
        end: usize,
    ) -> Result<Ascent<'a, B>, PassError> {
        loop {
            let Ascent { at, x_nd, mut streams, tracked, mut trace } = ascent;
            let next = streams.next(end);
            let stop = next.as_ref().map_or(end, |(stream, _)| stream + 1);
            let tower = self.text_tower(at, stop);
            let mut above = tracked || trains(&tower.layers);
            let (mut x_nd, layers) = tower.forward(x_nd, tracked)?;
            let mut stream = None;
            if let Some((number, values_md)) = next {
                x_nd = self.context.image_rows.add(x_nd, values_md);
                above |= vision.is_some_and(|vision| vision.wants_stream(number));
                stream = Some(number);
            }
            let read = stop == end;
            trace.parts.push(DecoderPart { range: at..stop, layers, stream, read });
            ascent = Ascent { at: stop, x_nd, streams, tracked: above, trace };
            if read {
                return Ok(ascent);
            }
        }
    }

    /// The final norm, recorded if its gradient is wanted.
    fn norm(&self, ascent: Ascent<'a, B>) -> Ascent<'a, B> {
        let Ascent { at, x_nd, streams, tracked, mut trace } = ascent;
        let norm = FinalNorm(self.model);
        let x_nd = if tracked || self.model.text.final_norm_trains() {
            let norm = RecordedSegment::run(&norm, self.trainables, vec![Input { value: x_nd, tracked }]);
            let hidden_nd = norm.output();
            trace.norm = Some(norm);
            hidden_nd
        } else {
            norm.run(&ParamScope::<B>::frozen(self.trainables), &[x_nd])
        };
        Ascent { at, x_nd, streams, tracked, trace }
    }

    /// Carries the gradients of what was read back; gradients of what trains are added to `grads`.
    pub fn backward(
        &self,
        batch: Prompts<'_>,
        trace: PassTrace<'a, B>,
        mut gradients: Vec<Tensor<B, 2>>,
        grads: &mut dyn GradientSums<B>,
        lap: Lap<'_>,
    ) -> Result<(), PassError> {
        let Some(DecoderTrace { parts, mut norm }) = trace.text else { return Ok(()) };
        let rows = &self.context.image_rows;
        let mut dstreams_md: Vec<Option<Tensor<B, 2>>> = vec![None; self.model.vision.leaves_behind().len()];
        // What comes down from above; none where nothing below trains.
        let mut above: Option<Tensor<B, 2>> = None;
        for DecoderPart { range, layers, stream, read } in parts.into_iter().rev() {
            if read && let Some(own_nd) = gradients.pop() {
                let own = match norm.take() {
                    Some(norm) => norm.backward(own_nd, grads).into_iter().next().flatten(),
                    None => Some(own_nd),
                };
                above = sum(above, own);
            }
            let Some(dx_nd) = above.take() else { continue };
            if let Some(stream) = stream
                && trace.vision.as_ref().is_some_and(|vision| vision.wants_stream(stream))
            {
                dstreams_md[stream] = Some(rows.gather(dx_nd.clone()));
            }
            above = self.text_tower(range.start, range.end).backward(layers, dx_nd, grads)?.input;
        }
        lap(LANGUAGE);
        if let Some(dx_nd) = &above
            && self.model.embedding_trains()
        {
            let lookups = rows.lookups(batch.input_ids);
            self.model.embed_tokens_backward(self.trainables, &lookups, dx_nd.clone(), grads);
            lap(LANGUAGE);
        }
        let (Some(vision), Some(images)) = (trace.vision, self.images()) else { return Ok(()) };
        let dfeatures_md = above.filter(|_| vision.wants_features()).map(|dx_nd| rows.gather(dx_nd));
        images.backward(vision, dfeatures_md, dstreams_md, grads)?;
        lap(VISION);
        Ok(())
    }

    /// The values at `until` without a trace. `entry` must not lie beyond it.
    pub fn features(&self, batch: Prompts<'_>, entry: Entry<B>, until: Tap) -> Result<AtTap<B>, PassError> {
        let params = ParamScope::<B>::frozen(self.trainables);
        let (mut at, mut x_nd, mut streams) = match entry {
            Entry::Pixels | Entry::Images(_) => {
                let images = match entry {
                    Entry::Images(images) => Some(images),
                    _ => self.images().map(|images| images.run(batch)).transpose()?,
                };
                if until == Tap::Vision {
                    return Ok(images.unwrap_or_else(|| self.no_images()).into());
                }
                let (x_nd, streams) = self.embed(batch, images);
                (0, x_nd, streams)
            }
            Entry::Layer(at, AtTap { values, streams_md }) => (at, values, Streams::new(at, streams_md)),
            Entry::Hidden(values) => return Ok(AtTap { values, streams_md: vec![] }),
        };
        let end = self.end_of(until);
        while let Some((stream, values_md)) = streams.next(end) {
            x_nd = self.text_tower(at, stream + 1).run(x_nd)?;
            x_nd = self.context.image_rows.add(x_nd, values_md);
            at = stream + 1;
        }
        x_nd = self.text_tower(at, end).run(x_nd)?;
        let values = match until {
            Tap::Layer(_) => x_nd,
            Tap::Vision | Tap::Final => FinalNorm(self.model).run(&params, &[x_nd]),
        };
        Ok(AtTap { values, streams_md: streams.left() })
    }

    /// What a batch without images has of them.
    fn no_images(&self) -> ImageFeatures<B> {
        let (width, device) = (self.model.text.config.hidden_size, self.model.text.device());
        let none_md = Tensor::zeros([0, width], device);
        let streams_md = vec![none_md.clone(); self.model.vision.leaves_behind().len()];
        ImageFeatures { features_md: none_md, streams_md }
    }

    /// The input of the first decoder layer, embedded tokens with image features in their places, and the
    /// streams.
    fn embed(&self, batch: Prompts<'_>, images: Option<ImageFeatures<B>>) -> (Tensor<B, 2>, Streams<B>) {
        let params = ParamScope::<B>::frozen(self.trainables);
        let x_nd = self.model.embed_tokens(&params, batch.input_ids);
        match images {
            Some(ImageFeatures { features_md, streams_md }) => {
                (self.context.image_rows.scatter(x_nd, features_md), Streams::new(0, streams_md))
            }
            None => (x_nd, Streams::new(0, vec![])),
        }
    }

    /// The images of the micro-batch, if it has any that are pixels.
    fn images(&self) -> Option<ImagePass<'a, B, V>> {
        let Self { model, context, trainables, retention, dropout } = *self;
        let vision = &model.vision;
        let context = context.vision.as_ref()?;
        Some(ImagePass { vision, context, trainables, retention, dropout })
    }

    /// The decoder layers from `first` to before `end`.
    fn text_tower(&self, first: usize, end: usize) -> Tower<'a, B, InStack<'a, B, DecoderLayer<B>>> {
        let context = self.context.text.as_ref();
        let context = context.expect("every pass that enters below the final norm has a text context");
        let layers = InStack { stack: &self.model.text.layers, range: first..end, context };
        let Self { trainables, retention, .. } = *self;
        let dropout = self.dropout.map(|rows| rows.tokens.clone());
        Tower { layers, trainables, retention, sides: vec![], dropout }
    }
}

struct FinalNorm<'a, B: Tape<Base = B>, V: VisionTower<B>>(&'a TwoTowers<B, V>);

impl<B: Tape<Base = B>, V: VisionTower<B>> Segment<B> for FinalNorm<'_, B, V> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.text.final_norm(params, inputs[0].clone())
    }
}
