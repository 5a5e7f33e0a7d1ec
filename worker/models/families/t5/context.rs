//! What a micro-batch is to the blocks.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{
        DropoutRows, ModelBackend, Tape,
        dropout::{row_word, sample_word},
    },
    params::{ParamId, ParamScope},
};

use super::buckets::Buckets;
use crate::{pretrained::prompts::DropoutKeys, text_to_text::Texts};

/// What a stack's blocks add to their scores by relative positions, `[1, heads, len, len]`.
pub enum PositionBias<B: ModelBackend> {
    /// Values.
    Known(Tensor<B, 4>),
    /// Where its table trains: made in each block anew, so that each block's tape has the table for a leaf.
    Trained {
        /// `[buckets, heads]`.
        table: ParamId,
        /// Which of its rows is whose.
        buckets: Buckets,
        /// Tokens.
        len: usize,
    },
}

impl<B: ModelBackend> PositionBias<B> {
    /// Values on a block's tape.
    pub fn on_tape<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>) -> Tensor<T, 4> {
        match self {
            Self::Known(bias) => T::lift(bias.clone()),
            Self::Trained { table, buckets, len } => buckets.bias(params.get::<2>(*table), *len),
        }
    }
}

/// What all blocks share within one micro-batch.
pub struct T5Context<B: ModelBackend> {
    /// Rows.
    pub batch: usize,
    /// By relative positions of a source.
    pub encoder_bias: PositionBias<B>,
    /// By those of a target, and against what lies ahead.
    pub decoder_bias: PositionBias<B>,
    /// Against padding of a source, `[b, 1, 1, s]`; none where nothing is padded.
    pub padding: Option<Tensor<B, 4>>,
    /// Rows of a pass whose adapters drop some of what they read.
    pub dropout: Option<TextRows<B>>,
}

impl<B: ModelBackend> T5Context<B> {
    /// What is added to scores against padding, on a tape.
    pub fn against_padding<T: Tape<Base = B>>(&self) -> Option<Tensor<T, 4>> {
        self.padding.clone().map(T::lift)
    }

    /// This context for a pass whose adapters drop by these rows.
    pub fn dropping(self, dropout: Option<TextRows<B>>) -> Self {
        Self { dropout, ..self }
    }
}

/// Tokens as the dropout of adapters knows them: which pair they are of, and where in its text. Encoder and
/// decoder have other modules, so that a place in both drops other elements.
pub struct TextRows<B: ModelBackend> {
    /// `[b * s]`.
    pub source: DropoutRows<B>,
    /// `[b * t]`.
    pub target: DropoutRows<B>,
}

impl<B: ModelBackend> TextRows<B> {
    /// Rows of these texts.
    pub fn from_texts(texts: &Texts<'_>, rows: DropoutKeys<'_>, device: &B::Device) -> Self {
        let DropoutKeys { seed, step, samples, .. } = rows;
        let [source, target] = [texts.source, texts.target].map(|ids| {
            let len = (ids.len() / texts.batch.max(1)) as u64;
            let words = samples.iter().map(|&sample| sample_word(seed, step, sample));
            words.flat_map(|word| (0..len).map(move |place| row_word(word, place))).collect()
        });
        Self::of_words([source, target], device)
    }

    /// Rows with one word a token of sources, and of targets.
    pub fn of_words(words: [Vec<u64>; 2], device: &B::Device) -> Self {
        let device = (!B::ON_HOST).then_some(device);
        let [source, target] = words.map(|words| DropoutRows::new(words, device));
        Self { source, target }
    }
}
