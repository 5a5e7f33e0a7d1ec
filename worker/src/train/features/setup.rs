//! What does not change while features are kept: where, in which form, and of which samples.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_proto::{
    cache_plan::CacheGeneration,
    run_spec::{CacheDtype, CacheMode, RunSpec},
};

use super::{
    adapter::{self, AdapterSnapshot},
    serving::Serving,
};
use coxswain_feature_store::{
    Ingredients, Namespace, NamespaceDescription, NamespaceKey, SampleKey, Store, adapter_digest,
};
use coxswain_nn::{
    kernels::{Tape, precision},
    params::Group,
};
use coxswain_task::{Extractor, FeatureShape, InputIngredients, SampleKeys, Samples};

use crate::{feeder::KeptFeatures, train::TrainError};

/// Raised when the computation of features changes other than by the model's kernels, which have a version of
/// their own.
const COMPUTE: &str = "coxswain 1";
/// Where a run without `cache.dir` keeps its store, below its output directory.
pub const CACHE_DIR: &str = "vl-cache";

/// What does not change while features are kept.
pub(super) struct Setup<B: Tape<Base = B>> {
    pub tap: String,
    /// The group that rests while features of an older adapter serve.
    pub resting: Group,
    pub mode: CacheMode,
    pub dtype: CacheDtype,
    pub shape: FeatureShape,
    pub store: Store,
    pub keys: Arc<SampleKeys>,
    /// Keys of the samples that are trained on, each once.
    pub training: Arc<[SampleKey]>,
    /// What every namespace of the run shares: all but the adapter.
    pub base: NamespaceDescription,
    pub device: B::Device,
}

impl<B: Tape<Base = B>> Setup<B> {
    /// Opens the store. The first time, and where they have changed, reads all frozen weights below the tap
    /// and all images.
    pub fn for_run(
        spec: &RunSpec,
        samples: &dyn Samples,
        extractor: &dyn Extractor<B>,
        device: &B::Device,
        gpu: Option<&str>,
    ) -> Result<Self, TrainError> {
        let cache = &spec.cache;
        let store = Store::open(&store_dir(spec), cache.budget)?;
        let keys = Arc::new(samples.keys(&store)?);
        let training = training_keys(samples, &keys);
        let base = describe(spec, samples, extractor, &store)?;
        let rounds = if B::ON_HOST && precision::rounds_on_host() { ", bfloat16 products" } else { "" };
        let compute = format!("{COMPUTE} on {}{rounds}", device_kind(&B::name(device), gpu));
        Ok(Self {
            tap: extractor.tap(),
            resting: extractor.resting(),
            mode: cache.mode,
            dtype: cache.dtype,
            shape: extractor.shape(),
            store,
            keys,
            training,
            base: NamespaceDescription { ingredients: Ingredients { compute, ..base.ingredients }, ..base },
            device: device.clone(),
        })
    }

    pub fn serving_of(
        &self,
        generation: CacheGeneration,
        key: NamespaceKey,
        namespace: Option<Namespace>,
        adapter: Option<Arc<AdapterSnapshot>>,
    ) -> Serving<B> {
        let source = self.source_in(namespace.clone());
        Serving { generation, key, namespace, source, adapter, older: None, stale: false }
    }

    /// What data threads need to look for features in this namespace; without one they find nothing.
    pub fn source_in(&self, namespace: Option<Namespace>) -> KeptFeatures {
        KeptFeatures { namespace, keys: self.keys.clone(), shape: self.shape.clone() }
    }

    /// The namespace of features made with this adapter.
    pub fn described(&self, adapter: Option<&AdapterSnapshot>) -> NamespaceDescription {
        let adapter = adapter.map(|adapter| adapter_digest(&adapter::tensors(adapter)));
        let ingredients = Ingredients { adapter, ..self.base.ingredients.clone() };
        NamespaceDescription { ingredients, ..self.base.clone() }
    }

    /// Whether steps of a generation leave LoRA as it is.
    pub fn rests(&self) -> bool {
        self.mode == CacheMode::Periodic
    }

    /// What a generation has of these samples, of so many values each; none if one of them is missing.
    pub fn stored(&self, serving: &Serving<B>, indices: &[u64], rows: &[usize]) -> Option<Vec<f32>> {
        let namespace = serving.namespace.as_ref()?;
        let mut values = vec![0.0; rows.iter().sum()];
        let mut at = 0;
        for (&index, &row) in indices.iter().zip(rows) {
            let record = namespace.get(&self.keys.get(index)?).filter(|r| r.tokens() * r.width() == row)?;
            record.read_f32(&mut values[at..at + row]).ok()?;
            at += row;
        }
        Some(values)
    }
}

/// What kind of device computes, as far as its bits may differ from another kind's: a GPU rounds otherwise
/// than a processor, one GPU adds in another order than the next, and a processor adds in vectors as wide as
/// it has them. Ranks of different kinds do not share records; each finds its own.
fn device_kind(backend: &str, gpu: Option<&str>) -> String {
    match (backend, gpu) {
        ("flex", _) => format!("cpu {}", vector_unit()),
        (backend, Some(gpu)) => format!("{backend} {gpu}"),
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

/// The namespaces of a run, but for adapter and device. The first time, and where they have changed, reads
/// all frozen weights below the tap.
fn describe<B: Tape<Base = B>>(
    spec: &RunSpec,
    samples: &dyn Samples,
    extractor: &dyn Extractor<B>,
    store: &Store,
) -> Result<NamespaceDescription, TrainError> {
    let frozen = extractor.frozen()?;
    let files = frozen.files();
    let weights = store.digest_of(files.iter().map(PathBuf::as_path), &frozen.name(), || {
        Ok::<_, TrainError>(frozen.digest()?)
    })?;
    let InputIngredients { preprocessing, prompt, tokenizer } = samples.ingredients()?;
    let compute = String::new();
    Ok(NamespaceDescription {
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
        None => Path::new(&spec.run.output_dir).join(CACHE_DIR),
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
