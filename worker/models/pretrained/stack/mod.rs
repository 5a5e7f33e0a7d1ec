//! The repeated blocks of a tower, held in memory or brought there when they run: code that runs them does
//! not see which.
//!
//! ```text
//! manifest    what a block is made of: names and sizes, known before any weight is read
//! Stack       the blocks of a tower, one after another, lent for as long as each of them runs
//! stream      not held: brought when their turn comes, the next one while this one runs
//! files       what there is to read of them: all of it, with `memory.offload: layers`
//! shared part a part held by each rank, the rest gathered: `memory.shard: frozen`
//! ```
//!
//! Everything else of a tower (embeddings, merger, last norm) is always held: it is used once a pass, and is
//! small beside the blocks, or looked up row by row.
//!
//! What this module does not do: know what a block computes, or which of them run when (`model::recompute`).

mod files;
mod manifest;
mod part;
mod shared;
mod stream;

use std::ops::{ControlFlow, Range};

use self::stream::StreamedTower;
pub use self::{
    manifest::{Assemble, Linears, Manifest, Norms, Parts},
    shared::{SharedBlocks, SharedTower},
};
use super::{
    blocks::{BlockWeights, InMemory},
    error::{ModelError, UnreadableWeights},
    loader::Loader,
};
use coxswain_nn::{
    block::BlockRef,
    kernels::{ModelBackend, Tape},
    recompute::{InContext, Layers, fold_held},
};

/// The repeated blocks of one tower, first to last.
pub struct Stack<B: ModelBackend, K: Assemble<B>>(Blocks<B, K>);

enum Blocks<B: ModelBackend, K: Assemble<B>> {
    Held(Vec<K>),
    Streamed(StreamedTower<B, K>),
}

impl<B: ModelBackend, K: Assemble<B>> Stack<B, K> {
    /// Loads `count` blocks, or finds where their weights lie, as `loader` has it; registers what trains of
    /// them.
    pub fn load(loader: &mut Loader<'_, B>, sizes: &K::Sizes, count: usize) -> Result<Self, ModelError> {
        let manifests = (0..count).map(|index| K::manifest(sizes, index));
        Ok(Self(match loader.blocks {
            BlockWeights::Streamed | BlockWeights::Sharded => {
                Blocks::Streamed(StreamedTower::locate(loader, sizes, manifests)?)
            }
            BlockWeights::Held => {
                let held = |(index, manifest): (usize, Manifest)| -> Result<K, ModelError> {
                    Ok(K::assemble(sizes, index, manifest.load(loader)?))
                };
                Blocks::Held(manifests.enumerate().map(held).collect::<Result<_, _>>()?)
            }
        }))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        match &self.0 {
            Blocks::Held(blocks) => blocks.len(),
            Blocks::Streamed(streamed) => streamed.count(),
        }
    }

    /// Whether anything of a block trains.
    pub fn trains(&self, index: usize) -> bool {
        match &self.0 {
            Blocks::Held(blocks) => blocks[index].trains(),
            Blocks::Streamed(streamed) => streamed.trains(index),
        }
    }

    /// Most bytes of streamed weights that were in memory at once so far; 0 for blocks that are held.
    pub fn most_streamed(&self) -> u64 {
        match &self.0 {
            Blocks::Held(_) => 0,
            Blocks::Streamed(streamed) => streamed.most(),
        }
    }

    /// What of them is in memory.
    pub fn in_memory(&self) -> InMemory {
        match &self.0 {
            Blocks::Held(_) => InMemory::All,
            Blocks::Streamed(streamed) => streamed.files().in_memory(),
        }
    }

    /// The blocks in their files, if ranks share them out.
    pub fn shared(&self) -> Option<SharedTower> {
        match &self.0 {
            Blocks::Held(_) => None,
            Blocks::Streamed(streamed) => {
                Some(streamed.files()).filter(|files| files.is_shared()).cloned().map(SharedTower)
            }
        }
    }

    /// Lends the blocks of `order` to `step`, one after another, until it breaks off. Each is gone when its
    /// step returns.
    pub fn fold<'s, A>(
        &'s self,
        order: impl Iterator<Item = usize>,
        start: A,
        mut step: impl FnMut(A, usize, BlockRef<'s, K>) -> ControlFlow<A, A>,
    ) -> Result<A, UnreadableWeights> {
        match &self.0 {
            Blocks::Held(blocks) => {
                Ok(fold_held(order, start, |state, index| step(state, index, BlockRef::Held(&blocks[index]))))
            }
            Blocks::Streamed(streamed) => streamed.fold(order, start, |state, index, block| {
                step(state, index, BlockRef::Fetched(Box::new(block)))
            }),
        }
    }
}

/// Blocks of a stack in their micro-batch's context, as the layers of a tower.
pub struct InStack<'a, B: Tape<Base = B>, K: Assemble<B>> {
    /// All blocks.
    pub stack: &'a Stack<B, K>,
    /// Blocks of this tower.
    pub range: Range<usize>,
    /// Rotary tables and masks of the micro-batch.
    pub context: &'a K::Context,
}

impl<'a, B: Tape<Base = B>, K: Assemble<B>> Layers<B> for InStack<'a, B, K> {
    type Layer = InContext<'a, B, K>;
    type Fault = UnreadableWeights;

    fn count(&self) -> usize {
        self.range.len()
    }

    fn trains(&self, index: usize) -> bool {
        self.stack.trains(self.range.start + index)
    }

    fn fold<A>(
        &self,
        order: impl Iterator<Item = usize>,
        start: A,
        mut step: impl FnMut(A, usize, &Self::Layer) -> ControlFlow<A, A>,
    ) -> Result<A, UnreadableWeights> {
        let (first, context) = (self.range.start, self.context);
        self.stack.fold(order.map(move |index| first + index), start, |state, index, block| {
            step(state, index - first, &InContext { block, context })
        })
    }
}
