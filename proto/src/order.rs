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
//!
//! A mixture of data sets has two levels. Each set has an endless row of permutations of its own, pass after
//! pass; epoch `e` takes of it the places `e t .. (e + 1) t`, where `t` is the set's share, and the epoch's
//! permutation shuffles what was taken. So nothing of a set comes again before all of it has come, however
//! small its share, and where in its row each set stands is arithmetic as well.

use std::{collections::BTreeMap, ops::Range};

use serde::{Deserialize, Serialize};

use crate::{
    plan::Batch,
    rng::{Key, Purpose},
    v1,
};

/// Feistel rounds. Four make a strong permutation from a strong round function; ours is a cheap mixer, so
/// twice as many and more.
const ROUNDS: usize = 10;

/// Which training sample stands at a position of an epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Order {
    seed: u64,
    key: u64,
    len: u64,
    /// Shares of the data sets of a mixture; empty where there is one data set.
    shares: Vec<SetShare>,
}

/// What an epoch takes of one data set of a mixture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetShare {
    /// The set's name in the run file.
    pub name: String,
    /// Keys its own permutations, as [`Order::new`] does for a set alone.
    pub order_key: u64,
    /// Training samples.
    pub samples: u64,
    /// So many of them are in an epoch.
    pub taken: u64,
}

/// A row of the data set that cannot be used, and the samples that need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DamagedRow {
    /// Place in the data set, as a sample's index.
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
        Self { seed, key, len, shares: Vec::new() }
    }

    /// The order of a mixture of sets, whose training samples are numbered one set after another, and of each
    /// of which an epoch has its share; of one data set if there are no shares.
    pub fn of_sets(self, shares: Vec<SetShare>) -> Self {
        let len = if shares.is_empty() { self.len } else { shares.iter().map(|share| share.taken).sum() };
        Self { len, shares, ..self }
    }

    /// The sets of a mixture; none where there is one data set.
    pub fn shares(&self) -> &[SetShare] {
        &self.shares
    }

    /// Samples in an epoch.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True without samples.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The training sample at `position` of `epoch`; `None` past the epoch's end. Of one data set every
    /// sample stands at exactly one position.
    pub fn at(&self, epoch: u64, position: u64) -> Option<u64> {
        let slot = self.shuffle(epoch).at(position)?;
        if self.shares.is_empty() {
            return Some(slot);
        }
        let (mut first_slot, mut first_number) = (0, 0);
        for share in &self.shares {
            if slot < first_slot + share.taken {
                let drawn = share.drawn_before(epoch) + u128::from(slot - first_slot);
                let (pass, place) = share.place(drawn);
                return Some(first_number + self.of_set(share, pass).at(place)?);
            }
            (first_slot, first_number) = (first_slot + share.taken, first_number + share.samples);
        }
        None
    }

    /// The positions of `epoch` at which a training sample stands: of one data set one; of a mixture none if
    /// its turn does not come, or several where the set begins again.
    pub fn positions(&self, epoch: u64, number: u64) -> Vec<u64> {
        let shuffle = self.shuffle(epoch);
        if self.shares.is_empty() {
            return shuffle.place_of(number).into_iter().collect();
        }
        let (mut first_slot, mut first_number) = (0, 0);
        for share in &self.shares {
            if number < first_number + share.samples {
                let begin = share.drawn_before(epoch);
                let drawn = begin..begin + u128::from(share.taken);
                let (first, last) = (share.place(begin).0, share.place(drawn.end.saturating_sub(1)).0);
                let places = (first..=last).filter_map(|pass| {
                    let place = self.of_set(share, pass).place_of(number - first_number)?;
                    Some(u128::from(pass) * u128::from(share.samples) + u128::from(place))
                });
                let slots = places.filter(|at| drawn.contains(at)).map(|at| first_slot + (at - begin) as u64);
                return slots.filter_map(|slot| shuffle.place_of(slot)).collect();
            }
            (first_slot, first_number) = (first_slot + share.taken, first_number + share.samples);
        }
        Vec::new()
    }

    /// Positions of `epoch` whose samples need one of `rows`, in order, each once.
    pub fn damaged<'a>(&self, epoch: u64, rows: impl IntoIterator<Item = &'a DamagedRow>) -> Vec<Range<u64>> {
        let numbers = rows.into_iter().flat_map(|row| row.begin..row.end);
        let mut positions: Vec<_> = numbers.flat_map(|number| self.positions(epoch, number)).collect();
        positions.sort_unstable();
        positions.dedup();
        positions.into_iter().map(|position| position..position + 1).collect()
    }

    /// How many of these positions of `epoch` each set of a mixture has, in the order of its shares.
    pub fn by_set(&self, epoch: u64, positions: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let shuffle = self.shuffle(epoch);
        let ends: Vec<u64> = self
            .shares
            .iter()
            .scan(0, |end, share| {
                *end += share.taken;
                Some(*end)
            })
            .collect();
        let mut counts = vec![0; ends.len()];
        for slot in positions.into_iter().filter_map(|position| shuffle.at(position)) {
            if let Some(count) = counts.get_mut(ends.partition_point(|end| *end <= slot)) {
                *count += 1;
            }
        }
        counts
    }

    fn shuffle(&self, epoch: u64) -> Shuffle {
        Shuffle::new(self.seed, self.key, epoch, self.len)
    }

    fn of_set(&self, share: &SetShare, pass: u64) -> Shuffle {
        Shuffle::new(self.seed, share.order_key, pass, share.samples)
    }
}

impl SetShare {
    /// How many places of the set's row the epochs before this one have taken.
    fn drawn_before(&self, epoch: u64) -> u128 {
        u128::from(epoch) * u128::from(self.taken)
    }

    /// The pass through the set that has this place of its row, and where in it.
    fn place(&self, drawn: u128) -> (u64, u64) {
        let samples = u128::from(self.samples.max(1));
        ((drawn / samples) as u64, (drawn % samples) as u64)
    }
}

impl From<&Order> for v1::EpochOrder {
    fn from(order: &Order) -> Self {
        let Order { seed, key, shares, .. } = order;
        Self { seed: *seed, key: *key, sets: shares.iter().map(Into::into).collect() }
    }
}

impl From<v1::EpochOrder> for Order {
    fn from(wire: v1::EpochOrder) -> Self {
        Self::new(wire.seed, wire.key, 0).of_sets(wire.sets.into_iter().map(Into::into).collect())
    }
}

impl From<&SetShare> for v1::SetShare {
    fn from(share: &SetShare) -> Self {
        let SetShare { name, order_key, samples, taken } = share;
        Self { name: name.clone(), order_key: *order_key, samples: *samples, taken: *taken }
    }
}

impl From<v1::SetShare> for SetShare {
    fn from(wire: v1::SetShare) -> Self {
        let v1::SetShare { name, order_key, samples, taken } = wire;
        Self { name, order_key, samples, taken }
    }
}

/// One permutation of `0..len`.
struct Shuffle {
    network: Feistel,
    len: u64,
}

impl Shuffle {
    fn new(seed: u64, key: u64, pass: u64, len: u64) -> Self {
        let mut draws = Key { seed, purpose: Purpose::Order, step: pass, sample: key, repeat: 0 }.draws();
        Self { network: Feistel::new(std::array::from_fn(|_| draws.word()), len), len }
    }

    fn at(&self, place: u64) -> Option<u64> {
        (place < self.len).then(|| self.walk(place, |x| self.network.permute(x)))
    }

    fn place_of(&self, value: u64) -> Option<u64> {
        (value < self.len).then(|| self.walk(value, |x| self.network.restore(x)))
    }

    fn walk(&self, from: u64, step: impl Fn(u64) -> u64) -> u64 {
        let mut x = step(from);
        while x >= self.len {
            x = step(x);
        }
        x
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
    pub fn in_batch(&mut self, batch: &Batch) -> Vec<Range<u64>> {
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
mod tests;
