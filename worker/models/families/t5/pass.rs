//! One micro-batch through the model and back.
//!
//! ```text
//! source ids -> table -> encoder blocks -> norm ┐ keys and values of every cross attention
//! target ids -> table -> decoder blocks <───────┴ -> norm -> hidden states
//! ```
//!
//! What a decoder reads is the target shifted right by one. The head is not part of the pass: which rows
//! predict something is for the task to say. Every sum over keys leaves padding out, so that a row depends on
//! its own texts alone. What adapters drop follows from a token's pair and its place there.

use burn::tensor::{Tensor, TensorData};
use coxswain_nn::{
    kernels::{DropoutRows, ModelBackend, Tape, flat::Lookups},
    params::{BaseWeight, GradientSums, ParamScope, Trainables},
    recompute::{
        Retention, Tower, Trace,
        segment::{Input, RecordedSegment, Segment},
    },
};

use super::{
    block::{InContext, T5Block},
    buckets::UNSEEN,
    context::T5Context,
    model::{T5, T5Stack},
};
use crate::text_to_text::Texts;

/// The encoder, as its time is shown.
pub const ENCODER: &str = "encoder";
/// The decoder.
pub const DECODER: &str = "decoder";

impl<B: Tape<Base = B>> T5Context<B> {
    /// The context of these texts, for a pass without a backward one.
    pub fn new(model: &T5<B>, trainables: &Trainables<B>, texts: &Texts<'_>) -> Self {
        Self::from_texts(model, trainables, texts, false)
    }

    /// The context of these texts, for a pass that trains.
    pub fn of_training(model: &T5<B>, trainables: &Trainables<B>, texts: &Texts<'_>) -> Self {
        Self::from_texts(model, trainables, texts, true)
    }

    fn from_texts(model: &T5<B>, trainables: &Trainables<B>, texts: &Texts<'_>, training: bool) -> Self {
        let params = ParamScope::<B>::frozen(trainables);
        let [source, target] = [texts.source, texts.target].map(|ids| ids.len() / texts.batch.max(1));
        let padding = texts.seen.contains(&false).then(|| {
            let added = texts.seen.iter().map(|&seen| if seen { 0.0 } else { UNSEEN });
            let added = TensorData::new(added.collect::<Vec<f32>>(), [texts.batch, 1, 1, source]);
            Tensor::from_data(added, &model.device)
        });
        Self {
            batch: texts.batch,
            encoder_bias: model.encoder.bias(&params, source, training),
            decoder_bias: model.decoder.bias(&params, target, training),
            padding,
            dropout: None,
        }
    }
}

/// The model with one micro-batch's context and the trainables' values.
pub struct T5Run<'a, B: Tape<Base = B>> {
    /// The model.
    pub model: &'a T5<B>,
    /// The micro-batch's context.
    pub context: &'a T5Context<B>,
    /// Values of what trains.
    pub trainables: &'a Trainables<B>,
    /// What the forward pass keeps.
    pub retention: Retention,
}

/// What a forward pass kept.
pub struct T5Trace<'a, B: Tape<Base = B>> {
    /// None where nothing of the encoder trains.
    encoder: Option<StackTrace<'a, B>>,
    decoder: Option<StackTrace<'a, B>>,
    memory: Tensor<B, 2>,
    /// Where source and target have read which rows of the table, if it trains.
    lookups: Option<[Lookups; 2]>,
}

type StackTower<'a, B> = Tower<'a, B, Vec<InContext<'a, B>>>;

impl<B: Tape<Base = B>> T5Trace<'_, B> {
    /// What the encoder has made of the sources, `[b * s, d]`.
    pub fn memory(&self) -> &Tensor<B, 2> {
        &self.memory
    }
}

struct StackTrace<'a, B: Tape<Base = B>> {
    blocks: Trace<'a, B>,
    norm: RecordedSegment<'a, B>,
}

impl<'a, B: Tape<Base = B>> T5Run<'a, B> {
    /// The decoder's normed hidden states, `[b * t, d]`, and what is kept for [`T5Run::backward`].
    pub fn forward(
        &self,
        texts: &Texts<'_>,
        lap: &mut dyn FnMut(&'static str),
    ) -> (Tensor<B, 2>, T5Trace<'a, B>) {
        let lookups = self
            .model
            .trained_table()
            .map(|_| [texts.source, texts.target].map(|ids| Lookups::new((0..).zip(ids.iter().copied()))));
        let table_trains = lookups.is_some();
        let x_nd = self.model.embed(self.trainables, texts.source);
        let (memory, encoder) = self.through(&self.model.encoder, self.encoder_tower(), x_nd, table_trains);
        lap(ENCODER);
        let side = Input { value: memory.clone(), tracked: encoder.is_some() };
        let decoder = &self.model.decoder;
        // A block below the first that trains passes gradients on to the encoder all the same.
        let first_trains = decoder.bias_trains() || decoder.blocks.first().is_some_and(T5Block::trains);
        let below = table_trains || encoder.is_some() && !first_trains;
        let x_nd = self.model.embed(self.trainables, texts.target);
        let (hidden_nd, decoder) = self.through(decoder, self.decoder_tower(vec![side]), x_nd, below);
        lap(DECODER);
        (hidden_nd, T5Trace { encoder, decoder, memory, lookups })
    }

    /// Carries the gradient of the hidden states back; gradients of what trains are added to `grads`.
    pub fn backward(
        &self,
        trace: T5Trace<'a, B>,
        dhidden_nd: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
        lap: &mut dyn FnMut(&'static str),
    ) {
        let T5Trace { encoder, decoder, memory, lookups } = trace;
        let [of_source, of_target] = lookups.map_or([None, None], |both| both.map(Some));
        let Some(StackTrace { blocks, norm }) = decoder else { return };
        let Some(dx_nd) = norm.backward(dhidden_nd, grads).into_iter().next().flatten() else { return };
        let side = Input { value: memory, tracked: encoder.is_some() };
        let Ok(found) = self.decoder_tower(vec![side]).backward(blocks, dx_nd, grads);
        self.looked_up(of_target, found.input, grads);
        lap(DECODER);
        let dmemory = found.sides.into_iter().next().flatten();
        let (Some(StackTrace { blocks, norm }), Some(dmemory_nd)) = (encoder, dmemory) else { return };
        if let Some(dx_nd) = norm.backward(dmemory_nd, grads).into_iter().next().flatten() {
            let Ok(found) = self.encoder_tower().backward(blocks, dx_nd, grads);
            self.looked_up(of_source, found.input, grads);
        }
        lap(ENCODER);
    }

    /// Adds the gradient of the table's rows, if it trains, given that of what was looked up.
    fn looked_up(
        &self,
        lookups: Option<Lookups>,
        drows_nd: Option<Tensor<B, 2>>,
        grads: &mut dyn GradientSums<B>,
    ) {
        if let (Some(table), Some(lookups), Some(drows_nd)) = (self.model.trained_table(), lookups, drows_nd)
        {
            grads.add_rows(self.trainables.layout().get(table), &lookups, drows_nd);
        }
    }

    /// What the encoder makes of the sources, `[b * s, d]`, without a trace.
    pub fn encode(&self, source: &[u32]) -> Tensor<B, 2> {
        let Ok(x_nd) = self.encoder_tower().run(self.model.embed(self.trainables, source));
        self.normed(&self.model.encoder, x_nd)
    }

    /// What the decoder makes of targets beside that, `[b * t, d]`, without a trace.
    pub fn decode(&self, memory: Tensor<B, 2>, target: &[u32]) -> Tensor<B, 2> {
        let tower = self.decoder_tower(vec![Input::constant(memory)]);
        let Ok(x_nd) = tower.run(self.model.embed(self.trainables, target));
        self.normed(&self.model.decoder, x_nd)
    }

    fn normed(&self, stack: &'a T5Stack<B>, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        self.norm(stack).run(&ParamScope::<B>::frozen(self.trainables), &[x_nd])
    }

    /// A stack and its norm; a trace if anything of it trains, or is to pass gradients on.
    fn through(
        &self,
        stack: &'a T5Stack<B>,
        tower: StackTower<'a, B>,
        x_nd: Tensor<B, 2>,
        below_trains: bool,
    ) -> (Tensor<B, 2>, Option<StackTrace<'a, B>>) {
        let Ok((x_nd, blocks)) = tower.forward(x_nd, below_trains);
        let tracked = below_trains || stack.blocks_train();
        if !tracked && !stack.norm_d.trains() {
            return (self.normed(stack, x_nd), None);
        }
        let norm =
            RecordedSegment::run(&self.norm(stack), self.trainables, vec![Input { value: x_nd, tracked }]);
        (norm.output(), Some(StackTrace { blocks, norm }))
    }

    fn encoder_tower(&self) -> StackTower<'a, B> {
        let rows = self.context.dropout.as_ref().map(|rows| rows.source.clone());
        self.tower(&self.model.encoder, vec![], rows)
    }

    fn decoder_tower(&self, sides: Vec<Input<B>>) -> StackTower<'a, B> {
        let rows = self.context.dropout.as_ref().map(|rows| rows.target.clone());
        self.tower(&self.model.decoder, sides, rows)
    }

    fn tower(
        &self,
        stack: &'a T5Stack<B>,
        sides: Vec<Input<B>>,
        dropout: Option<DropoutRows<B>>,
    ) -> StackTower<'a, B> {
        let Self { context, trainables, retention, .. } = *self;
        let bias_trains = stack.bias_trains();
        let layers = stack.blocks.iter().map(|block| InContext { block, context, bias_trains }).collect();
        Tower { layers, trainables, retention, sides, dropout }
    }

    fn norm(&self, stack: &'a T5Stack<B>) -> Norm<'a, B> {
        Norm { gain_d: &stack.norm_d, eps: self.model.config.eps }
    }
}

struct Norm<'a, B: ModelBackend> {
    gain_d: &'a BaseWeight<B, 1>,
    eps: f64,
}

impl<B: Tape<Base = B>> Segment<B> for Norm<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        T::rms_norm(inputs[0].clone(), self.gain_d.on_tape(params), self.eps)
    }
}
