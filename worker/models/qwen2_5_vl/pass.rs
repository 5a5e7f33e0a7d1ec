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

use burn::tensor::Tensor;

use super::{
    dropout::ModelRows,
    embed::ImageRows,
    error::{TokenError, UnreadableWeights},
    model::QwenVl,
    modules::{FrozenBytes, TowerKind},
    prompts::Prompts,
    stack::InStack,
    text::{DecoderLayer, TextContext},
    vision::{VisionBlock, VisionContext},
};
use coxswain_nn::{
    kernels::{DropoutRows, Tape},
    params::{GradientSums, ParamScope, Trainables},
    recompute::{
        Layers, Retention, Tower, Trace,
        segment::{Input, Recorded, Segment},
    },
};
// Stages, as their times are shown.
/// Vision tower and merger.
const VISION: &str = "vision";
/// Embedding, decoder layers, final norm.
const LANGUAGE: &str = "language";

/// What of streamed blocks is in memory during a stage: the two largest neighbours of the tower that runs.
pub fn streamed_during(stage: &str, frozen: &FrozenBytes) -> u64 {
    match stage {
        VISION => frozen.two_blocks_of(TowerKind::Vision),
        LANGUAGE => frozen.two_blocks_of(TowerKind::Text),
        _ => 0,
    }
}

/// Why a pass through the model ends early.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// Tokens or images do not fit.
    #[error(transparent)]
    Tokens(#[from] TokenError),
    /// A block's weights cannot be read.
    #[error(transparent)]
    Weights(#[from] UnreadableWeights),
}

/// What a pass through the model begins with.
#[derive(Clone)]
pub enum Entry<B: Tape<Base = B>> {
    /// The micro-batch's pixels.
    Pixels,
    /// Image features, `[m, d]`.
    Images(Tensor<B, 2>),
    /// The input of a decoder layer, `[n, d]`.
    Layer(usize, Tensor<B, 2>),
    /// The hidden states after the final norm, `[n, d]`: nothing is left to run.
    Hidden(Tensor<B, 2>),
}

/// Where a pass ends that is asked for features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The image features after the merger.
    Images,
    /// The input of this decoder layer.
    Layer(usize),
    /// The hidden states after the final norm.
    Hidden,
}

/// What is told of a pass's stages: each by its name, when it ends.
pub type Lap<'l> = &'l mut dyn FnMut(&'static str);

/// Everything about a micro-batch that is known before it runs.
pub struct VlContext<B: Tape<Base = B>> {
    image_rows: ImageRows,
    /// None without images, and where their features are there already.
    vision: Option<VisionContext<B>>,
    /// None where no decoder layer runs.
    text: Option<TextContext<B>>,
}

impl<B: Tape<Base = B>> VlContext<B> {
    /// Positions, masks and tables of what is left to run; checks that tokens and images fit together.
    pub fn new(model: &QwenVl<B>, batch: Prompts<'_>, entry: &Entry<B>) -> Result<Self, TokenError> {
        if let Entry::Hidden(_) = entry {
            return Ok(Self { image_rows: ImageRows::new(vec![], 0), vision: None, text: None });
        }
        let index = model.rope_index(batch.input_ids, batch.rows, batch.image_grids)?;
        let vision = match (entry, batch.image_grids.is_empty()) {
            (Entry::Pixels, false) => Some(model.vision.context(batch.image_grids)?),
            _ => None,
        };
        Ok(Self {
            text: Some(model.text.context(&index.position_ids, batch.rows)),
            image_rows: ImageRows::new(index.image_rows, batch.input_ids.len()),
            vision,
        })
    }
}

/// The vision-language model with one micro-batch's context and the trainables' values.
pub struct VlRun<'a, B: Tape<Base = B>> {
    /// The model.
    pub model: &'a QwenVl<B>,
    /// Of the micro-batch.
    pub context: &'a VlContext<B>,
    /// Values of what trains of the model, at least.
    pub trainables: &'a Trainables<B>,
    /// What the forward pass keeps.
    pub retention: Retention,
    /// Of a pass whose adapters drop some of what they read.
    pub dropout: Option<ModelRows<B>>,
}

/// What a forward pass kept.
pub struct VlTrace<'a, B: Tape<Base = B>> {
    vision: Option<VisionTrace<'a, B>>,
    text: Option<TextTrace<'a, B>>,
}

struct VisionTrace<'a, B: Tape<Base = B>> {
    /// None where the patch embedding does not train.
    embed: Option<Recorded<'a, B>>,
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
        batch: Prompts<'_>,
        entry: Entry<B>,
        lap: Lap<'_>,
    ) -> Result<(Tensor<B, 2>, VlTrace<'a, B>), Broken> {
        let embedding_trains = self.model.embedding_trains();
        let (first, x_nd, vision, below_trains) = match entry {
            Entry::Pixels => {
                let (features, vision) = self.vision_forward(batch)?;
                lap(VISION);
                let below_trains = vision.is_some() || embedding_trains;
                (0, self.embed(batch, features), vision, below_trains)
            }
            Entry::Images(features_md) => (0, self.embed(batch, Some(features_md)), None, embedding_trains),
            Entry::Layer(first, x_nd) => (first, x_nd, None, false),
            Entry::Hidden(hidden_nd) => return Ok((hidden_nd, VlTrace { vision: None, text: None })),
        };
        let tower = self.text_tower(first, None);
        let tracked = below_trains || trains(&tower.layers);
        let (x_nd, layers) = tower.forward(x_nd, below_trains)?;
        let norm = FinalNorm(self.model);
        let (hidden_nd, text) = if tracked || self.model.text.final_norm_trains() {
            let norm = Recorded::run(&norm, self.trainables, vec![Input { value: x_nd, tracked }]);
            (norm.output(), Some(TextTrace { first, layers, norm }))
        } else {
            (norm.run(&ParamScope::<B>::frozen(self.trainables), &[x_nd]), None)
        };
        lap(LANGUAGE);
        Ok((hidden_nd, VlTrace { vision, text }))
    }

    /// Carries the gradient of the hidden states back; gradients of what trains are added to `grads`.
    pub fn backward(
        &self,
        batch: Prompts<'_>,
        trace: VlTrace<'a, B>,
        dhidden_nd: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
        lap: Lap<'_>,
    ) -> Result<(), Broken> {
        let Some(TextTrace { first, layers, norm }) = trace.text else { return Ok(()) };
        let dx = norm.backward(dhidden_nd, grads).into_iter().next().flatten();
        // None where nothing below the norm trains.
        let Some(dx_nd) = dx else { return Ok(()) };
        let dx = self.text_tower(first, None).backward(layers, dx_nd, grads)?.input;
        lap(LANGUAGE);
        let Some(dx_nd) = dx else { return Ok(()) };
        if self.model.embedding_trains() {
            let lookups = self.context.image_rows.lookups(batch.input_ids);
            self.model.embed_tokens_backward(self.trainables, &lookups, dx_nd.clone(), grads);
            lap(LANGUAGE);
        }
        let Some(VisionTrace { embed, blocks, merger }) = trace.vision else { return Ok(()) };
        let dfeatures_md = self.context.image_rows.gather(dx_nd);
        let dpatches = merger.backward(dfeatures_md, grads).into_iter().next().flatten();
        if let (Some(tower), Some(dpatches_pd)) = (self.vision_tower(), dpatches) {
            let dpatches = tower.backward(blocks, dpatches_pd, grads)?.input;
            if let (Some(embed), Some(dpatches_pd)) = (embed, dpatches) {
                embed.backward(dpatches_pd, grads);
            }
        }
        lap(VISION);
        Ok(())
    }

    /// The values at `until` without a trace. `entry` must not lie beyond it.
    pub fn features(
        &self,
        batch: Prompts<'_>,
        entry: Entry<B>,
        until: Until,
    ) -> Result<Tensor<B, 2>, Broken> {
        let params = ParamScope::<B>::frozen(self.trainables);
        let (first, x_nd) = match entry {
            Entry::Pixels | Entry::Images(_) => {
                let features = match entry {
                    Entry::Images(features_md) => Some(features_md),
                    _ => self.image_features(batch, &params)?,
                };
                if until == Until::Images {
                    let (width, device) = (self.model.text.config.hidden_size, self.model.text.device());
                    return Ok(features.unwrap_or_else(|| Tensor::zeros([0, width], device)));
                }
                (0, self.embed(batch, features))
            }
            Entry::Layer(first, x_nd) => (first, x_nd),
            Entry::Hidden(hidden_nd) => return Ok(hidden_nd),
        };
        match until {
            Until::Layer(end) => Ok(self.text_tower(first, Some(end)).run(x_nd)?),
            Until::Images | Until::Hidden => {
                Ok(FinalNorm(self.model).run(&params, &[self.text_tower(first, None).run(x_nd)?]))
            }
        }
    }

    /// The merger's output, `[m, d]`; none without images.
    fn image_features(
        &self,
        batch: Prompts<'_>,
        params: &ParamScope<'_, B>,
    ) -> Result<Option<Tensor<B, 2>>, Broken> {
        let (Some(context), Some(tower)) = (&self.context.vision, self.vision_tower()) else {
            return Ok(None);
        };
        let vision = &self.model.vision;
        let x_pi = vision.patches(&batch.pieces(), context)?;
        let patches_pd = tower.run(vision.embed(params, x_pi))?;
        Ok(Some(Merger { model: self.model, context }.run(params, &[patches_pd])))
    }

    /// The input of the first decoder layer: embedded tokens, image features in their places.
    fn embed(&self, batch: Prompts<'_>, features: Option<Tensor<B, 2>>) -> Tensor<B, 2> {
        let params = ParamScope::<B>::frozen(self.trainables);
        let x_nd = self.model.embed_tokens(&params, batch.input_ids);
        match features {
            Some(features_md) => self.context.image_rows.scatter(x_nd, features_md),
            None => x_nd,
        }
    }

    fn vision_forward(&self, batch: Prompts<'_>) -> Result<VisionForward<'a, B>, Broken> {
        let (Some(context), Some(tower)) = (&self.context.vision, self.vision_tower()) else {
            return Ok((None, None));
        };
        let vision = &self.model.vision;
        let x_pi = vision.patches(&batch.pieces(), context)?;
        let (x_pd, embed) = if vision.embed_trains() {
            let patches = PatchEmbedding(self.model);
            let embed = Recorded::run(&patches, self.trainables, vec![Input::constant(x_pi)]);
            (embed.output(), Some(embed))
        } else {
            (vision.embed(&ParamScope::<B>::frozen(self.trainables), x_pi), None)
        };
        let (patches_pd, blocks) = tower.forward(x_pd, embed.is_some())?;
        let blocks_train = embed.is_some() || trains(&tower.layers);
        let merger = Merger { model: self.model, context };
        if !blocks_train && !vision.merger_trains() {
            let features_md = merger.run(&ParamScope::<B>::frozen(self.trainables), &[patches_pd]);
            return Ok((Some(features_md), None));
        }
        let input = Input { value: patches_pd, tracked: blocks_train };
        let merged = self.dropout.as_ref().map(|rows| rows.merged.clone());
        let params = ParamScope::tracked(self.trainables).dropping(merged);
        let merger = Recorded::run_in(params, &merger, vec![input]);
        Ok((Some(merger.output()), Some(VisionTrace { embed, blocks, merger })))
    }

    fn vision_tower(&self) -> Option<Tower<'a, B, InStack<'a, B, VisionBlock<B>>>> {
        let context = self.context.vision.as_ref()?;
        let stack = &self.model.vision.blocks;
        let layers = InStack { stack, range: 0..stack.count(), context };
        let dropout = self.dropout.as_ref().map(|rows| rows.patches.clone());
        Some(self.tower(layers, dropout))
    }

    /// The decoder layers from `first` to before `end`, or to the last.
    fn text_tower(&self, first: usize, end: Option<usize>) -> Tower<'a, B, InStack<'a, B, DecoderLayer<B>>> {
        let context = self.context.text.as_ref();
        let context = context.expect("every pass that enters below the final norm has a text context");
        let stack = &self.model.text.layers;
        let layers = InStack { stack, range: first..end.unwrap_or(stack.count()), context };
        self.tower(layers, self.dropout.as_ref().map(|rows| rows.tokens.clone()))
    }

    fn tower<S>(&self, layers: S, dropout: Option<DropoutRows<B>>) -> Tower<'a, B, S> {
        let Self { trainables, retention, .. } = *self;
        Tower { layers, trainables, retention, sides: vec![], dropout }
    }
}

/// Whether anything in these layers trains.
fn trains<B: Tape<Base = B>>(layers: &impl Layers<B>) -> bool {
    (0..layers.count()).any(|index| layers.trains(index))
}

type VisionForward<'a, B> = (Option<Tensor<B, 2>>, Option<VisionTrace<'a, B>>);

struct PatchEmbedding<'a, B: Tape<Base = B>>(&'a QwenVl<B>);

impl<B: Tape<Base = B>> Segment<B> for PatchEmbedding<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.vision.embed(params, inputs[0].clone())
    }
}

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
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.text.final_norm(params, inputs[0].clone())
    }
}
