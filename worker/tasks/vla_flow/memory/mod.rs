//! How much memory a run will take, before it is launched: from `config.json`, safetensors headers, the run file and the data
//! set's metadata. No tensor, no GPU, no weight is read.
//!
//! ```text
//! Subject::read      what is predicted about, read once       counts   elements by part, exact
//! Subject::predict   one rank at one micro-batch              shape    shapes of a micro-batch
//! framework          what is neither weights nor activations  shadow   a step with sizes in place of tensors
//! cache              steps from kept features: what they take, how much faster they can be, what the store takes
//! levers             what each setting would save             subject  all of it as the engine and `cox plan` see it
//! ```
//!
//! | category | bytes on a rank, `n` trainables, `W` ranks |
//! |---|---|
//! | frozen weights | elements times 4 or 2 (vectors always 4); on a host only what is not used in place in the mapped files; of blocks that are streamed the two largest neighbours |
//! | trainables | `4 n` |
//! | gradients | `4 n` |
//! | optimizer shard | `8 n / W`; beside a card in host memory with `memory.offload: optimizer` |
//! | mirror | `12 n / W` when a neighbour's shard is kept, see [`MIRROR_BYTES`]; likewise |
//! | activations | the shadow step's peak |
//! | collective buffers | when `W > 1`: on a host the ring's receive buffer; `2 n` where gradients travel as bfloat16 |
//! | input | prefetched micro-batches, and the row cache |
//! | cache | in host memory: names of all frames, the index of stored ones, adapters of generations, features that wait to be written |
//! | framework | process, tokenizer and scratch of the compute threads; a context on a card |
//!
//! Frozen and trained weights are never mixed: LoRA's point is that only a hundredth of the model has gradients and moments.

mod cache;
mod counts;
mod framework;
mod levers;
mod shadow;
mod shape;
mod subject;
#[cfg(test)]
mod tests;

use crate::vla_flow::config::VlaSpec;
use std::path::{Path, PathBuf};

use coxswain_nn::dtypes::WeightsDtype;
use coxswain_proto::run_spec::{CacheMode, Offload, RunSpec};

use coxswain_data::DataError;
use coxswain_models::qwen2_5_vl::{
    checkpoint::Checkpoint,
    config::QwenConfig,
    error::ModelError,
    modules::{FrozenBytes, frozen_tensors, modules},
};
use coxswain_nn::{lora::LoraPlan, params::chunk};
use coxswain_proto::memory::Category;
use coxswain_task::memory::{Ask, Lever, MIRROR_BYTES, Place, Prediction};

use super::data::Outline;

pub use cache::CacheOutlook;
pub use counts::{Counts, Elements};

/// A run that cannot be predicted because something it names cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PredictionError {
    /// The checkpoint, or adapter settings that do not fit it.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The data set.
    #[error(transparent)]
    Data(#[from] DataError),
}

/// What is predicted about: a run, and what its model and data are.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The run.
    pub spec: RunSpec,
    /// Sizes of the model.
    pub config: QwenConfig,
    /// Its adapters.
    pub lora: Option<LoraPlan>,
    /// Sizes of its samples.
    pub outline: Outline,
    /// Elements by part.
    pub counts: Counts,
    frozen: Frozen,
}

/// Bytes of frozen weights, by type of matrices: fp32, bf16.
#[derive(Clone, Debug)]
struct Frozen {
    /// On a device.
    whole: [FrozenBytes; 2],
    /// On a host: what cannot be used in place in the files.
    copied: [FrozenBytes; 2],
}

impl Subject {
    /// Reads configuration and metadata of everything the run names.
    pub fn read(spec: &RunSpec) -> Result<Self, PredictionError> {
        let vla = spec.vla();
        let dir = Path::new(&vla.model.path);
        let config = QwenConfig::read(dir)?;
        let outline = Outline::read(spec)?;
        let frozen = Frozen::read(dir, &config)?;
        let unresolved =
            Self { spec: spec.clone(), config, lora: None, outline, counts: Counts::default(), frozen };
        Ok(unresolved.changed(|_| {})?)
    }

    /// The same model and data under changed settings.
    pub fn changed(&self, change: impl FnOnce(&mut RunSpec)) -> Result<Self, ModelError> {
        let mut subject = self.clone();
        change(&mut subject.spec);
        let modules = modules(&subject.config);
        let lora = subject.spec.vla().lora.as_ref().map(|lora| LoraPlan::resolve(lora, &modules));
        subject.lora = lora.transpose()?;
        subject.counts =
            Counts::of(&subject.config, subject.lora.as_ref(), &subject.spec, subject.outline.dims);
        Ok(subject)
    }

    /// Predicts one rank.
    pub fn predict(&self, ask: Ask) -> Prediction {
        let n = self.counts.trainable();
        let micro = self.micro(ask);
        let shadow::Micro { forward, kept, backward, .. } = micro;
        let mut prediction = Prediction::of_pass(forward, kept, backward);
        let streamed = self.streamed(ask.place).map_or(0, FrozenBytes::two_blocks);
        let held = self.frozen(ask.place).in_memory(self.streamed(ask.place).is_some());
        prediction.set(Category::FrozenWeights, held);
        prediction.set(Category::Trainables, 4 * n);
        prediction.set(Category::Gradients, 4 * n);
        if !self.offloaded(ask.place) {
            self.shards(ask).into_iter().for_each(|(category, bytes)| prediction.set(category, bytes));
        }
        if ask.place != Place::Card {
            prediction.set(Category::Cache, self.cache_bytes(ask));
        }
        // The step holds streamed blocks when they run; two of them are booked as weights.
        prediction.set(Category::Activations, micro.forward.max(micro.backward).saturating_sub(streamed));
        prediction.set(Category::CollectiveBuffers, framework::collective_bytes(self, ask));
        prediction.set(Category::Input, framework::input_bytes(self, ask));
        prediction.set(Category::Framework, framework::framework_bytes(self, ask, &micro));
        prediction
    }

    /// What is held in host memory beside a card: this rank's moments and its copy of the neighbour's part where they are offloaded, and
    /// what kept features take.
    pub fn beside_card(&self, ask: Ask) -> u64 {
        let shards: u64 = self.shards(ask).into_iter().map(|(_, bytes)| bytes).sum();
        self.cache_bytes(ask) + if self.offloaded(ask.place) { shards } else { 0 }
    }

    /// This rank's moments, and its copy of the neighbour's part.
    fn shards(&self, ask: Ask) -> [(Category, u64); 2] {
        let n = self.counts.trainable() as usize;
        let shard = chunk(n, ask.world.max(1) as usize, ask.rank as usize).len() as u64;
        let mirror = if self.mirrored(ask.world) { MIRROR_BYTES * shard } else { 0 };
        [(Category::OptimizerShard, 8 * shard), (Category::Mirror, mirror)]
    }

    /// Whether moments are beside the memory in question.
    fn offloaded(&self, place: Place) -> bool {
        place == Place::Card && self.spec.memory.offload == Offload::Optimizer
    }

    /// The step that takes most, streamed blocks included: where a cache is exact every step begins with kept features, once they have been
    /// computed.
    fn micro(&self, ask: Ask) -> shadow::Micro {
        let exact = self.spec.cache.mode == CacheMode::Exact;
        let (entry, streamed) = (self.tap().filter(|_| exact), self.streamed(ask.place));
        let mut step = shape::step(self, ask.micro_batch, entry);
        if let Some(FrozenBytes { towers: [text, vision], .. }) = streamed {
            let blocks = step.vl.text.iter_mut().chain(&mut step.vl.vision);
            blocks.zip(text.iter().chain(vision)).for_each(|(block, bytes)| block.streamed = *bytes);
        }
        let micro = shadow::run(&step);
        match entry {
            None => micro,
            Some(tap) => {
                let two_blocks = streamed.map_or(0, FrozenBytes::two_blocks);
                let fill = self.fill_peak(tap, ask.micro_batch) + two_blocks;
                shadow::Micro { forward: micro.forward.max(fill), ..micro }
            }
        }
    }

    /// Bytes of frozen weights, as this run keeps matrices.
    fn frozen(&self, place: Place) -> &FrozenBytes {
        let by_dtype = match place {
            Place::Card => &self.frozen.whole,
            Place::Host { .. } => &self.frozen.copied,
        };
        match self.spec.vla().model.weights_dtype {
            WeightsDtype::Float32 => &by_dtype[0],
            WeightsDtype::Bfloat16 => &by_dtype[1],
        }
    }

    /// What of repeated blocks is in memory only while they run; none if they are held.
    fn streamed(&self, place: Place) -> Option<&FrozenBytes> {
        (self.spec.memory.offload == Offload::Layers).then(|| self.frozen(place))
    }

    /// Whether ranks keep a copy of their neighbour's shard.
    fn mirrored(&self, world: u64) -> bool {
        world > 1 && self.spec.faults.mirror
    }
}

impl Frozen {
    /// From the model's sizes and its files' headers. Without weight files they are taken to be bf16, as published.
    fn read(dir: &Path, config: &QwenConfig) -> Result<Self, PredictionError> {
        const BY_DTYPE: [WeightsDtype; 2] = [WeightsDtype::Float32, WeightsDtype::Bfloat16];
        let tensors = frozen_tensors(config);
        let checkpoint = has_weights(dir).then(|| Checkpoint::open(dir)).transpose()?;
        let copied = |dtype| {
            FrozenBytes::of(&tensors, |tensor| {
                let kept = if tensor.is_matrix { dtype } else { WeightsDtype::Float32 };
                match &checkpoint {
                    Some(checkpoint) => checkpoint.copied_bytes(&tensor.name, kept).unwrap_or(0),
                    None if kept == WeightsDtype::Bfloat16 => 0,
                    None => tensor.kept_bytes(kept),
                }
            })
        };
        Ok(Self {
            whole: BY_DTYPE.map(|dtype| FrozenBytes::of(&tensors, |tensor| tensor.kept_bytes(dtype))),
            copied: BY_DTYPE.map(copied),
        })
    }
}

fn has_weights(dir: &Path) -> bool {
    let there = |name: &str| PathBuf::from(dir).join(name).is_file();
    there("model.safetensors") || there("model.safetensors.index.json")
}
