//! What a run keeps of its features: the generation that serves, and what is still to be stored.

use std::sync::Arc;

use coxswain_proto::{
    cache_plan::CacheGeneration,
    ids::{Bytes, Step},
    run_spec::{CacheMode, RunSpec},
};

use super::{
    account::Account,
    adapter::AdapterSnapshot,
    measuring::Measuring,
    serving::Serving,
    setup::Setup,
    store_writer::{Made, StoreWriter},
};
use coxswain_feature_store::Namespace;
use coxswain_nn::kernels::Tape;
use coxswain_task::{Objective, Samples};

use crate::train::TrainError;

/// What a run keeps of its features, and how.
pub(in crate::train) struct Features<B: Tape<Base = B>> {
    pub(super) setup: Setup<B>,
    /// Stores beside training.
    pub(super) store_writer: StoreWriter,
    /// The generation that serves, or has served last.
    pub(super) serving: Option<Serving<B>>,
    /// Samples of one forward pass when features are computed; an out-of-memory lowers it.
    pub(super) fill_batch: usize,
    /// The generation of the cache phase that was made ready last, 0 if live; none if that has to be looked
    /// at again.
    pub(super) phase: Option<u64>,
    /// The step for which that was.
    pub(super) taken: Option<Step>,
    /// The measurement of drift that goes on.
    pub(super) measuring: Option<Measuring<B>>,
    /// Before which step drift was measured last in this generation of workers.
    pub(super) measured: Option<Step>,
    /// What was computed for that: the first records of a generation that begins there.
    pub(super) probed: Option<(Step, Made)>,
    pub(super) account: Account,
}

impl<B: Tape<Base = B>> Features<B> {
    /// Opens the store of a run; none if its cache is off. `gpu` is what the device's maker calls it.
    pub(in crate::train) fn open(
        spec: &RunSpec,
        samples: &dyn Samples,
        objective: &dyn Objective<B>,
        device: &B::Device,
        gpu: Option<String>,
    ) -> Result<Option<Self>, TrainError> {
        let (cache, Some(extractor)) = (&spec.cache, objective.extractor()) else { return Ok(None) };
        let setup = Setup::open(spec, samples, extractor, device, gpu.as_deref())?;
        let mut features = Self {
            account: Account::new(setup.training.len() as u64),
            store_writer: StoreWriter::start(&setup.store)?,
            setup,
            serving: None,
            fill_batch: cache.encoder_batch.unwrap_or(spec.train.micro_batch).max(1),
            phase: None,
            taken: None,
            measuring: None,
            measured: None,
            probed: None,
        };
        if let Some(why) = features.setup.store.read_only() {
            let dir = features.setup.store.dir().display();
            let line = format!(
                "{dir}: cannot be written ({why}): features that are there are used, and none are added"
            );
            features.account.complain(line);
        }
        if features.setup.mode == CacheMode::Exact {
            features.begin(CacheGeneration { number: 1, since: Step(0) }, None);
        }
        Ok(Some(features))
    }

    /// Bytes held for it from step to step, but for features that wait to be written or read.
    pub(in crate::train) fn bytes(&self) -> Bytes {
        let of = |serving: &Serving<B>| {
            let adapter = serving.adapter.as_ref().map_or(0, |adapter| adapter.bytes());
            // Ready to compute with, it is there once more.
            let copies = 1 + u64::from(serving.older.is_some());
            serving.namespace.as_ref().map_or(0, Namespace::index_bytes) + copies * adapter
        };
        let before = self.measuring.as_ref().and_then(Measuring::before);
        let keys = self.setup.keys.bytes() + size_of_val(&*self.setup.training) as u64;
        Bytes(keys + [self.serving.as_ref(), before].into_iter().flatten().map(of).sum::<u64>())
    }

    /// Samples of one forward pass when features are computed.
    pub(in crate::train) fn encoder_batch(&self) -> usize {
        self.fill_batch
    }

    /// From now on this generation serves, made with this adapter.
    pub(super) fn begin(&mut self, generation: CacheGeneration, adapter: Option<AdapterSnapshot>) {
        let description = self.setup.described(adapter.as_ref());
        let adapter = adapter.map(Arc::new);
        let namespace = self.setup.store.namespace(&description);
        let writable = self.setup.store.read_only().is_none();
        // That nothing can be added was said once.
        let namespace = namespace
            .inspect_err(|error| {
                if writable {
                    self.account.complain(error)
                }
            })
            .ok();
        self.store_writer.begin(namespace.clone().filter(|_| writable));
        let probed = self.probed.take().filter(|(step, _)| *step == generation.since);
        if let Some((_, made)) = probed {
            self.store_writer.keep(made);
            self.store_writer.publish();
        }
        if let Some(adapter) = &adapter {
            // Needed only by a worker that comes when the adapter has moved on.
            self.store_writer.save_adapter(adapter.clone());
        }
        let serving = self.setup.serving_of(generation, description.key(), namespace, adapter);
        self.serving = Some(serving);
        self.account.begins(generation);
    }
}
