//! One micro-batch through the model and back.
//!
//! ```text
//! source ids -> table -> encoder blocks -> norm ┐ keys and values of every cross attention
//! target ids -> table -> decoder blocks <───────┴ -> norm -> hidden states
//! ```
//!
//! What a decoder reads is the target shifted right by one. The head is not part of the pass: which rows
//! predict something is for the task to say. Every sum over keys leaves padding out, so that a row depends on
//! its own texts alone.

use burn::tensor::{Tensor, TensorData};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    params::{BaseWeight, GradientSums, ParamScope, Trainables},
    recompute::{
        Retention, Tower, Trace,
        segment::{Input, Recorded, Segment},
    },
};

use super::{
    block::{InContext, T5Block},
    buckets::UNSEEN,
    context::T5Context,
    model::{T5, T5Stack},
};

/// The encoder, as its time is shown.
pub const ENCODER: &str = "encoder";
/// The decoder.
pub const DECODER: &str = "decoder";

/// Texts of a micro-batch, padded on the right.
#[derive(Clone, Copy, Debug)]
pub struct Texts<'a> {
    /// Rows.
    pub batch: usize,
    /// Sources, `[b, s]`.
    pub source: &'a [u32],
    /// Whether a token of a source is seen, `[b, s]`: padding is not.
    pub seen: &'a [bool],
    /// What the decoder reads, `[b, t]`.
    pub target: &'a [u32],
}

impl<B: ModelBackend> T5Context<B> {
    /// Of these texts.
    pub fn new(model: &T5<B>, texts: &Texts<'_>) -> Self {
        let [source, target] = [texts.source, texts.target].map(|ids| ids.len() / texts.batch.max(1));
        let padding = texts.seen.contains(&false).then(|| {
            let added = texts.seen.iter().map(|&seen| if seen { 0.0 } else { UNSEEN });
            let added = TensorData::new(added.collect::<Vec<f32>>(), [texts.batch, 1, 1, source]);
            Tensor::from_data(added, &model.device)
        });
        Self {
            batch: texts.batch,
            encoder_bias: model.encoder.bias(source),
            decoder_bias: model.decoder.bias(target),
            padding,
        }
    }
}

/// The model with one micro-batch's context and the trainables' values.
pub struct T5Run<'a, B: Tape<Base = B>> {
    /// The model.
    pub model: &'a T5<B>,
    /// Of the micro-batch.
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
}

struct StackTrace<'a, B: Tape<Base = B>> {
    blocks: Trace<'a, B>,
    norm: Recorded<'a, B>,
}

impl<'a, B: Tape<Base = B>> T5Run<'a, B> {
    /// The decoder's normed hidden states, `[b * t, d]`, and what is kept for [`T5Run::backward`].
    pub fn forward(
        &self,
        texts: &Texts<'_>,
        lap: &mut dyn FnMut(&'static str),
    ) -> (Tensor<B, 2>, T5Trace<'a, B>) {
        let x_nd = self.model.embed(texts.source);
        let (memory, encoder) = self.through(&self.model.encoder, x_nd, vec![], false);
        lap(ENCODER);
        let side = Input { value: memory.clone(), tracked: encoder.is_some() };
        let decoder = &self.model.decoder;
        // A block below the first that trains passes gradients on to the encoder all the same.
        let below = encoder.is_some() && !decoder.blocks.first().is_some_and(T5Block::trains);
        let (hidden_nd, decoder) = self.through(decoder, self.model.embed(texts.target), vec![side], below);
        lap(DECODER);
        (hidden_nd, T5Trace { encoder, decoder, memory })
    }

    /// Carries the gradient of the hidden states back; gradients of what trains are added to `grads`.
    pub fn backward(
        &self,
        trace: T5Trace<'a, B>,
        dhidden_nd: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
        lap: &mut dyn FnMut(&'static str),
    ) {
        let T5Trace { encoder, decoder, memory } = trace;
        let Some(StackTrace { blocks, norm }) = decoder else { return };
        let Some(dx_nd) = norm.backward(dhidden_nd, grads).into_iter().next().flatten() else { return };
        let side = Input { value: memory, tracked: encoder.is_some() };
        let Ok(found) = self.tower(&self.model.decoder, vec![side]).backward(blocks, dx_nd, grads);
        lap(DECODER);
        let dmemory = found.sides.into_iter().next().flatten();
        let (Some(StackTrace { blocks, norm }), Some(dmemory_nd)) = (encoder, dmemory) else { return };
        if let Some(dx_nd) = norm.backward(dmemory_nd, grads).into_iter().next().flatten() {
            let Ok(_) = self.tower(&self.model.encoder, vec![]).backward(blocks, dx_nd, grads);
        }
        lap(ENCODER);
    }

    /// What the encoder makes of the sources, `[b * s, d]`, without a trace.
    pub fn encode(&self, source: &[u32]) -> Tensor<B, 2> {
        self.run(&self.model.encoder, self.model.embed(source), vec![])
    }

    /// What the decoder makes of targets beside that, `[b * t, d]`, without a trace.
    pub fn decode(&self, memory: Tensor<B, 2>, target: &[u32]) -> Tensor<B, 2> {
        self.run(&self.model.decoder, self.model.embed(target), vec![Input::constant(memory)])
    }

    fn run(&self, stack: &'a T5Stack<B>, x_nd: Tensor<B, 2>, sides: Vec<Input<B>>) -> Tensor<B, 2> {
        let Ok(x_nd) = self.tower(stack, sides).run(x_nd);
        self.norm(stack).run(&ParamScope::<B>::frozen(self.trainables), &[x_nd])
    }

    /// A stack and its norm; a trace if anything of it trains, or is to pass gradients on.
    fn through(
        &self,
        stack: &'a T5Stack<B>,
        x_nd: Tensor<B, 2>,
        sides: Vec<Input<B>>,
        below_trains: bool,
    ) -> (Tensor<B, 2>, Option<StackTrace<'a, B>>) {
        let Ok((x_nd, blocks)) = self.tower(stack, sides).forward(x_nd, below_trains);
        let tracked = below_trains || stack.blocks_train();
        if !tracked && !stack.norm_d.trains() {
            let params = ParamScope::<B>::frozen(self.trainables);
            return (self.norm(stack).run(&params, &[x_nd]), None);
        }
        let norm = Recorded::run(&self.norm(stack), self.trainables, vec![Input { value: x_nd, tracked }]);
        (norm.output(), Some(StackTrace { blocks, norm }))
    }

    fn tower(&self, stack: &'a T5Stack<B>, sides: Vec<Input<B>>) -> Tower<'a, B, Vec<InContext<'a, B>>> {
        let context = self.context;
        let layers = stack.blocks.iter().map(|block| InContext { block, context }).collect();
        let Self { trainables, retention, .. } = *self;
        Tower { layers, trainables, retention, sides, dropout: None }
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
