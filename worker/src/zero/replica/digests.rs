//! Digests of what a rank holds, bit for bit: what ranks compare to find out that one of them is wrong.
//!
//! A part of the flat parameter buffer is there more than once: on its owner, in its replica on another rank,
//! and among the weights that every rank computes with. All of these are equal, bit for bit, or
//! something is wrong.

use std::ops::Range;

use coxswain_nn::{kernels::flat::Flat, pulse};

use crate::zero::optimizer::ShardedAdamW;

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
    /// Its weights.
    pub weights: u64,
    /// Its moments, and the average of its weights where one is kept.
    pub moments: u64,
}

/// Of the moments of a shard, and of the average of its weights where one is kept.
pub(super) fn moments<F: Flat>(shard: &ShardedAdamW<F>) -> u64 {
    digest(shard.buffers().map(|buffer| (buffer, 0..buffer.len())))
}

/// Of parts of buffers, one after another.
pub(super) fn digest<'f, F: Flat + 'f>(buffers: impl IntoIterator<Item = (&'f F, Range<usize>)>) -> u64 {
    let mut hash = blake3::Hasher::new();
    for (buffer, range) in buffers {
        for begin in range.clone().step_by(CHUNK) {
            let values = buffer.read(begin..range.end.min(begin + CHUNK));
            hash.update(bytemuck::cast_slice(&values));
            pulse::beat();
        }
    }
    first_bytes(&hash)
}

/// Of all parts together.
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
