//! Blocks whose weights are not held: read from their files, or gathered from the ranks that share them out,
//! when their turn comes, and dropped when they have run.
//!
//! ```text
//! reader thread   read 0 ┐ read 1      ┐ read 2      ┐            one thread a pass, plain reads, no device
//! trainer                └▶ run 0      └▶ run 1      └▶ run 2 ..   to the device, assembled, run, dropped
//! ```
//!
//! The hand-over has no room of its own: a block is read on only when the one before it has been taken, which
//! is when the one before *that* is gone. So two blocks are in memory at most, the one that runs and the one
//! that is next, and nothing between passes.
//!
//! Where tensors are host memory, one that lies in its file as it is wanted is the mapped file, as without
//! streaming: it costs no memory and is not read ahead. For a device everything is read into a buffer and
//! brought there through page-locked memory ([`upload`]); the device is waited for before its next block, so
//! that buffers which it has not taken yet do not pile up.
//!
//! The bits are those of blocks that are held. Reading happens on a thread that computes nothing, so a step
//! waits only where a disk is slower than a layer. What this file does not do: keep pages of the files in
//! memory; that is the system's page cache, and it may drop them.

use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
};

use burn::tensor::TensorData;

use super::{
    super::{
        error::{ModelError, UnreadableWeights},
        loader::{LinearShape, Loader},
    },
    Assemble, Manifest, Parts,
    files::{FetchedBlock, Files, wanted},
};
use coxswain_nn::{
    kernels::{ModelBackend, upload},
    lora::{Adapter, LoraLinear},
    params::{BaseWeight, ParamId},
    pulse,
};

/// A tower's blocks, in their files.
pub(super) struct StreamedTower<B: ModelBackend, K: Assemble<B>> {
    sizes: K::Sizes,
    files: Arc<Files>,
    /// What is known of each block without its files.
    known: Vec<ResidentBlock>,
    device: B::Device,
}

/// What is known of a block without what it has in the files.
struct ResidentBlock {
    norms: Vec<Option<ParamId>>,
    linears: Vec<ResidentLinear>,
}

/// What is known of a linear without the files: which of its tensors train, and so are not read.
#[derive(Clone, Copy)]
struct ResidentLinear {
    weight: Option<ParamId>,
    /// None without a bias.
    bias: Option<Option<ParamId>>,
    adapter: Option<Adapter>,
}

impl ResidentBlock {
    fn register<B: ModelBackend>(loader: &mut Loader<'_, B>, manifest: &Manifest) -> Self {
        let norms = manifest.norms.iter().map(|(norm, len)| loader.trained(norm, &[*len])).collect();
        let linear = |LinearShape { module, features, bias }: &LinearShape| {
            let [inputs, outputs] = *features;
            ResidentLinear {
                weight: loader.trained(&format!("{module}.weight"), &[outputs, inputs]),
                bias: bias.then(|| loader.trained(&format!("{module}.bias"), &[outputs])),
                adapter: loader.adapter(module, *features),
            }
        };
        Self { norms, linears: manifest.linears.iter().map(linear).collect() }
    }

    fn trains(&self) -> bool {
        let linear = |linear: &ResidentLinear| {
            linear.adapter.is_some() || linear.weight.is_some() || linear.bias.flatten().is_some()
        };
        self.norms.iter().any(Option::is_some) || self.linears.iter().any(linear)
    }
}

impl<B: ModelBackend, K: Assemble<B>> StreamedTower<B, K> {
    /// Finds everything frozen that the manifests name, and registers what trains; reads no weight.
    pub fn locate(
        loader: &mut Loader<'_, B>,
        sizes: &K::Sizes,
        manifests: impl Iterator<Item = Manifest>,
    ) -> Result<Self, ModelError> {
        let (mut blocks, mut known) = (Vec::new(), Vec::new());
        for manifest in manifests {
            blocks.push(wanted(loader, &manifest)?);
            known.push(ResidentBlock::register(loader, &manifest));
        }
        let files = Arc::new(Files::new(loader, blocks));
        Ok(Self { sizes: sizes.clone(), files, known, device: loader.device.clone() })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.known.len()
    }

    /// Whether anything of a block trains.
    pub fn trains(&self, index: usize) -> bool {
        self.known[index].trains()
    }

    /// Most bytes in memory at once so far.
    pub fn most(&self) -> u64 {
        self.files.most()
    }

    /// The blocks in their files.
    pub fn files(&self) -> &Arc<Files> {
        &self.files
    }

    /// Hands the blocks of `order` to `step`, one after another, until it breaks off.
    pub fn fold<A>(
        &self,
        order: impl Iterator<Item = usize>,
        start: A,
        mut step: impl FnMut(A, usize, K) -> ControlFlow<A, A>,
    ) -> Result<A, UnreadableWeights> {
        let order: Vec<usize> = order.collect();
        let signals = Signals::default();
        let (files, order, signals) = (&*self.files, &order, &signals);
        thread::scope(|scope| {
            // Both go before the scope waits for the reader, however this closure is left: that tells the
            // reader to end.
            let (hand_over, ready) = sync_channel(0);
            let _stop = StopReading(signals);
            let mut state = start;
            let Some(&first) = order.first() else { return Ok(state) };
            let reader = thread::Builder::new().name("layers".into());
            let started =
                reader.spawn_scoped(scope, move || read_in_order(files, order, signals, &hand_over));
            started.map_err(|error| {
                files.unreadable(first, &format!("cannot start the reading thread: {error}"))
            })?;
            for &index in order {
                let Some(fetched) = signals.wait(&ready) else { break };
                let FetchedBlock { tensors, lease } = fetched?;
                match step(state, index, self.assemble(index, tensors)) {
                    ControlFlow::Continue(next) => state = next,
                    ControlFlow::Break(last) => return Ok(last),
                }
                drop(lease);
            }
            Ok(state)
        })
    }

    /// A block, on the device, from its frozen tensors in the manifest's order.
    fn assemble(&self, index: usize, tensors: Vec<TensorData>) -> K {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("a block is read as its manifest names it");
        let ResidentBlock { norms, linears } = &self.known[index];
        let norms: Vec<_> = norms.iter().map(|id| self.weight(*id, &mut next)).collect();
        let linears = linears.iter().map(|&ResidentLinear { weight, bias, adapter }| {
            let weight_oi = self.weight(weight, &mut next);
            LoraLinear::new(weight_oi, bias.map(|id| self.weight(id, &mut next)), adapter)
        });
        let linears: Vec<_> = linears.collect();
        if !B::ON_HOST {
            // What a device has to say of a failure it says again when the tensors are used.
            let _ = B::sync(&self.device);
        }
        K::assemble(&self.sizes, index, Parts { norms: norms.into(), linears: linears.into() })
    }

    fn weight<const D: usize>(
        &self,
        trained: Option<ParamId>,
        next: impl FnOnce() -> TensorData,
    ) -> BaseWeight<B, D> {
        match trained {
            Some(id) => BaseWeight::Trained(id),
            None => upload::<B, D>(next(), &self.device).into(),
        }
    }
}

/// Reads the blocks of `order`, each when the one before it has been taken.
fn read_in_order<'l>(
    files: &'l Files,
    order: &[usize],
    signals: &Signals,
    hand_over: &SyncSender<Result<FetchedBlock<'l>, UnreadableWeights>>,
) {
    for &index in order {
        let Some(read) = files.read_block(index, &|| signals.goes_on()) else { return };
        let failed = read.is_err();
        if hand_over.send(read).is_err() || failed {
            return;
        }
    }
}

/// What trainer and reader tell each other besides blocks.
#[derive(Default)]
struct Signals {
    /// Tensors, or pieces of them, read so far.
    read: AtomicU64,
    /// Nothing is waited for any more.
    stopped: AtomicBool,
}

impl Signals {
    /// Something has been read. Says whether it is still waited for.
    fn goes_on(&self) -> bool {
        self.read.fetch_add(1, Ordering::Relaxed);
        !self.stopped.load(Ordering::Relaxed)
    }

    /// The next block; none if the reader is gone. A trainer that waits while a slow disk gets on is no
    /// trainer that stands still.
    fn wait<R>(&self, ready: &Receiver<R>) -> Option<R> {
        let mut seen = self.read.load(Ordering::Relaxed);
        loop {
            match ready.recv_timeout(pulse::LOOK) {
                Ok(fetched) => return Some(fetched),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {
                    let read = self.read.load(Ordering::Relaxed);
                    if std::mem::replace(&mut seen, read) != read {
                        pulse::beat();
                    }
                }
            }
        }
    }
}

/// Tells the reader to stop, also when a step unwinds: an out-of-memory does.
struct StopReading<'s>(&'s Signals);

impl Drop for StopReading<'_> {
    fn drop(&mut self) {
        self.0.stopped.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
