//! The order of samples: a keyed permutation of the training samples for every epoch, in constant memory, and
//! its inverse.
//!
//! ```text
//! position of an epoch ── at ──▶ number among the training samples      (which sample that is, is the data
//!                                                                       module's affair)
//!                      ◀─ position ──
//! ```
//!
//! A balanced Feistel network over the next even power of two is a bijection there; walking its cycle until
//! the value falls below `n` restricts it to `0..n` (cycle walking; fewer than four rounds on average, as the
//! domain is less than `4 n`). Run backwards it says where a sample stands, so what is wrong with a row of
//! the data set is known of every epoch. Its round keys come from (seed, epoch, data set) and nothing else:
//! world size, micro-batch, faults and restarts cannot change which sample stands at a position, and resuming
//! in the middle of an epoch costs nothing.

use std::{collections::BTreeMap, ops::Range};

use serde::{Deserialize, Serialize};

use crate::{
    plan::Batch,
    rng::{Key, Purpose},
};

/// Feistel rounds. Four make a strong permutation from a strong round function; ours is a cheap mixer, so
/// twice as many and more.
const ROUNDS: usize = 10;

/// Which training sample stands at a position of an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    seed: u64,
    key: u64,
    len: u64,
}

/// A row of the data set that cannot be used, and the samples that need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DamagedRow {
    /// Its place in the data set, as a sample's index.
    pub row: u64,
    /// The first sample that needs it, as a number among the training samples.
    pub begin: u64,
    /// One past the last.
    pub end: u64,
}

impl Order {
    /// The order of `len` training samples of the data set with this key (`RegisterRequest.order_key`) under
    /// `run.seed`.
    pub fn new(seed: u64, key: u64, len: u64) -> Self {
        Self { seed, key, len }
    }

    /// Samples in an epoch.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True without samples.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The training sample at `position` of `epoch`; `None` past the epoch's end. Every sample stands at
    /// exactly one position.
    pub fn at(&self, epoch: u64, position: u64) -> Option<u64> {
        let network = self.network(epoch);
        (position < self.len).then(|| self.walk(position, |x| network.permute(x)))
    }

    /// The position of `epoch` at which a training sample stands; `None` if there is no such sample.
    pub fn position(&self, epoch: u64, number: u64) -> Option<u64> {
        let network = self.network(epoch);
        (number < self.len).then(|| self.walk(number, |x| network.restore(x)))
    }

    /// Positions of `epoch` whose samples need one of `rows`, in order, each once.
    pub fn damaged<'a>(&self, epoch: u64, rows: impl IntoIterator<Item = &'a DamagedRow>) -> Vec<Range<u64>> {
        let network = self.network(epoch);
        let numbers = rows.into_iter().flat_map(|row| row.begin..row.end.min(self.len));
        let mut positions: Vec<_> = numbers.map(|number| self.walk(number, |x| network.restore(x))).collect();
        positions.sort_unstable();
        positions.dedup();
        positions.into_iter().map(|position| position..position + 1).collect()
    }

    fn walk(&self, from: u64, step: impl Fn(u64) -> u64) -> u64 {
        let mut x = step(from);
        while x >= self.len {
            x = step(x);
        }
        x
    }

    fn network(&self, epoch: u64) -> Feistel {
        let Self { seed, key: sample, len } = *self;
        let mut draws = Key { seed, purpose: Purpose::Order, step: epoch, sample, repeat: 0 }.draws();
        Feistel::new(std::array::from_fn(|_| draws.word()), len)
    }
}

/// Positions that are left out, worked out for an epoch when they are first asked for.
#[derive(Clone, Debug, Default)]
pub struct LeftOut {
    order: Order,
    rows: Vec<DamagedRow>,
    /// By epoch, the newest few.
    epochs: BTreeMap<u64, Vec<Range<u64>>>,
}

impl LeftOut {
    /// Epochs that are remembered: steps are asked for in order, but for those in flight.
    const KEPT: usize = 4;

    /// The positions of these rows' samples.
    pub fn new(order: Order, rows: impl IntoIterator<Item = DamagedRow>) -> Self {
        Self { order, rows: rows.into_iter().collect(), epochs: BTreeMap::new() }
    }

    /// Positions of a step that are left out, in order.
    pub fn of(&mut self, batch: &Batch) -> Vec<Range<u64>> {
        if self.rows.is_empty() {
            return Vec::new();
        }
        if self.epochs.len() >= Self::KEPT && !self.epochs.contains_key(&batch.epoch) {
            self.epochs.pop_first();
        }
        let (order, rows) = (&self.order, &self.rows);
        let of_epoch = self.epochs.entry(batch.epoch).or_insert_with(|| order.damaged(batch.epoch, rows));
        let first = of_epoch.partition_point(|hole| hole.end <= batch.positions.start);
        let within = of_epoch[first..].iter().take_while(|hole| hole.start < batch.positions.end);
        within.cloned().collect()
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
        let mask = self.mask();
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }

    /// The inverse: the same rounds backwards.
    fn restore(&self, x: u64) -> u64 {
        let mask = self.mask();
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for key in self.keys.into_iter().rev() {
            (left, right) = (right ^ (mix(left ^ key) & mask), left);
        }
        left << self.half_bits | right
    }

    fn mask(&self) -> u64 {
        (1u64 << self.half_bits) - 1
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

    proptest! {
        #[test]
        fn every_epoch_visits_every_training_sample_once_and_knows_where(seed: u64, key: u64, epoch: u64, n in 1u64..600) {
            let order = Order::new(seed, key, n);
            let mut seen: Vec<u64> = (0..n).filter_map(|position| order.at(epoch, position)).collect();
            for (position, number) in seen.iter().enumerate() {
                prop_assert_eq!(order.position(epoch, *number), Some(position as u64));
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..n).collect::<Vec<_>>());
            prop_assert_eq!((order.at(epoch, n), order.position(epoch, n)), (None, None));
        }

        #[test]
        fn large_data_sets_stay_within_bounds(seed: u64, n in 1u64..1 << 60, at in 0.0..1.0f64) {
            let position = ((n as f64 * at) as u64).min(n - 1);
            let order = Order::new(seed, 3, n);
            let number = order.at(0, position).expect("within the epoch");
            prop_assert!(number < n);
            prop_assert_eq!(order.position(0, number), Some(position));
        }

        #[test]
        fn damaged_rows_are_those_positions_whose_samples_need_them(
            seed: u64, epoch: u64, n in 1u64..200, rows in prop::collection::vec((0u64..220, 0u64..20), 0..5),
        ) {
            let order = Order::new(seed, 3, n);
            let rows: Vec<_> = rows.into_iter().map(|(begin, len)| DamagedRow { row: begin, begin, end: begin + len }).collect();
            let found: Vec<u64> = order.damaged(epoch, &rows).into_iter().flatten().collect();
            let needs = |number: u64| rows.iter().any(|row| (row.begin..row.end).contains(&number));
            let due = (0..n).filter(|position| order.at(epoch, *position).is_some_and(needs));
            prop_assert_eq!(found, due.collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_is_left_out_is_left_out_of_every_epoch() {
        let order = Order::new(7, 5, 30);
        let mut left_out = LeftOut::new(order, [DamagedRow { row: 12, begin: 9, end: 12 }]);
        for epoch in 0..9 {
            let batches = [0..8, 8..16, 16..24, 24..30].map(|positions| Batch { epoch, positions });
            let found: Vec<u64> = batches.iter().flat_map(|batch| left_out.of(batch)).flatten().collect();
            let mut numbers: Vec<_> =
                found.iter().filter_map(|position| order.at(epoch, *position)).collect();
            numbers.sort_unstable();
            assert_eq!(numbers, [9, 10, 11], "epoch {epoch}");
        }
        assert_eq!(left_out.epochs.len(), LeftOut::KEPT);
    }

    #[test]
    fn seed_epoch_and_data_set_each_change_the_order() {
        let list = |order: &Order, epoch| -> Vec<_> { (0..100).map(|p| order.at(epoch, p)).collect() };
        let base = Order::new(1, 3, 100);
        assert_eq!(list(&base, 0), list(&Order::new(1, 3, 100), 0));
        assert_ne!(list(&base, 0), list(&base, 1));
        assert_ne!(list(&base, 0), list(&Order::new(2, 3, 100), 0));
        assert_ne!(list(&base, 0), list(&Order::new(1, 4, 100), 0));
    }

    #[test]
    fn the_order_looks_random_even_for_small_data_sets() {
        // Over many epochs each of 10 samples must stand at each of 10 positions about equally often.
        let (order, epochs) = (Order::new(5, 3, 10), 20_000u64);
        let mut counts = [[0f64; 10]; 10];
        for epoch in 0..epochs {
            for (position, row) in counts.iter_mut().enumerate() {
                row[order.at(epoch, position as u64).expect("within the epoch") as usize] += 1.0;
            }
        }
        let expected = epochs as f64 / 10.0;
        let chi2: f64 = counts.iter().flatten().map(|c| (c - expected).powi(2) / expected).sum();
        // 81 degrees of freedom: mean 81, standard deviation 12.7; 150 is beyond 5 of them.
        assert!(chi2 < 150.0, "chi-square {chi2}");
    }
}
