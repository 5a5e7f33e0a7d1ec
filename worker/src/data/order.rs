//! The order of samples: a keyed permutation of the training samples for every epoch, in constant memory.
//!
//! A balanced Feistel network over the next even power of two is a bijection there; walking its cycle until the value falls
//! below `n` restricts it to `0..n` (cycle walking; fewer than four rounds on average, as the domain is less than `4 n`).
//! Its round keys come from (seed, epoch, data set fingerprint) and nothing else: world size, micro-batch, faults and restarts
//! cannot change which sample stands at a position, and resuming in the middle of an epoch costs nothing.
//!
//! Held-out episodes are left out before permuting: [`TrainingSamples`] maps `0..n` to the samples that remain.

use std::sync::Arc;

use super::lerobot::Fingerprint;
use crate::rng::{Key, Purpose};

/// Feistel rounds. Four make a strong permutation from a strong round function; ours is a cheap mixer, so twice as many and more.
const ROUNDS: usize = 10;

/// The samples that are trained on: all but those of held-out episodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingSamples {
    /// Runs of consecutive samples: (rank of the first among training samples, the first sample), both ascending.
    runs: Vec<(u64, u64)>,
    len: u64,
}

impl TrainingSamples {
    /// From the sample ranges that are trained on, ascending and disjoint.
    pub fn new(ranges: impl IntoIterator<Item = std::ops::Range<u64>>) -> Self {
        let (mut runs, mut len, mut last_end) = (Vec::new(), 0, None);
        for range in ranges.into_iter().filter(|r| !r.is_empty()) {
            if last_end != Some(range.start) {
                runs.push((len, range.start));
            }
            last_end = Some(range.end);
            len += range.end - range.start;
        }
        Self { runs, len }
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when everything is held out.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `rank`-th training sample.
    pub fn get(&self, rank: u64) -> Option<u64> {
        if rank >= self.len {
            return None;
        }
        let run = self.runs.partition_point(|(first, _)| *first <= rank) - 1;
        let (first, sample) = self.runs[run];
        Some(sample + rank - first)
    }
}

/// Which sample stands at a position of an epoch.
#[derive(Clone, Debug)]
pub struct SampleOrder {
    seed: u64,
    fingerprint: Fingerprint,
    samples: Arc<TrainingSamples>,
}

impl SampleOrder {
    /// The order of these samples under this seed.
    pub fn new(seed: u64, fingerprint: Fingerprint, samples: Arc<TrainingSamples>) -> Self {
        Self { seed, fingerprint, samples }
    }

    /// Samples in an epoch.
    pub fn len(&self) -> u64 {
        self.samples.len()
    }

    /// True without samples.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// The sample at `position` of `epoch`; `None` past the epoch's end. Every sample stands at exactly one position.
    pub fn sample(&self, epoch: u64, position: u64) -> Option<u64> {
        let n = self.len();
        if position >= n {
            return None;
        }
        let network = Feistel::new(self.keys(epoch), n);
        let mut x = network.permute(position);
        while x >= n {
            x = network.permute(x);
        }
        self.samples.get(x)
    }

    fn keys(&self, epoch: u64) -> [u64; ROUNDS] {
        let key = Key {
            seed: self.seed,
            purpose: Purpose::Order,
            step: epoch,
            sample: self.fingerprint.word(),
            repeat: 0,
        };
        let mut draws = key.draws();
        std::array::from_fn(|_| draws.word())
    }
}

/// A bijection of `0..4^half_bits`.
struct Feistel {
    keys: [u64; ROUNDS],
    half_bits: u32,
}

impl Feistel {
    /// The smallest network that covers `0..n`.
    fn new(keys: [u64; ROUNDS], n: u64) -> Self {
        let bits = 64 - n.saturating_sub(1).leading_zeros();
        Self { keys, half_bits: bits.div_ceil(2).max(1) }
    }

    fn permute(&self, x: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// The finaliser of SplitMix64 (Steele et al., OOPSLA 2014): every input bit reaches every output bit.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(seed: u64, n: u64) -> SampleOrder {
        SampleOrder::new(seed, Fingerprint([3; 32]), Arc::new(TrainingSamples::new(std::iter::once(0..n))))
    }

    proptest! {
        #[test]
        fn every_epoch_visits_every_training_sample_once(
            seed: u64, epoch in 0u64..1000, lengths in prop::collection::vec((1u64..90, any::<bool>()), 1..30),
        ) {
            let (mut start, mut kept) = (0, Vec::new());
            for (length, keep) in lengths {
                if keep { kept.push(start..start + length); }
                start += length;
            }
            let want: Vec<u64> = kept.iter().cloned().flatten().collect();
            let samples = Arc::new(TrainingSamples::new(kept));
            let order = SampleOrder::new(seed, Fingerprint([7; 32]), samples);
            let mut got: Vec<u64> = (0..order.len()).filter_map(|p| order.sample(epoch, p)).collect();
            got.sort_unstable();
            prop_assert_eq!(got, want);
            prop_assert_eq!(order.sample(epoch, order.len()), None);
        }

        #[test]
        fn large_data_sets_stay_within_bounds(seed: u64, n in 1u64..1 << 60, at in 0.0..1.0f64) {
            let position = ((n as f64 * at) as u64).min(n - 1);
            prop_assert!(order(seed, n).sample(0, position).is_some_and(|s| s < n));
        }
    }

    #[test]
    fn seed_epoch_and_fingerprint_each_change_the_order() {
        let list =
            |order: &SampleOrder, epoch| -> Vec<_> { (0..100).map(|p| order.sample(epoch, p)).collect() };
        let base = order(1, 100);
        let other = SampleOrder::new(1, Fingerprint([4; 32]), base.samples.clone());
        assert_eq!(list(&base, 0), list(&order(1, 100), 0));
        assert_ne!(list(&base, 0), list(&base, 1));
        assert_ne!(list(&base, 0), list(&order(2, 100), 0));
        assert_ne!(list(&base, 0), list(&other, 0));
    }

    #[test]
    fn the_order_looks_random_even_for_small_data_sets() {
        // Over many epochs each of 10 samples must stand at each of 10 positions about equally often.
        let (order, epochs) = (order(5, 10), 20_000u64);
        let mut counts = [[0f64; 10]; 10];
        for epoch in 0..epochs {
            for (position, row) in counts.iter_mut().enumerate() {
                row[order.sample(epoch, position as u64).expect("within the epoch") as usize] += 1.0;
            }
        }
        let expected = epochs as f64 / 10.0;
        let chi2: f64 = counts.iter().flatten().map(|c| (c - expected).powi(2) / expected).sum();
        // 81 degrees of freedom: mean 81, standard deviation 12.7; 150 is beyond 5 of them.
        assert!(chi2 < 150.0, "chi-square {chi2}");
    }
}
