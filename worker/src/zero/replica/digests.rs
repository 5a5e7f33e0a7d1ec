//! Digests of what a rank holds, bit for bit: what ranks compare to find out that one of them is wrong.
//!
//! A part of the flat parameter buffer is there more than once: on its owner, in the replica on the owner's
//! neighbour, and among the weights that every rank computes with. All of these are equal, bit for bit, or
//! something is wrong.

use std::ops::Range;

use coxswain_nn::{kernels::flat::Flat, pulse};

use super::ReplicatedAdamW;
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
    /// The weights of the part of the rank before it, as this rank computes with them.
    pub before: u64,
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

impl<F: Flat> ReplicatedAdamW<F> {
    /// Of the state behind the last step; `weights` are full length, as this rank computes with them.
    pub fn digests(&self, weights: &F) -> Digests {
        let world = self.world();
        let parts: Vec<u64> = (0..world).map(|rank| digest([(weights, self.part_in(world, rank))])).collect();
        let mut all = blake3::Hasher::new();
        for part in &parts {
            all.update(&part.to_le_bytes());
        }
        let rank = self.rank().0 as usize;
        Digests {
            weights: first_bytes(&all),
            own: PartDigests { weights: parts[rank], moments: moments(&self.own) },
            before: parts[(rank + world - 1) % world],
            replica: self.replica.as_ref().map(|replica| PartDigests {
                weights: digest([(&replica.weights, 0..replica.weights.len())]),
                moments: moments(&replica.shard),
            }),
        }
    }
}

fn moments<F: Flat>(shard: &ShardedAdamW<F>) -> u64 {
    digest(shard.buffers().map(|buffer| (buffer, 0..buffer.len())))
}

fn digest<'f, F: Flat + 'f>(buffers: impl IntoIterator<Item = (&'f F, Range<usize>)>) -> u64 {
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

/// Eight of them: two states that differ have the same once in 2^64 times.
fn first_bytes(hash: &blake3::Hasher) -> u64 {
    let bytes = hash.finalize();
    u64::from_le_bytes(*bytes.as_bytes().first_chunk().expect("a digest has 32 bytes"))
}
