//! The rows of a micro-batch, as the dropout of adapters knows them: which sample they are of, and where in
//! it. A state's token and actions have places that no token of a prefix has.

use coxswain_models::pretrained::prompts::{DropoutKeys, Prompts};
use coxswain_nn::kernels::{
    DropoutRows, ModelBackend, Tape,
    dropout::{row_word, sample_word},
};

/// Where a state's token is in its sample; actions are behind it.
const STATE: u64 = 1 << 32;

/// The rows that each part reads.
pub(crate) struct SampleRows<B: Tape<Base = B>> {
    /// Tokens of prefixes, `[b * s]`.
    pub tokens: DropoutRows<B>,
    /// What follows them.
    pub suffix: SuffixRows<B>,
}

/// The rows that linear layers read behind a prefix, as adapters drop of them.
pub(crate) struct SuffixRows<B: ModelBackend> {
    /// The states' tokens, `[b]`.
    pub state: DropoutRows<B>,
    /// Actions, `[b * c]`.
    pub actions: DropoutRows<B>,
    /// Keys and values of prefix and state, `[b * (s + 1)]`.
    pub known: DropoutRows<B>,
}

impl<B: Tape<Base = B>> SampleRows<B> {
    /// Rows of a training pass over chunks of so many actions.
    pub fn new(of: DropoutKeys<'_>, prompts: Prompts<'_>, chunk: usize, device: &B::Device) -> Self {
        let device = (!B::ON_HOST).then_some(device);
        let word = |&sample: &u64| sample_word(of.seed, of.step, sample);
        let samples: Vec<u64> = of.samples.iter().map(word).collect();
        let rows = |words: Vec<u64>| DropoutRows::new(words, device);
        let places = prompts.rows.places(prompts.input_ids.len());
        let tokens: Vec<u64> =
            places.map(|(row, place)| row_word(samples[row], place.cast_unsigned())).collect();
        let state: Vec<u64> = samples.iter().map(|&sample| row_word(sample, STATE)).collect();
        let actions = samples
            .iter()
            .flat_map(|&sample| (1..=chunk as u64).map(move |place| row_word(sample, STATE + place)));
        let seq = tokens.len() / samples.len().max(1);
        let known = tokens.chunks(seq.max(1)).zip(&state);
        let known = known.flat_map(|(tokens, &state)| tokens.iter().copied().chain([state]));
        let suffix = SuffixRows {
            actions: rows(actions.collect()),
            known: rows(known.collect()),
            state: rows(state.clone()),
        };
        Self { tokens: rows(tokens), suffix }
    }
}
