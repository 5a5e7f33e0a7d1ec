//! What a run keeps of its features: the store, the generation that serves, and what is still to be stored.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_proto::{
    cache_plan::CacheGeneration,
    ids::{Bytes, Step},
    run_spec::{CacheDtype, CacheMode, RunSpec},
};

use super::{
    account::Account,
    adapter::{self, AdapterSnapshot},
    keeper::{Keeper, Made},
    measuring::Measuring,
    serving::Serving,
};
use coxswain_feature_store::{
    Ingredients, SampleKey, Space, SpaceDescription, SpaceKey, Store, adapter_digest,
};
use coxswain_nn::{kernels::Tape, params::Group};
use coxswain_task::{Extractor, FeatureShape, InputIngredients, Objective, SampleKeys, Samples};

use crate::{feeder::KeptFeatures, train::TrainError};

/// Raised when the computation of features changes other than by the model's kernels, which have a version of their own.
const COMPUTE: &str = "coxswain 1";
/// The store's directory, below the run's output directory, if the run file names none.
const DEFAULT_DIR: &str = "vl-cache";

/// What a run keeps of its features, and how.
pub(in crate::train) struct Features<B: Tape<Base = B>> {
    pub(super) tap: String,
    /// The group that rests while features of an older adapter serve.
    pub(super) resting: Group,
    pub(super) mode: CacheMode,
    pub(super) dtype: CacheDtype,
    pub(super) shape: FeatureShape,
    pub(super) store: Store,
    pub(super) keys: Arc<SampleKeys>,
    /// Those of the samples that are trained on, each once.
    pub(super) training: Arc<[SampleKey]>,
    /// Stores beside training.
    pub(super) keeper: Keeper,
    /// What every space of the run shares: all but the adapter.
    pub(super) base: SpaceDescription,
    pub(super) device: B::Device,
    /// The generation that serves, or has served last.
    pub(super) serving: Option<Serving<B>>,
    /// Samples of one forward pass when features are computed; an out-of-memory lowers it.
    pub(super) fill_batch: usize,
    /// The generation of the turn that was made ready last, 0 if live; none if that has to be looked at again.
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
    /// Opens the store of a run; none if its cache is off. `card` is what the device's maker calls it. The first time, and where they have changed, reads all frozen weights below the
    /// tap and all images.
    pub(in crate::train) fn open(
        spec: &RunSpec,
        samples: &dyn Samples,
        objective: &dyn Objective<B>,
        device: &B::Device,
        card: Option<String>,
    ) -> Result<Option<Self>, TrainError> {
        let (cache, Some(extractor)) = (&spec.cache, objective.extractor()) else { return Ok(None) };
        let store = Store::open(&store_dir(spec), cache.budget)?;
        let keys = Arc::new(samples.keys(&store)?);
        let training = training_keys(samples, &keys);
        let shape = extractor.shape();
        let base = describe(spec, samples, extractor, &store)?;
        let compute = format!("{COMPUTE} on {}", device_kind(&B::name(device), card.as_deref()));
        let base = SpaceDescription { ingredients: Ingredients { compute, ..base.ingredients }, ..base };
        let mut features = Self {
            tap: extractor.tap(),
            resting: extractor.resting(),
            mode: cache.mode,
            dtype: cache.dtype,
            shape,
            account: Account::new(training.len() as u64),
            keeper: Keeper::start(&store)?,
            store,
            keys,
            training,
            base,
            device: device.clone(),
            serving: None,
            fill_batch: cache.encoder_batch.unwrap_or(spec.train.micro_batch).max(1),
            phase: None,
            taken: None,
            measuring: None,
            measured: None,
            probed: None,
        };
        if let Some(why) = features.store.read_only() {
            let dir = features.store.dir().display();
            let line = format!(
                "{dir}: cannot be written ({why}): features that are there are used, and none are added"
            );
            features.account.complain(line);
        }
        if features.mode == CacheMode::Exact {
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
            serving.space.as_ref().map_or(0, Space::index_bytes) + copies * adapter
        };
        let before = self.measuring.as_ref().and_then(Measuring::before);
        let keys = self.keys.bytes() + size_of_val(&*self.training) as u64;
        Bytes(keys + [self.serving.as_ref(), before].into_iter().flatten().map(of).sum::<u64>())
    }

    /// Samples of one forward pass when features are computed.
    pub(in crate::train) fn encoder_batch(&self) -> usize {
        self.fill_batch
    }

    /// From now on this generation serves, made with this adapter.
    pub(super) fn begin(&mut self, generation: CacheGeneration, adapter: Option<AdapterSnapshot>) {
        let description = self.described(adapter.as_ref());
        let adapter = adapter.map(Arc::new);
        let space = self.store.space(&description);
        let writable = self.store.read_only().is_none();
        // That nothing can be added was said once.
        let space = space
            .inspect_err(|error| {
                if writable {
                    self.account.complain(error)
                }
            })
            .ok();
        self.keeper.begin(space.clone().filter(|_| writable));
        let probed = self.probed.take().filter(|(step, _)| *step == generation.since);
        if let Some((_, made)) = probed {
            self.keeper.keep(made);
            self.keeper.publish();
        }
        if let Some(adapter) = &adapter {
            // Needed only by a worker that comes when the adapter has moved on.
            self.keeper.save_adapter(adapter.clone());
        }
        let serving = self.serving_of(generation, description.key(), space, adapter);
        self.serving = Some(serving);
        self.account.begins(generation);
    }

    pub(super) fn serving_of(
        &self,
        generation: CacheGeneration,
        key: SpaceKey,
        space: Option<Space>,
        adapter: Option<Arc<AdapterSnapshot>>,
    ) -> Serving<B> {
        let source = self.source_in(space.clone());
        Serving { generation, key, space, source, adapter, older: None, stale: false }
    }

    /// What data threads need to look for features in this space; without one they find nothing.
    pub(super) fn source_in(&self, space: Option<Space>) -> KeptFeatures {
        KeptFeatures { space, keys: self.keys.clone(), shape: self.shape.clone() }
    }

    /// The space of features made with this adapter.
    pub(super) fn described(&self, adapter: Option<&AdapterSnapshot>) -> SpaceDescription {
        let adapter = adapter.map(|adapter| adapter_digest(&adapter::tensors(adapter)));
        let ingredients = Ingredients { adapter, ..self.base.ingredients.clone() };
        SpaceDescription { ingredients, ..self.base.clone() }
    }

    /// Whether steps of a generation leave LoRA as it is.
    pub(super) fn rests(&self) -> bool {
        self.mode == CacheMode::Periodic
    }
}

/// What kind of device computes, as far as its bits may differ from another kind's: a card rounds otherwise than a processor, one card adds in
/// another order than the next, and a processor adds in vectors as wide as it has them. Ranks of different kinds do not share records; each
/// finds its own.
fn device_kind(backend: &str, card: Option<&str>) -> String {
    match (backend, card) {
        ("flex", _) => format!("cpu {}", vector_unit()),
        (backend, Some(card)) => format!("{backend} {card}"),
        (backend, None) => backend.to_owned(),
    }
}

#[cfg(target_arch = "x86_64")]
fn vector_unit() -> &'static str {
    if is_x86_feature_detected!("avx512f") {
        "x86_64 avx512"
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        "x86_64 avx2"
    } else {
        "x86_64"
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn vector_unit() -> &'static str {
    std::env::consts::ARCH
}

/// The spaces of a run, but for adapter and device. The first time, and where they have changed, reads all frozen weights below the tap.
fn describe<B: Tape<Base = B>>(
    spec: &RunSpec,
    samples: &dyn Samples,
    extractor: &dyn Extractor<B>,
    store: &Store,
) -> Result<SpaceDescription, TrainError> {
    let frozen = extractor.frozen()?;
    let files = frozen.files();
    let weights = store.digest_of(files.iter().map(PathBuf::as_path), &frozen.name(), || {
        Ok::<_, TrainError>(frozen.digest()?)
    })?;
    let InputIngredients { preprocessing, prompt, tokenizer } = samples.ingredients()?;
    let compute = String::new();
    Ok(SpaceDescription {
        tap: extractor.tap(),
        dtype: spec.cache.dtype,
        width: extractor.shape().width as u32,
        ingredients: Ingredients { weights, adapter: None, preprocessing, prompt, tokenizer, compute },
        made_by: spec.run.name.clone(),
    })
}

/// Where a run keeps features.
pub(in crate::train) fn store_dir(spec: &RunSpec) -> PathBuf {
    match &spec.cache.dir {
        Some(dir) => dir.into(),
        None => Path::new(&spec.run.output_dir).join(DEFAULT_DIR),
    }
}

/// Keys of the samples that are trained on, each once: equal frames share a record.
fn training_keys(samples: &dyn Samples, keys: &SampleKeys) -> Arc<[SampleKey]> {
    let indices = (0..samples.training_len()).filter_map(|number| samples.training_sample(number));
    let mut training: Vec<_> = indices.filter_map(|index| keys.get(index)).collect();
    training.sort_unstable();
    training.dedup();
    training.into()
}
