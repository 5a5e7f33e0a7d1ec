//! The blocks of a tower that are not held, as they lie in the model's files: what there is to read of each,
//! and how much of what was read is in memory.

use std::{
    path::Path,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::tensor::TensorData;
use coxswain_nn::{dtypes::WeightsDtype, kernels::ModelBackend};

use super::{
    super::{
        blocks::{BlockWeights, InMemory},
        checkpoint::{Checkpoint, TensorLocation},
        error::{ModelError, UnreadableWeights},
        loader::Loader,
    },
    Manifest,
    part::TowerShare,
};

/// A tensor to read, and how it is kept.
pub(super) struct TensorRequest {
    pub at: TensorLocation,
    pub dtype: WeightsDtype,
}

/// The frozen tensors of a block, in the order in which it is assembled: norms, then weight and bias of each
/// linear.
pub(super) fn wanted<B: ModelBackend>(
    loader: &Loader<'_, B>,
    manifest: &Manifest,
) -> Result<Vec<TensorRequest>, ModelError> {
    let mut wanted = Vec::new();
    let mut find = |name: &str, shape: &[usize], dtype| -> Result<(), ModelError> {
        if loader.group_of(name).is_none() {
            let at = loader.checkpoint.locate(&loader.full_name(name), shape)?;
            wanted.push(TensorRequest { at, dtype });
        }
        Ok(())
    };
    for (norm, len) in &manifest.norms {
        find(norm, &[*len], WeightsDtype::Float32)?;
    }
    for linear in &manifest.linears {
        let [inputs, outputs] = linear.features;
        find(&format!("{}.weight", linear.module), &[outputs, inputs], loader.dtype.dense())?;
        if linear.bias {
            find(&format!("{}.bias", linear.module), &[outputs], WeightsDtype::Float32)?;
        }
    }
    Ok(wanted)
}

/// Where all blocks of a tower lie, and how much of them is in memory.
pub(crate) struct Files {
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) blocks: Vec<Vec<TensorRequest>>,
    /// Whether a tensor may be the mapped file itself.
    share: bool,
    /// This rank's part of blocks that are shared out, once it has one.
    shared: Option<RwLock<Option<Arc<TowerShare>>>>,
    /// Bytes in memory.
    pub(super) now: AtomicU64,
    /// The most that there ever were.
    most: AtomicU64,
}

/// A block that was read.
pub(super) struct FetchedBlock<'l> {
    pub tensors: Vec<TensorData>,
    pub lease: Lease<'l>,
}

impl Files {
    /// Files of these blocks, as `loader` reads them.
    pub(super) fn new<B: ModelBackend>(loader: &Loader<'_, B>, blocks: Vec<Vec<TensorRequest>>) -> Self {
        Self {
            checkpoint: Arc::clone(loader.checkpoint),
            blocks,
            share: B::ON_HOST,
            shared: (loader.blocks == BlockWeights::Sharded).then(RwLock::default),
            now: AtomicU64::new(0),
            most: AtomicU64::new(0),
        }
    }

    /// Reads one block, or gathers it; none if it is not waited for any more. `goes_on` hears of every tensor
    /// that is there, and says whether it is.
    pub(super) fn read_block(
        &self,
        index: usize,
        goes_on: &dyn Fn() -> bool,
    ) -> Option<Result<FetchedBlock<'_>, UnreadableWeights>> {
        let taken = self.taken();
        let gathered = taken.as_deref().is_none_or(|taken| taken.cut.is_shared());
        let lease = self.lease(if gathered { self.bytes(index) } else { 0 });
        let tensors = match taken {
            Some(taken) => self.gather(index, &taken, goes_on)?,
            None => self.read_all(index, goes_on)?,
        };
        Some(tensors.map(|tensors| FetchedBlock { tensors, lease }))
    }

    fn read_all(
        &self,
        index: usize,
        goes_on: &dyn Fn() -> bool,
    ) -> Option<Result<Vec<TensorData>, UnreadableWeights>> {
        let mut tensors = Vec::with_capacity(self.blocks[index].len());
        for TensorRequest { at, dtype } in &self.blocks[index] {
            match self.checkpoint.fetch(at, *dtype, self.share) {
                Ok(tensor) => tensors.push(tensor),
                Err(fault) => return Some(Err(fault)),
            }
            if !goes_on() {
                return None;
            }
        }
        Some(Ok(tensors))
    }

    /// Whether a tensor is a copy; else it is the mapped file.
    pub(super) fn copies(&self, TensorRequest { at, dtype }: &TensorRequest) -> bool {
        !self.share || at.copied_bytes(*dtype) > 0
    }

    /// The tensors of a block that are copies: what ranks share out.
    pub(super) fn copied(&self, index: usize) -> impl Iterator<Item = &TensorRequest> {
        self.blocks[index].iter().filter(move |wanted| self.copies(wanted))
    }

    /// Bytes of a block's copies.
    pub(super) fn bytes(&self, index: usize) -> u64 {
        self.copied(index).map(|TensorRequest { at, dtype }| at.kept_bytes(*dtype)).sum()
    }

    /// Most bytes in memory at once so far, this rank's part not counted.
    pub(super) fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }

    /// Whether ranks share these blocks out.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// What is in memory of these blocks.
    pub(super) fn in_memory(&self) -> InMemory {
        self.taken().map_or(InMemory::TwoBlocks, |taken| InMemory::Part(taken.cut))
    }

    /// This rank's part, if it has one.
    pub(super) fn taken(&self) -> Option<Arc<TowerShare>> {
        self.shared.as_ref()?.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on this is this rank's part. What nobody reads any more of the one before is gone.
    pub(super) fn take(&self, taken: Option<TowerShare>) {
        if let Some(shared) = &self.shared {
            *shared.write().unwrap_or_else(PoisonError::into_inner) = taken.map(Arc::new);
        }
    }

    /// Records bytes until the lease ends.
    fn lease(&self, bytes: u64) -> Lease<'_> {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.most.fetch_max(now, Ordering::Relaxed);
        Lease { files: self, bytes }
    }

    /// An error about a block of which nothing could be read.
    pub(super) fn unreadable(&self, index: usize, problem: &str) -> UnreadableWeights {
        // A block that trains in full has nothing in the files; another one is told of then.
        match self.blocks[index].first().or_else(|| self.blocks.iter().flatten().next()) {
            Some(wanted) => self.checkpoint.unreadable(&wanted.at, problem),
            None => UnreadableWeights {
                path: self.checkpoint.files().next().unwrap_or(Path::new("")).into(),
                tensor: String::new(),
                problem: problem.into(),
            },
        }
    }
}

/// A block's bytes, in memory for as long as this lives.
pub(super) struct Lease<'l> {
    files: &'l Files,
    bytes: u64,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.files.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
