//! Digests of what a rank holds, bit for bit: what ranks compare to find out that one of them is wrong.
//!
//! A part of the flat parameter buffer is there more than once: on its owner, in its replica on another rank,
//! and among the weights that every rank computes with. All of these are equal, bit for bit, or
//! something is wrong.

use std::ops::Range;

use coxswain_nn::{kernels::flat::Flat, pulse, rules::StateValues};

use crate::zero::optimizer::ShardedOptimizer;

/// Elements that are brought to the host at once.
const CHUNK: usize = 1 << 20;

/// What a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digests {
    /// All weights that train.
    pub weights: u64,
    /// This rank's part.
    pub own: PartDigests,
    /// The weights of the part that it has a replica of, as this rank computes with them; 0 without one.
    pub replicated: u64,
    /// The replica of that part; none where none is kept.
    pub replica: Option<PartDigests>,
}

/// One part of the flat parameter buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartDigests {
    /// Weights.
    pub weights: u64,
    /// The update rule's state of it, and the average of its weights where one is kept.
    pub state: u64,
}

/// Digest of the state of a shard, and of the average of its weights where one is kept.
pub(super) fn of_state<F: Flat>(shard: &ShardedOptimizer<F>) -> u64 {
    let mut hash = blake3::Hasher::new();
    for values in &shard.state {
        match values {
            StateValues::Float32(values) => add(&mut hash, values, 0..values.len()),
            StateValues::Uint8(values) => values.chunks(CHUNK).for_each(|values| {
                hash.update(values);
                pulse::beat();
            }),
        }
    }
    shard.average.iter().for_each(|average| add(&mut hash, &average.values, 0..average.values.len()));
    first_bytes(&hash)
}

/// Digest of a part of a buffer.
pub(super) fn of_floats<F: Flat>(values: &F, range: Range<usize>) -> u64 {
    let mut hash = blake3::Hasher::new();
    add(&mut hash, values, range);
    first_bytes(&hash)
}

fn add<F: Flat>(hash: &mut blake3::Hasher, values: &F, range: Range<usize>) {
    for begin in range.clone().step_by(CHUNK) {
        hash.update(bytemuck::cast_slice(&values.read(begin..range.end.min(begin + CHUNK))));
        pulse::beat();
    }
}

/// Digest of all parts together.
pub(super) fn joined(parts: &[u64]) -> u64 {
    let mut all = blake3::Hasher::new();
    for part in parts {
        all.update(&part.to_le_bytes());
    }
    first_bytes(&all)
}

/// Eight of them: two states that differ have the same once in 2^64 times.
fn first_bytes(hash: &blake3::Hasher) -> u64 {
    let bytes = hash.finalize();
    u64::from_le_bytes(*bytes.as_bytes().first_chunk().expect("a digest has 32 bytes"))
}
