//! What is predicted about: a run, and what its model and data are.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::DataError;
use coxswain_models::{
    Shelf,
    pretrained::{
        blocks::InMemory,
        checkpoint::Checkpoint,
        directory,
        error::ModelError,
        frozen::{FrozenBytes, FrozenTensor},
        rules::Rules,
        trains::Trains,
    },
    vision_language::{ModelOutline, Tap},
};
use coxswain_nn::{
    dtypes::{FrozenDtype, WeightsDtype},
    kernels::sizes::Sizes,
    lora::{LoraPlan, TrainedModules},
    params::TrainableLayout,
};
use coxswain_proto::{
    config::SettingsError,
    run_spec::{Offload, RunSpec},
};
use coxswain_task::{
    dry_run::Passes,
    memory::{Ask, Place},
};

use super::counts::{Counts, trained};
use crate::vla_flow::{
    adapters::Split,
    config::VlaSettings,
    data::Outline,
    policy::{PolicyError, StepError},
};

/// A run that cannot be predicted because something it names cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PredictionError {
    /// The checkpoint, or adapter settings that do not fit it.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The data set.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The run's settings are none of this task's.
    #[error(transparent)]
    Task(#[from] SettingsError),
    /// A policy that cannot be built.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A pass that cannot be run.
    #[error(transparent)]
    Step(#[from] StepError),
}

/// What a pass does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// Trains, beginning with kept features at a tap, or with pixels.
    Training(Option<Tap>),
    /// Computes features at the run's tap.
    Filling,
}

/// What is predicted about: a run, and what its model and data are.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The run.
    pub spec: RunSpec,
    /// The task's keys of it.
    pub vla: VlaSettings,
    /// The models that are read.
    pub(super) models: Shelf<Sizes>,
    /// The model as its configuration has it.
    pub model: Arc<ModelOutline>,
    /// Adapters of the model.
    pub lora: Option<LoraPlan>,
    /// What of it trains in full.
    pub full: TrainedModules,
    /// Sizes of its samples.
    pub outline: Outline,
    /// What trains, tensor by tensor.
    pub trained: TrainableLayout,
    /// Elements by part.
    pub counts: Counts,
    pub(super) frozen: FrozenStorage,
    pub(super) passes: Passes<(String, Kind)>,
}

/// Bytes of frozen weights, by how they are kept.
#[derive(Clone, Debug)]
pub(crate) struct FrozenStorage {
    /// On a device.
    whole: [FrozenBytes; FrozenDtype::ALL.len()],
    /// On a host: what cannot be used in place in the files.
    copied: [FrozenBytes; FrozenDtype::ALL.len()],
}

impl Subject {
    /// Reads configuration and metadata of everything the run names.
    pub fn from_spec(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, PredictionError> {
        let vla = VlaSettings::from_spec(spec)?;
        let dir = &directory::outline(&vla.model.path).map_err(ModelError::from)?;
        let model = Arc::new(models.vision_language.of(dir)?.outline(dir)?);
        let outline = Outline::from_spec(spec, models)?;
        let frozen = FrozenStorage::from_headers(dir, model.rules, &model.tensors())?;
        let (spec, counts, trained) = (spec.clone(), Counts::default(), TrainableLayout::default());
        let (lora, full, passes) = (None, TrainedModules::default(), Passes::default());
        let subject = Self { spec, vla, models, model, lora, full, outline, trained, counts, frozen, passes };
        let subject = subject.changed(|_| {})?;
        subject.try_pass()?;
        Ok(subject)
    }

    /// This model and data under changed settings.
    pub fn changed(&self, change: impl FnOnce(&mut RunSpec)) -> Result<Self, PredictionError> {
        let mut subject = self.clone();
        change(&mut subject.spec);
        subject.vla = VlaSettings::from_spec(&subject.spec)?;
        let modules = &subject.model.modules;
        let split = Split::from_settings(&subject.vla, &subject.model).map_err(ModelError::from)?;
        let lora = split.model.as_ref().map(|lora| LoraPlan::resolve(lora, modules));
        subject.lora = lora.transpose().map_err(ModelError::from)?;
        let full = TrainedModules::resolve(&subject.vla.model.train, modules, subject.lora.as_ref());
        let full = full.map_err(ModelError::from)?;
        subject.full = full;
        if subject.frozen_names() != self.frozen_names() {
            let mut tensors = subject.model.tensors();
            tensors.retain(|tensor| subject.trains().group(&tensor.name).is_none());
            let dir = directory::outline(&subject.vla.model.path).map_err(ModelError::from)?;
            subject.frozen = FrozenStorage::from_headers(&dir, subject.model.rules, &tensors)?;
        }
        subject.trained = trained(&subject.model, subject.trains(), &subject.vla, subject.outline.dims);
        subject.counts = Counts::from_layout(&subject.model, &subject.trained);
        Ok(subject)
    }

    /// Tensors of the model that do not train.
    fn frozen_names(&self) -> Vec<String> {
        let tensors = self.model.tensors().into_iter().map(|tensor| tensor.name);
        tensors.filter(|name| self.trains().group(name).is_none()).collect()
    }

    /// What of the model trains.
    pub(super) fn trains(&self) -> Trains<'_> {
        Trains { lora: self.lora.as_ref(), full: Some(&self.full) }
    }

    /// This model and data under other keys of the task.
    pub fn with(&self, change: impl FnOnce(&mut VlaSettings)) -> Result<Self, PredictionError> {
        let mut vla = self.vla.clone();
        change(&mut vla);
        self.changed(|spec| spec.set_settings(&vla))
    }

    /// Whether moments are beside the memory in question.
    pub(super) fn offloaded(&self, place: Place) -> bool {
        place == Place::Gpu && self.spec.memory.offload == Offload::Optimizer
    }

    /// Bytes of the table of token embeddings that are beside the memory in question.
    pub(super) fn table_elsewhere(&self, place: Place) -> u64 {
        let offloaded = place == Place::Gpu && self.spec.memory.offload == Offload::Embedding;
        if offloaded { self.frozen(place).table } else { 0 }
    }

    /// Bytes of frozen weights, as this run keeps matrices.
    pub(super) fn frozen(&self, place: Place) -> &FrozenBytes {
        self.frozen.bytes(place, self.vla.model.weights_dtype)
    }

    /// What of repeated blocks is in memory on a rank.
    pub(super) fn blocks(&self, ask: Ask) -> InMemory {
        InMemory::from_spec(&self.spec, ask.cut())
    }

    /// What of repeated blocks is in memory only while they run; none if they are held.
    pub(super) fn fetched(&self, ask: Ask) -> Option<&FrozenBytes> {
        self.blocks(ask).fetches().then(|| self.frozen(ask.place))
    }
}

impl FrozenStorage {
    /// From the model's sizes and its files' headers. Without weight files they are taken to be bf16, as
    /// published.
    pub fn from_headers(dir: &Path, rules: Rules, tensors: &[FrozenTensor]) -> Result<Self, ModelError> {
        let checkpoint = has_weights(dir).then(|| Checkpoint::open(dir, rules)).transpose()?;
        let copied = |dtype| {
            FrozenBytes::of(tensors, |tensor| {
                let kept = tensor.dense_dtype(dtype);
                match (tensor.packed_bytes(dtype), &checkpoint) {
                    (Some(packed), _) => packed,
                    (None, Some(checkpoint)) => checkpoint.copied_bytes(&tensor.name, kept).unwrap_or(0),
                    (None, None) if kept == WeightsDtype::Bfloat16 => 0,
                    (None, None) => tensor.kept_bytes(dtype),
                }
            })
        };
        Ok(Self {
            whole: FrozenDtype::ALL
                .map(|dtype| FrozenBytes::of(tensors, |tensor| tensor.device_bytes(dtype))),
            copied: FrozenDtype::ALL.map(copied),
        })
    }

    /// Bytes of matrices kept as `dtype`.
    pub fn bytes(&self, place: Place, dtype: impl Into<FrozenDtype>) -> &FrozenBytes {
        let by_dtype = match place {
            Place::Gpu => &self.whole,
            Place::Host { .. } => &self.copied,
        };
        &by_dtype[dtype.into() as usize]
    }
}

fn has_weights(dir: &Path) -> bool {
    let there = |name: &str| PathBuf::from(dir).join(name).is_file();
    there("model.safetensors") || there("model.safetensors.index.json")
}
