//! A pair as training sees it, and pairs side by side: plain host memory. Rows are padded on the right.

use coxswain_models::text_to_text::Texts;
use coxswain_nn::next_token::TokenTargets;
use coxswain_proto::ids::Step;
use coxswain_task::{Batch, Sample};

/// A pair, encoded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairSample {
    /// Place in the file.
    pub index: u64,
    /// Ids of the source, its end included.
    pub source: Vec<u32>,
    /// Ids of the target, its end included.
    pub target: Vec<u32>,
}

/// Pairs of one forward pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairBatch {
    /// The optimizer step that they belong to.
    pub step: Step,
    /// Places in the file.
    pub indices: Vec<u64>,
    /// `[b, s]` row-major, padded on the right.
    pub source: Vec<u32>,
    /// Whether a token of a source is one, `[b, s]`.
    pub seen: Vec<bool>,
    /// What the decoder reads: targets moved right by one, `[b, t]`.
    pub shifted: Vec<u32>,
    /// Tokens of each target.
    pub lengths: Vec<usize>,
    /// What the decoder is to write.
    pub targets: TokenTargets,
}

impl PairBatch {
    /// These pairs, in this order; `pad` fills up shorter ones, `start` is what the decoder begins with.
    pub fn from_samples(step: Step, samples: &[&PairSample], [pad, start]: [u32; 2]) -> Self {
        let longest = |len: fn(&PairSample) -> usize| samples.iter().map(|&sample| len(sample)).max();
        let source_len = longest(|sample| sample.source.len()).unwrap_or(0);
        let target_len = longest(|sample| sample.target.len()).unwrap_or(0);
        let mut batch = Self { step, ..Self::default() };
        let mut labels = Vec::with_capacity(samples.len() * target_len);
        for PairSample { index, source, target } in samples {
            batch.indices.push(*index);
            batch.lengths.push(target.len());
            let padding = source_len - source.len();
            batch.source.extend(source.iter().copied().chain(std::iter::repeat_n(pad, padding)));
            batch.seen.extend((0..source_len).map(|at| at < source.len()));
            let labelled = (0..target_len).map(|at| target.get(at).copied());
            let before = [start].into_iter().chain(target.iter().copied()).chain(std::iter::repeat(pad));
            batch.shifted.extend(before.take(target_len));
            labels.extend(labelled);
        }
        batch.targets = TokenTargets::of(labels);
        batch
    }

    /// What [`PairBatch::from_samples`] was given.
    pub fn apart(&self) -> Vec<PairSample> {
        let len = self.source.len() / self.indices.len().max(1);
        let (mut samples, mut ids) = (Vec::with_capacity(self.indices.len()), &self.targets.ids[..]);
        for (row, (&index, &tokens)) in self.indices.iter().zip(&self.lengths).enumerate() {
            let (target, others) = ids.split_at(tokens);
            ids = others;
            let place = row * len..(row + 1) * len;
            let seen = self.seen[place.clone()].iter().filter(|seen| **seen).count();
            let source = self.source[place][..seen].to_vec();
            samples.push(PairSample { index, source, target: target.to_vec() });
        }
        samples
    }

    /// What the model reads of it.
    pub fn texts(&self) -> Texts<'_> {
        Texts { batch: self.indices.len(), source: &self.source, seen: &self.seen, target: &self.shifted }
    }
}

impl Sample for PairSample {
    fn index(&self) -> u64 {
        self.index
    }
}

impl Batch for PairBatch {
    fn step(&self) -> Step {
        self.step
    }

    fn samples(&self) -> &[u64] {
        &self.indices
    }

    fn tokens(&self) -> u64 {
        let sources = self.seen.iter().filter(|seen| **seen).count();
        (sources + self.targets.ids.len()) as u64
    }

    fn cells(&self) -> usize {
        self.source.len() + self.shifted.len()
    }

    fn bytes(&self) -> u64 {
        let ids = self.source.len() + self.shifted.len() + 2 * self.targets.ids.len();
        (4 * ids + self.seen.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_come_apart_as_they_were_put_together_and_the_decoder_reads_what_is_before() {
        let sample = |index, source: &[u32], target: &[u32]| PairSample {
            index,
            source: source.into(),
            target: target.into(),
        };
        let samples =
            [sample(7, &[5, 6, 1], &[8, 1]), sample(3, &[1], &[7, 9, 4, 1]), sample(4, &[2, 1], &[1])];
        let batch = PairBatch::from_samples(Step(2), &samples.iter().collect::<Vec<_>>(), [0, 99]);
        assert_eq!((batch.cells(), batch.tokens()), (9 + 12, 6 + 7));
        assert_eq!(batch.shifted, [99, 8, 1, 0, 99, 7, 9, 4, 99, 1, 0, 0]);
        assert_eq!(batch.targets.rows, [0, 1, 4, 5, 6, 7, 8]);
        assert_eq!(batch.apart(), samples);
        let none = PairBatch::from_samples(Step(0), &[], [0, 99]);
        assert!(none.apart().is_empty() && none.targets == TokenTargets::default());
    }
}
