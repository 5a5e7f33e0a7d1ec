//! The keys of the task `trajectory`.

use coxswain_nn::{
    dtypes::WeightsDtype,
    lora::{self, LoraTargets},
};
use coxswain_proto::{
    config::{
        Findings, SettingsError, TaskSchema, TaskSettings,
        bounds::{ABOVE_ZERO, Bounds, COUNT, LAYERS, NO_MOST, RANK, SIZE},
    },
    identity::{
        Class::{Base, Learned},
        Classes,
    },
    run_spec::{CacheMode, Offload, RunSpec, Shard, Tap},
};
use serde::{Deserialize, Serialize};

/// The keys' schema.
pub const SCHEMA: TaskSchema = TaskSchema::of::<TrajectorySettings>();

/// The task's keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrajectorySettings {
    /// What gives trajectories.
    pub extractor: Extractor,
    /// What learns from them.
    #[serde(default)]
    pub network: NetworkSettings,
    /// Adapters in the network, which itself stays what `train.init_from` brings; absent means that all of
    /// it trains.
    #[serde(default)]
    pub lora: Option<NetworkLora>,
    /// Which images, and in which size.
    #[serde(default)]
    pub data: ImageData,
    /// Learning rates.
    #[serde(default)]
    pub optimizer: TrajectoryOptimizer,
}

/// The frozen vision tower, and what of it is learned from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extractor {
    /// A Hugging Face directory of a Qwen2.5-VL or Qwen3-VL checkpoint.
    pub path: String,
    /// Blocks whose outputs make a trajectory, from 0, ascending; all of them if absent.
    #[serde(default)]
    pub layers: Option<Vec<usize>>,
    /// Positions along each side that patches are averaged to.
    #[serde(default = "seven")]
    pub spatial_resolution: usize,
    /// How the tower's matrices are kept in memory.
    #[serde(default)]
    pub weights_dtype: WeightsDtype,
}

fn seven() -> usize {
    7
}

/// What learns from trajectories.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NetworkSettings {
    /// Which of the three.
    #[serde(rename = "type")]
    pub kind: NetworkType,
    /// Width between input and latent.
    pub hidden_dim: usize,
    /// Numbers that a trajectory becomes.
    pub latent_dim: usize,
    /// Linear layers, or blocks of a transformer, of each half.
    pub num_layers: usize,
    /// Heads of the transformer's attention.
    pub heads: usize,
    /// Weight of the divergence in the loss of a variational autoencoder.
    pub beta: f64,
}

impl Default for NetworkSettings {
    fn default() -> Self {
        Self {
            kind: NetworkType::Autoencoder,
            hidden_dim: 256,
            latent_dim: 32,
            num_layers: 2,
            heads: 4,
            beta: 1e-3,
        }
    }
}

/// Kinds of networks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkType {
    /// Linear layers.
    #[default]
    Autoencoder,
    /// Linear layers with a drawn latent (arXiv 1312.6114).
    Vae,
    /// Attention between the layers of a trajectory.
    Transformer,
}

/// LoRA in the network's linears, in PEFT's terms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkLora {
    /// Rank `r`.
    pub rank: usize,
    /// `lora_alpha`; the update is scaled by `alpha / r`, or `alpha / sqrt(r)` with rsLoRA.
    pub alpha: f64,
    /// Scale by `alpha / sqrt(r)`.
    pub rslora: bool,
    /// Which linears get an adapter.
    pub targets: LoraTargets,
}

impl Default for NetworkLora {
    fn default() -> Self {
        let lora::Lora { rank, alpha, rslora, .. } = lora::Lora::default();
        Self { rank, alpha, rslora, targets: LoraTargets::Regex("all-linear".into()) }
    }
}

impl From<&NetworkLora> for lora::Lora {
    fn from(of: &NetworkLora) -> Self {
        let NetworkLora { rank, alpha, rslora, targets } = of.clone();
        Self { rank, alpha, rslora, targets, ..Self::default() }
    }
}

/// Which images. `data.path`, the engine's key, is a folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageData {
    /// Folders below `data.path` whose images are used; those of `data.path` itself if empty.
    pub domains: Vec<String>,
    /// So many images, as many of each domain as it has; all if absent.
    pub num_samples: Option<u64>,
    /// Side in pixels that every image is resized to.
    pub image_size: usize,
    /// One of so many images is held out; 0: none.
    pub holdout_every: u64,
}

impl Default for ImageData {
    fn default() -> Self {
        Self { domains: Vec::new(), num_samples: None, image_size: 224, holdout_every: 0 }
    }
}

/// The task's part of the section `optimizer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TrajectoryOptimizer {
    /// Peak learning rate of each group of trainables.
    pub lr: TrajectoryRates,
}

/// By the group's name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrajectoryRates {
    /// The network, where it trains.
    pub network: f64,
    /// Adapters.
    pub lora: f64,
}

impl Default for TrajectoryRates {
    fn default() -> Self {
        Self { network: 1e-3, lora: 1e-3 }
    }
}

impl TrajectorySettings {
    /// The settings of a specification; refused if they are another task's, or of other types. Their rules
    /// are the schema's to check.
    pub fn from_spec(spec: &RunSpec) -> Result<Self, SettingsError> {
        spec.settings()
    }
}

impl TaskSettings for TrajectorySettings {
    const TYPE: &'static str = "trajectory";

    const IDENTITY: &'static Classes = &[
        ("extractor.path", Base),
        ("extractor.layers", Learned),
        ("extractor.spatial_resolution", Learned),
        ("extractor.weights_dtype", Learned),
        ("network.type", Learned),
        ("network.hidden_dim", Learned),
        ("network.latent_dim", Learned),
        ("network.num_layers", Learned),
        ("network.heads", Learned),
        ("network.beta", Learned),
        ("lora.rank", Learned),
        ("lora.alpha", Learned),
        ("lora.rslora", Learned),
        ("lora.targets", Learned),
        ("data.domains", Learned),
        ("data.num_samples", Learned),
        ("data.image_size", Learned),
        ("data.holdout_every", Learned),
        ("optimizer.lr.network", Learned),
        ("optimizer.lr.lora", Learned),
    ];

    const BOUNDS: &'static Bounds = &[
        ("extractor.layers", 0.0, SIZE),
        ("extractor.spatial_resolution", 1.0, 1024.0),
        ("network.hidden_dim", 1.0, SIZE),
        ("network.latent_dim", 1.0, SIZE),
        ("network.num_layers", 1.0, LAYERS),
        ("network.heads", 1.0, SIZE),
        ("network.beta", 0.0, NO_MOST),
        ("lora.rank", 1.0, RANK),
        ("lora.alpha", ABOVE_ZERO, 1e9),
        ("data.num_samples", 1.0, COUNT),
        ("data.image_size", 1.0, 16_384.0),
        ("data.holdout_every", 0.0, COUNT),
        ("optimizer.lr.network", 0.0, NO_MOST),
        ("optimizer.lr.lora", 0.0, NO_MOST),
    ];

    fn check(&self, spec: &RunSpec, f: &mut Findings) {
        check_extractor(&self.extractor, f);
        check_network(&self.network, f);
        check_data(&self.data, f);
        if let Some(lora) = &self.lora {
            lora::Lora::from(lora).check(f);
            f.require(
                spec.train.init_from.is_some(),
                "train.init_from",
                "is missing: the section `lora` adapts a network that is already trained",
                "name the run that trained it, or remove the section `lora`",
            );
        }
        let TrajectoryRates { network, lora } = self.optimizer.lr;
        f.learning_rate("network", network);
        f.learning_rate("lora", lora);
        let (group, rate) = if self.lora.is_some() { ("lora", lora) } else { ("network", network) };
        f.require(
            rate != 0.0,
            &format!("optimizer.lr.{group}"),
            "is 0, and nothing else trains, so nothing would be learned",
            "give it a rate above 0",
        );
        f.require(
            spec.data.holdout_episodes.is_empty(),
            "data.holdout_episodes",
            "is given, but images have no episodes",
            "use `data.holdout_every`",
        );
        f.require(
            spec.cache.mode != CacheMode::Periodic,
            "cache.mode",
            "is `periodic`, but nothing trains in the extractor, so its features never change",
            "use `exact`",
        );
        f.require(
            spec.memory.offload != Offload::Embedding,
            "memory.offload",
            "is `embedding`, but the extractor reads only images",
            "remove it",
        );
        f.require(
            spec.memory.shard != Shard::Frozen,
            "memory.shard",
            "is `frozen`, but every rank of this task holds all blocks of the tower",
            "remove it; `memory.offload: layers` and `extractor.weights_dtype: bfloat16` save memory",
        );
        f.require(
            spec.cache.tap == Tap::default(),
            "cache.tap",
            "is set, but this task always caches trajectories",
            "remove it",
        );
    }
}

fn check_extractor(extractor: &Extractor, f: &mut Findings) {
    f.named("extractor.path", &extractor.path, "name the directory of a Qwen2.5-VL or Qwen3-VL checkpoint");
    f.at_least_one("extractor.spatial_resolution", extractor.spatial_resolution);
    if let Some(layers) = &extractor.layers {
        f.require(
            !layers.is_empty() && layers.is_sorted_by(|one, next| one < next),
            "extractor.layers",
            "is empty, or not ascending",
            "list blocks from 0, each once, for instance `[0, 2, 3]`, or remove the key for all of them",
        );
    }
}

fn check_network(network: &NetworkSettings, f: &mut Findings) {
    f.at_least_one("network.hidden_dim", network.hidden_dim);
    f.at_least_one("network.latent_dim", network.latent_dim);
    f.at_least_one("network.num_layers", network.num_layers);
    f.in_range("network.beta", network.beta, network.beta >= 0.0, "of at least 0");
    let NetworkSettings { kind, heads, hidden_dim, .. } = network;
    f.at_least_one("network.heads", *heads);
    f.require(
        *kind != NetworkType::Transformer || hidden_dim.is_multiple_of((*heads).max(1)),
        "network.heads",
        format_args!("is {heads}, which does not divide `network.hidden_dim` ({hidden_dim})"),
        "choose a divisor of `network.hidden_dim`",
    );
}

fn check_data(data: &ImageData, f: &mut Findings) {
    for domain in &data.domains {
        f.named("data.domains", domain, "name folders below `data.path`");
    }
    let twice = data.domains.iter().enumerate().find(|(at, domain)| data.domains[..*at].contains(domain));
    f.require(twice.is_none(), "data.domains", "names a folder twice", "name each once");
    f.require(data.num_samples != Some(0), "data.num_samples", "is 0", "give at least 1 or remove the key");
    f.at_least_one("data.image_size", data.image_size);
    f.require(data.holdout_every != 1, "data.holdout_every", "holds out every image", "give 0 or at least 2");
}
