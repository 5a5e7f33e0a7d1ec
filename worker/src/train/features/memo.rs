//! What a run keeps of its features: the generation that serves, and what is still to be stored.

use std::sync::Arc;

use coxswain_feature_store::NamespaceKey;
use coxswain_nn::{kernels::Tape, params::Trainables};
use coxswain_proto::{
    cache_plan::{CacheGeneration, CacheReport},
    ids::Bytes,
    run_spec::RunSpec,
};
use coxswain_task::{Extractor, Samples};

use super::{
    account::Account,
    adapter::{self, AdapterSnapshot},
    claim::FeatureVersion,
    serving::Serving,
    setup::Setup,
    store_writer::{ComputedFeatures, News, StoreWriter},
};
use crate::{clock, train::TrainError};

/// Features that are kept, and the account of it.
pub(super) struct Memo<B: Tape<Base = B>> {
    pub setup: Setup<B>,
    /// Stores beside training.
    pub store_writer: StoreWriter,
    /// The generation that serves, or has served last.
    pub serving: Option<Serving<B>>,
    /// Samples of one forward pass when features are computed; an out-of-memory lowers it.
    pub fill_batch: usize,
    pub account: Account,
}

impl<B: Tape<Base = B>> Memo<B> {
    /// Opens the store of a run; nothing serves yet.
    pub fn for_run(
        spec: &RunSpec,
        samples: &dyn Samples,
        extractor: &dyn Extractor<B>,
        device: &B::Device,
        gpu: Option<&str>,
    ) -> Result<Self, TrainError> {
        let setup = Setup::for_run(spec, samples, extractor, device, gpu)?;
        let mut memo = Self {
            account: Account::new(setup.training.len() as u64),
            store_writer: StoreWriter::start(&setup.store)?,
            setup,
            serving: None,
            fill_batch: spec.cache.encoder_batch.unwrap_or(spec.train.micro_batch).max(1),
        };
        if let Some(why) = memo.setup.store.read_only() {
            let dir = memo.setup.store.dir().display();
            let line =
                format!("{dir}: cannot be written ({why}): existing features are used, and none are added");
            memo.account.complain(line);
        }
        Ok(memo)
    }

    /// From now on this generation serves, made with this adapter; some of its records may be there
    /// already.
    pub fn begin(
        &mut self,
        generation: CacheGeneration,
        adapter: Option<AdapterSnapshot>,
        first: Option<ComputedFeatures>,
    ) {
        let description = self.setup.described(adapter.as_ref());
        let adapter = adapter.map(Arc::new);
        let namespace = self.setup.store.namespace(&description);
        let writable = self.setup.store.read_only().is_none();
        // A store that takes nothing more was logged once.
        let namespace = namespace
            .inspect_err(|error| {
                if writable {
                    self.account.complain(error)
                }
            })
            .ok();
        self.store_writer.begin(namespace.clone().filter(|_| writable));
        if let Some(made) = first {
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

    /// Whether this generation does.
    pub fn serves(&self, generation: &CacheGeneration) -> bool {
        self.serving.as_ref().is_some_and(|serving| serving.generation == *generation)
    }

    /// A generation that served before the present one, to be compared with; none if its adapter is not
    /// there.
    pub fn past(&mut self, place: FeatureVersion, trainables: &Trainables<B>) -> Option<Serving<B>> {
        let key = NamespaceKey(place.namespace);
        let adapter = self.find_adapter(&key, trainables)?;
        let namespace =
            self.setup.store.find(&key).inspect_err(|error| self.account.complain(error)).ok().flatten();
        Some(self.setup.serving_of(place.generation, key, namespace, Some(Arc::new(adapter))))
    }

    /// The adapter that a namespace was begun with; none if it is not there.
    pub fn find_adapter(
        &mut self,
        key: &NamespaceKey,
        trainables: &Trainables<B>,
    ) -> Option<AdapterSnapshot> {
        let tensors = match self.setup.store.find(key).and_then(|namespace| match namespace {
            Some(namespace) => namespace.load_adapter(),
            None => Ok(None),
        }) {
            Ok(tensors) => tensors?,
            Err(error) => {
                self.account.complain(&error);
                return None;
            }
        };
        // The namespace may be another kind of device's: then its adapter is what is wanted, and its records
        // are not.
        let snapshot = adapter::snapshot(trainables.layout(), self.setup.resting, &tensors);
        snapshot.inspect_err(|error| self.account.complain(error.to_string())).ok()
    }

    /// The levels of the generation that serves, for the coordinator.
    pub fn report(&self) -> Option<CacheReport> {
        self.serving.as_ref().map(|serving| self.report_of(serving))
    }

    /// The levels of a generation.
    pub fn report_of(&self, serving: &Serving<B>) -> CacheReport {
        let (stored, bytes, damaged) = match &serving.namespace {
            Some(namespace) => {
                let stored = self.setup.training.iter().filter(|key| namespace.contains(key)).count();
                (stored as u64, namespace.bytes(), namespace.damaged().0)
            }
            None => (0, 0, 0),
        };
        CacheReport {
            generation: serving.generation.number,
            namespace: serving.key.to_string(),
            stored,
            total: self.account.total,
            bytes: Bytes(bytes),
            fill_batch: if self.account.filled() { self.fill_batch as u32 } else { 0 },
            damaged,
            drift: None,
            lost: serving.stale,
        }
    }

    /// Makes what was stored so far visible to everybody.
    pub fn publish(&mut self) {
        self.store_writer.publish();
        self.settle();
    }

    /// Waits until everything that was handed to the store is there.
    pub fn settle(&mut self) {
        let began = clock::now();
        self.store_writer.settle();
        self.account.fill_time(began.elapsed());
        self.hear();
    }

    /// Takes in what the storing thread has to tell.
    pub fn hear(&mut self) {
        let News { kept, published, complaints } = self.store_writer.news();
        complaints.into_iter().for_each(|line| self.account.complain(line));
        self.account.kept(kept, published);
    }
}
