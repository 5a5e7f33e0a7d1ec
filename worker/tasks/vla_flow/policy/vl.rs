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
//! Forward keeps what the recompute mode says of the parts above the first adapter, and nothing of the parts
//! below it: with adapters on the language model alone the vision tower leaves no trace. The LM head is never
//! computed.

use burn::tensor::Tensor;

use coxswain_models::qwen2_5_vl::{
    DecoderLayer, ImageRows, QwenVl, TextContext, VisionBlock, VisionContext,
    error::{TokenError, UnreadableWeights},
    stack::InStack,
};
use coxswain_nn::{
    kernels::Tape,
    params::{GradientSums, ParamScope, Trainables},
    recompute::{
        Layers, Retention, Tower, Trace,
        segment::{Input, Recorded, Segment},
    },
};
use coxswain_task::StageClock;

use super::{error::StepError, tap::Tap};
use crate::vla_flow::data::batch::MicroBatch;

// Stages, as their times are shown.
/// Vision tower and merger.
const VISION: &str = "vision";
/// Embedding, decoder layers, final norm.
const LANGUAGE: &str = "language";

/// Why a pass through the model ends early.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    /// Tokens or images do not fit.
    #[error(transparent)]
    Tokens(#[from] TokenError),
    /// A block's weights cannot be read.
    #[error(transparent)]
    Weights(#[from] UnreadableWeights),
}

/// The same, of a micro-batch.
pub(super) fn failed(batch: &MicroBatch, broken: impl Into<Broken>) -> StepError {
    match broken.into() {
        Broken::Tokens(source) => {
            StepError::Tokens { step: batch.step, samples: batch.sample_indices.clone(), source }
        }
        Broken::Weights(source) => StepError::Weights { step: batch.step, source },
    }
}

/// What a pass through the model begins with.
#[derive(Clone)]
pub(super) enum Entry<B: Tape<Base = B>> {
    /// The micro-batch's pixels.
    Pixels,
    /// Image features, `[m, d]`.
    Images(Tensor<B, 2>),
    /// The input of a decoder layer, `[n, d]`.
    Layer(usize, Tensor<B, 2>),
    /// The hidden states after the final norm, `[n, d]`: nothing is left to run.
    Hidden(Tensor<B, 2>),
}

/// Everything about a micro-batch that is known before it runs.
pub(super) struct VlContext<B: Tape<Base = B>> {
    image_rows: ImageRows,
    /// None without images, and where their features are there already.
    vision: Option<VisionContext<B>>,
    /// None where no decoder layer runs.
    text: Option<TextContext<B>>,
}

impl<B: Tape<Base = B>> VlContext<B> {
    /// Positions, masks and tables of what is left to run; checks that tokens and images fit together.
    pub fn new(model: &QwenVl<B>, batch: &MicroBatch, entry: &Entry<B>) -> Result<Self, TokenError> {
        if let Entry::Hidden(_) = entry {
            return Ok(Self { image_rows: ImageRows::new(vec![], 0), vision: None, text: None });
        }
        let index = model.rope_index(&batch.input_ids, &batch.valid, &batch.image_grids)?;
        let vision = match (entry, batch.image_grids.is_empty()) {
            (Entry::Pixels, false) => Some(model.vision.context(&batch.image_grids)?),
            _ => None,
        };
        Ok(Self {
            text: Some(model.text.context(&index.position_ids, &batch.valid)),
            image_rows: ImageRows::new(index.image_rows, batch.input_ids.len()),
            vision,
        })
    }
}

/// The vision-language model with one micro-batch's context and the trainables' values.
pub(super) struct VlRun<'a, B: Tape<Base = B>> {
    pub model: &'a QwenVl<B>,
    pub context: &'a VlContext<B>,
    pub trainables: &'a Trainables<B>,
    pub retention: Retention,
}

/// What a forward pass kept.
pub(super) struct VlTrace<'a, B: Tape<Base = B>> {
    vision: Option<VisionTrace<'a, B>>,
    text: Option<TextTrace<'a, B>>,
}

struct VisionTrace<'a, B: Tape<Base = B>> {
    blocks: Trace<'a, B>,
    merger: Recorded<'a, B>,
}

struct TextTrace<'a, B: Tape<Base = B>> {
    /// The first layer that ran.
    first: usize,
    layers: Trace<'a, B>,
    norm: Recorded<'a, B>,
}

impl<B: Tape<Base = B>> VlTrace<'_, B> {
    /// Whether the gradient of the hidden states is wanted.
    pub fn trains(&self) -> bool {
        self.text.is_some()
    }
}

impl<'a, B: Tape<Base = B>> VlRun<'a, B> {
    /// The hidden states after the final norm, `[n, d]`, and what is kept for [`VlRun::backward`].
    pub fn forward(
        &self,
        batch: &MicroBatch,
        entry: Entry<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<(Tensor<B, 2>, VlTrace<'a, B>), Broken> {
        let (first, x_nd, vision) = match entry {
            Entry::Pixels => {
                let (features, vision) = self.vision_forward(batch)?;
                clock.lap(VISION);
                (0, self.embed(batch, features), vision)
            }
            Entry::Images(features_md) => (0, self.embed(batch, Some(features_md)), None),
            Entry::Layer(first, x_nd) => (first, x_nd, None),
            Entry::Hidden(hidden_nd) => return Ok((hidden_nd, VlTrace { vision: None, text: None })),
        };
        let below_trains = vision.is_some();
        let tower = self.text_tower(first, None);
        let trains = below_trains || trains(&tower.layers);
        let (x_nd, layers) = tower.forward(x_nd, below_trains)?;
        let norm = FinalNorm(self.model);
        let (hidden_nd, text) = if trains {
            let norm = Recorded::run(&norm, self.trainables, vec![Input::tracked(x_nd)]);
            (norm.output(), Some(TextTrace { first, layers, norm }))
        } else {
            (norm.run(&ParamScope::<B>::frozen(self.trainables), &[x_nd]), None)
        };
        clock.lap(LANGUAGE);
        Ok((hidden_nd, VlTrace { vision, text }))
    }

    /// Carries the gradient of the hidden states back; adapter gradients are added to `grads`.
    pub fn backward(
        &self,
        trace: VlTrace<'a, B>,
        dhidden_nd: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<(), Broken> {
        let Some(TextTrace { first, layers, norm }) = trace.text else { return Ok(()) };
        let dx = norm.backward(dhidden_nd, grads).into_iter().next().flatten();
        let dx_nd = dx.expect("the norm's input is tracked");
        let dx = self.text_tower(first, None).backward(layers, dx_nd, grads)?.input;
        clock.lap(LANGUAGE);
        let (Some(VisionTrace { blocks, merger }), Some(dx_nd)) = (trace.vision, dx) else { return Ok(()) };
        let dfeatures_md = self.context.image_rows.gather(dx_nd);
        let dpatches = merger.backward(dfeatures_md, grads).into_iter().next().flatten();
        if let (Some(tower), Some(dpatches_pd)) = (self.vision_tower(), dpatches) {
            tower.backward(blocks, dpatches_pd, grads)?;
        }
        clock.lap(VISION);
        Ok(())
    }

    /// The values at `until` without a trace. `entry` must not lie beyond it.
    pub fn features(&self, batch: &MicroBatch, entry: Entry<B>, until: Tap) -> Result<Tensor<B, 2>, Broken> {
        let params = ParamScope::<B>::frozen(self.trainables);
        let (first, x_nd) = match entry {
            Entry::Pixels | Entry::Images(_) => {
                let features = match entry {
                    Entry::Images(features_md) => Some(features_md),
                    _ => self.image_features(batch, &params)?,
                };
                if until == Tap::Vision {
                    let (width, device) = (self.model.text.config.hidden_size, self.model.text.device());
                    return Ok(features.unwrap_or_else(|| Tensor::zeros([0, width], device)));
                }
                (0, self.embed(batch, features))
            }
            Entry::Layer(first, x_nd) => (first, x_nd),
            Entry::Hidden(hidden_nd) => return Ok(hidden_nd),
        };
        match until {
            Tap::Layer(end) => Ok(self.text_tower(first, Some(end)).run(x_nd)?),
            Tap::Vision | Tap::Final => {
                Ok(FinalNorm(self.model).run(&params, &[self.text_tower(first, None).run(x_nd)?]))
            }
        }
    }

    /// The merger's output, `[m, d]`; none without images.
    fn image_features(
        &self,
        batch: &MicroBatch,
        params: &ParamScope<'_, B>,
    ) -> Result<Option<Tensor<B, 2>>, Broken> {
        let (Some(context), Some(tower)) = (&self.context.vision, self.vision_tower()) else {
            return Ok(None);
        };
        let patches_pd = tower.run(self.model.vision.embed(&batch.pixel_values, context)?)?;
        Ok(Some(Merger { model: self.model, context }.run(params, &[patches_pd])))
    }

    /// The input of the first decoder layer: embedded tokens, image features in their places.
    fn embed(&self, batch: &MicroBatch, features: Option<Tensor<B, 2>>) -> Tensor<B, 2> {
        let x_nd = self.model.embed_tokens(&batch.input_ids);
        match features {
            Some(features_md) => self.context.image_rows.scatter(x_nd, features_md),
            None => x_nd,
        }
    }

    fn vision_forward(&self, batch: &MicroBatch) -> Result<VisionForward<'a, B>, Broken> {
        let (Some(context), Some(tower)) = (&self.context.vision, self.vision_tower()) else {
            return Ok((None, None));
        };
        let vision = &self.model.vision;
        let (patches_pd, blocks) = tower.forward(vision.embed(&batch.pixel_values, context)?, false)?;
        let blocks_train = trains(&tower.layers);
        let merger = Merger { model: self.model, context };
        if !blocks_train && !vision.merger_trains() {
            let features_md = merger.run(&ParamScope::<B>::frozen(self.trainables), &[patches_pd]);
            return Ok((Some(features_md), None));
        }
        let input = Input { value: patches_pd, tracked: blocks_train };
        let merger = Recorded::run(&merger, self.trainables, vec![input]);
        Ok((Some(merger.output()), Some(VisionTrace { blocks, merger })))
    }

    fn vision_tower(&self) -> Option<Tower<'a, B, InStack<'a, B, VisionBlock<B>>>> {
        let context = self.context.vision.as_ref()?;
        let stack = &self.model.vision.blocks;
        let layers = InStack { stack, range: 0..stack.count(), context };
        Some(Tower { layers, trainables: self.trainables, retention: self.retention, sides: vec![] })
    }

    /// The decoder layers from `first` to before `end`, or to the last.
    fn text_tower(&self, first: usize, end: Option<usize>) -> Tower<'a, B, InStack<'a, B, DecoderLayer<B>>> {
        let context = self.context.text.as_ref();
        let context = context.expect("every pass that enters below the final norm has a text context");
        let stack = &self.model.text.layers;
        let layers = InStack { stack, range: first..end.unwrap_or(stack.count()), context };
        Tower { layers, trainables: self.trainables, retention: self.retention, sides: vec![] }
    }
}

/// Whether anything in these layers trains.
fn trains<B: Tape<Base = B>>(layers: &impl Layers<B>) -> bool {
    (0..layers.count()).any(|index| layers.trains(index))
}

type VisionForward<'a, B> = (Option<Tensor<B, 2>>, Option<VisionTrace<'a, B>>);

struct Merger<'a, B: Tape<Base = B>> {
    model: &'a QwenVl<B>,
    context: &'a VisionContext<B>,
}

impl<B: Tape<Base = B>> Segment<B> for Merger<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.model.vision.merge(params, inputs[0].clone(), self.context)
    }
}

struct FinalNorm<'a, B: Tape<Base = B>>(&'a QwenVl<B>);

impl<B: Tape<Base = B>> Segment<B> for FinalNorm<'_, B> {
    fn run<T: Tape<Base = B>>(&self, _params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.text.final_norm(inputs[0].clone())
    }
}
