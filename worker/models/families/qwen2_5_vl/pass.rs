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
//! Where a head reads several taps, the layers run in parts that end at each of them, and a gradient comes in
//! at the end of each part.

use std::ops::Range;

use burn::tensor::Tensor;

use super::{
    dropout::ModelRows,
    embed::ImageRows,
    model::QwenVl,
    text::{DecoderLayer, TextContext},
    vision::{VisionBlock, VisionContext},
};
use crate::{
    pretrained::{error::TokenError, job::Lap, prompts::Prompts, stack::InStack},
    vision_language::{
        Tap,
        model::{Broken, LANGUAGE, VISION},
    },
};
use coxswain_nn::{
    kernels::{DropoutRows, Tape},
    params::{GradientSums, ParamScope, Trainables},
    recompute::{
        Layers, Retention, Tower, Trace,
        segment::{Input, Recorded, Segment},
    },
};

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

/// Everything about a micro-batch that is known before it runs.
pub struct PassContext<B: Tape<Base = B>> {
    image_rows: ImageRows,
    /// None without images, and where their features are there already.
    vision: Option<VisionContext<B>>,
    /// None where no decoder layer runs.
    text: Option<TextContext<B>>,
}

impl<B: Tape<Base = B>> PassContext<B> {
    /// Positions, masks and tables of what is left to run where a pass begins with features of this tap, or
    /// with pixels; checks that tokens and images fit together.
    pub fn new(model: &QwenVl<B>, batch: Prompts<'_>, from: Option<Tap>) -> Result<Self, TokenError> {
        if from == Some(Tap::Final) {
            return Ok(Self { image_rows: ImageRows::new(vec![], 0), vision: None, text: None });
        }
        let index = model.rope_index(batch.input_ids, batch.rows, batch.images)?;
        let vision = match (from, batch.images.is_empty()) {
            (None, false) => Some(model.vision.context(batch.images)?),
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
pub struct QwenPass<'a, B: Tape<Base = B>> {
    /// The model.
    pub model: &'a QwenVl<B>,
    /// Of the micro-batch.
    pub context: &'a PassContext<B>,
    /// Values of what trains of the model, at least.
    pub trainables: &'a Trainables<B>,
    /// What the forward pass keeps.
    pub retention: Retention,
    /// Of a pass whose adapters drop some of what they read.
    pub dropout: Option<&'a ModelRows<B>>,
}

/// What a forward pass kept.
pub struct PassTrace<'a, B: Tape<Base = B>> {
    vision: Option<VisionTrace<'a, B>>,
    text: Option<DecoderTrace<'a, B>>,
}

struct VisionTrace<'a, B: Tape<Base = B>> {
    /// None where the patch embedding does not train.
    embed: Option<Recorded<'a, B>>,
    blocks: Trace<'a, B>,
    merger: Recorded<'a, B>,
}

/// The decoder layers up to each tap that was read, and the final norm if that was.
struct DecoderTrace<'a, B: Tape<Base = B>> {
    parts: Vec<(Range<usize>, Trace<'a, B>)>,
    norm: Option<Recorded<'a, B>>,
}

impl<B: Tape<Base = B>> PassTrace<'_, B> {
    /// Whether the gradient of what was read last is wanted.
    pub fn trains(&self) -> bool {
        self.text.is_some()
    }
}

impl<'a, B: Tape<Base = B>> QwenPass<'a, B> {
    /// What is at each of the taps `reads`, `[n, d]`, and what is kept for [`QwenPass::backward`].
    pub fn forward(
        &self,
        batch: Prompts<'_>,
        entry: Entry<B>,
        reads: &[Tap],
        lap: Lap<'_>,
    ) -> Result<(Vec<Tensor<B, 2>>, PassTrace<'a, B>), Broken> {
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
            Entry::Hidden(hidden_nd) => {
                return Ok((vec![hidden_nd; reads.len()], PassTrace { vision: None, text: None }));
            }
        };
        let (read, text) = self.text_forward(first, x_nd, below_trains, reads)?;
        lap(LANGUAGE);
        Ok((read, PassTrace { vision, text }))
    }

    /// The decoder layers from `first` on, up to the last tap that is read.
    fn text_forward(
        &self,
        first: usize,
        mut x_nd: Tensor<B, 2>,
        below_trains: bool,
        reads: &[Tap],
    ) -> Result<TextForward<'a, B>, Broken> {
        let (mut read, mut trace) =
            (Vec::with_capacity(reads.len()), DecoderTrace { parts: vec![], norm: None });
        let (mut at, mut tracked) = (first, below_trains);
        for tap in reads {
            let end = match tap {
                Tap::Layer(layer) => *layer,
                Tap::Vision | Tap::Final => self.model.text.layers.count(),
            };
            let tower = self.text_tower(at, Some(end));
            let above = tracked || trains(&tower.layers);
            let (output_nd, layers) = tower.forward(x_nd, tracked)?;
            trace.parts.push((at..end, layers));
            (at, tracked) = (end, above);
            x_nd = match tap {
                Tap::Final => self.normed(output_nd, tracked, &mut trace),
                Tap::Vision | Tap::Layer(_) => output_nd,
            };
            read.push(x_nd.clone());
        }
        let wanted = tracked || trace.norm.is_some();
        Ok((read, wanted.then_some(trace)))
    }

    /// The final norm, recorded if its gradient is wanted.
    fn normed(&self, x_nd: Tensor<B, 2>, tracked: bool, trace: &mut DecoderTrace<'a, B>) -> Tensor<B, 2> {
        let norm = FinalNorm(self.model);
        if !tracked && !self.model.text.final_norm_trains() {
            return norm.run(&ParamScope::<B>::frozen(self.trainables), &[x_nd]);
        }
        let norm = Recorded::run(&norm, self.trainables, vec![Input { value: x_nd, tracked }]);
        let hidden_nd = norm.output();
        trace.norm = Some(norm);
        hidden_nd
    }

    /// Carries the gradients of what was read back; gradients of what trains are added to `grads`.
    pub fn backward(
        &self,
        batch: Prompts<'_>,
        trace: PassTrace<'a, B>,
        mut gradients: Vec<Tensor<B, 2>>,
        grads: &mut dyn GradientSums<B>,
        lap: Lap<'_>,
    ) -> Result<(), Broken> {
        let Some(DecoderTrace { parts, mut norm }) = trace.text else { return Ok(()) };
        // What comes down from above; none where nothing below trains.
        let mut above: Option<Tensor<B, 2>> = None;
        for (range, layers) in parts.into_iter().rev() {
            let Some(own_nd) = gradients.pop() else { break };
            let own = match norm.take() {
                Some(norm) => norm.backward(own_nd, grads).into_iter().next().flatten(),
                None => Some(own_nd),
            };
            let sum = match (above.take(), own) {
                (Some(above_nd), Some(own_nd)) => Some(above_nd + own_nd),
                (one, other) => one.or(other),
            };
            let Some(dx_nd) = sum else { return Ok(()) };
            above = self.text_tower(range.start, Some(range.end)).backward(layers, dx_nd, grads)?.input;
        }
        lap(LANGUAGE);
        let Some(dx_nd) = above else { return Ok(()) };
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
    pub fn features(&self, batch: Prompts<'_>, entry: Entry<B>, until: Tap) -> Result<Tensor<B, 2>, Broken> {
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
        let merged = self.dropout.map(|rows| rows.merged.clone());
        let params = ParamScope::tracked(self.trainables).dropping(merged);
        let merger = Recorded::run_in(params, &merger, vec![input]);
        Ok((Some(merger.output()), Some(VisionTrace { embed, blocks, merger })))
    }

    fn vision_tower(&self) -> Option<Tower<'a, B, InStack<'a, B, VisionBlock<B>>>> {
        let context = self.context.vision.as_ref()?;
        let stack = &self.model.vision.blocks;
        let layers = InStack { stack, range: 0..stack.count(), context };
        let dropout = self.dropout.map(|rows| rows.patches.clone());
        Some(self.tower(layers, dropout))
    }

    /// The decoder layers from `first` to before `end`, or to the last.
    fn text_tower(&self, first: usize, end: Option<usize>) -> Tower<'a, B, InStack<'a, B, DecoderLayer<B>>> {
        let context = self.context.text.as_ref();
        let context = context.expect("every pass that enters below the final norm has a text context");
        let stack = &self.model.text.layers;
        let layers = InStack { stack, range: first..end.unwrap_or(stack.count()), context };
        self.tower(layers, self.dropout.map(|rows| rows.tokens.clone()))
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
/// What is at each tap, and the trace if a gradient is wanted.
type TextForward<'a, B> = (Vec<Tensor<B, 2>>, Option<DecoderTrace<'a, B>>);

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
