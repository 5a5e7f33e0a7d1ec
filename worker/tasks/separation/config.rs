//! The keys of the task `separation`.

use coxswain_nn::dtypes::ActivationsDtype;
use coxswain_proto::{
    config::{
        Findings, SettingsError, TaskSchema, TaskSettings,
        bounds::{Bounds, COUNT, LAYERS, NO_MOST, SIZE},
    },
    identity::{Class::Learned, Classes},
    limits::MAX_METRIC_NAME_BYTES,
    run_spec::{CacheMode, Offload, RunSpec, Shard},
};
use serde::{Deserialize, Serialize};

/// The keys' schema.
pub const SCHEMA: TaskSchema = TaskSchema::of::<SeparationSettings>();

/// Longest name of a stem: its measures are called after it.
const MAX_STEM: usize = MAX_METRIC_NAME_BYTES - "eval/csdr/".len();

/// The task's keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeparationSettings {
    /// What is trained.
    #[serde(default)]
    pub network: SeparatorNetwork,
    /// How samples are cut out of tracks.
    pub data: TrackData,
    /// What the loss is made of.
    #[serde(default)]
    pub loss: LossWeights,
    /// Learning rates.
    #[serde(default)]
    pub optimizer: SeparationOptimizer,
}

/// What is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SeparatorNetwork {
    /// Samples of a frame of the Fourier transform.
    pub n_fft: usize,
    /// Samples from one frame to the next.
    pub hop: usize,
    /// Bands that the spectrum is split in.
    pub bands: usize,
    /// Values of a band in a frame.
    pub hidden_dim: usize,
    /// Dual-path blocks: each along time, then along bands.
    pub layers: usize,
    /// Attention heads; divides `hidden_dim`.
    pub heads: usize,
    /// How precise the values are that blocks hand on, and that recompute keeps.
    pub activations_dtype: ActivationsDtype,
}

impl Default for SeparatorNetwork {
    fn default() -> Self {
        Self {
            n_fft: 2048,
            hop: 512,
            bands: 62,
            hidden_dim: 256,
            layers: 6,
            heads: 8,
            activations_dtype: ActivationsDtype::Float32,
        }
    }
}

/// How samples are cut out of tracks. `data.path`, the engine's key, is a folder of folders, one a track.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrackData {
    /// What a mixture is made of: `{name}.wav` in the folder of each track.
    pub stems: Vec<String>,
    /// Samples a second that every file has.
    #[serde(default = "usual_rate")]
    pub sample_rate: u32,
    /// Length of a sample.
    pub segment_seconds: f64,
    /// From the start of one sample to that of the next; their length if absent.
    #[serde(default)]
    pub hop_seconds: Option<f64>,
    /// One of so many tracks is held out; 0: none.
    #[serde(default)]
    pub holdout_every: u64,
}

fn usual_rate() -> u32 {
    44_100
}

/// What the loss is made of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossWeights {
    /// Weight of the mean absolute error of waveforms.
    pub waveform: f64,
    /// Weight of the mean absolute error of real and imaginary parts of the spectrum.
    pub spectrum: f64,
}

impl Default for LossWeights {
    fn default() -> Self {
        Self { waveform: 1.0, spectrum: 1.0 }
    }
}

/// The task's part of the section `optimizer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SeparationOptimizer {
    /// Peak learning rate of each group of trainables.
    pub lr: SeparatorRates,
}

/// By the group's name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SeparatorRates {
    /// The whole network.
    pub separator: f64,
}

impl Default for SeparatorRates {
    fn default() -> Self {
        Self { separator: 1e-3 }
    }
}

impl SeparationSettings {
    /// The settings of a specification; refused if they are another task's, or of other types.
    pub fn from_spec(spec: &RunSpec) -> Result<Self, SettingsError> {
        spec.settings()
    }
}

impl TrackData {
    /// Samples of a segment.
    pub fn segment(&self) -> usize {
        self.samples(self.segment_seconds)
    }

    /// Samples from the start of one segment to that of the next.
    pub fn stride(&self) -> usize {
        self.samples(self.hop_seconds.unwrap_or(self.segment_seconds)).max(1)
    }

    fn samples(&self, seconds: f64) -> usize {
        (seconds * f64::from(self.sample_rate)).round() as usize
    }
}

impl TaskSettings for SeparationSettings {
    const TYPE: &'static str = "separation";

    const IDENTITY: &'static Classes = &[
        ("network.n_fft", Learned),
        ("network.hop", Learned),
        ("network.bands", Learned),
        ("network.hidden_dim", Learned),
        ("network.layers", Learned),
        ("network.heads", Learned),
        ("network.activations_dtype", Learned),
        ("data.stems", Learned),
        ("data.sample_rate", Learned),
        ("data.segment_seconds", Learned),
        ("data.hop_seconds", Learned),
        ("data.holdout_every", Learned),
        ("loss.waveform", Learned),
        ("loss.spectrum", Learned),
        ("optimizer.lr.separator", Learned),
    ];

    const BOUNDS: &'static Bounds = &[
        ("network.n_fft", 4.0, 1_048_576.0),
        ("network.hop", 1.0, 262_144.0),
        ("network.bands", 1.0, 524_289.0),
        ("network.hidden_dim", 1.0, SIZE),
        ("network.layers", 1.0, LAYERS),
        ("network.heads", 1.0, SIZE),
        ("data.sample_rate", 1.0, 1e7),
        ("data.segment_seconds", 0.0, 120.0),
        ("data.hop_seconds", 0.0, 86_400.0),
        ("data.holdout_every", 0.0, COUNT),
        ("loss.waveform", 0.0, NO_MOST),
        ("loss.spectrum", 0.0, NO_MOST),
        ("optimizer.lr.separator", 0.0, NO_MOST),
    ];

    fn check(&self, spec: &RunSpec, f: &mut Findings) {
        check_network(&self.network, f);
        check_data(&self.data, self.network.n_fft, f);
        let LossWeights { waveform, spectrum } = self.loss;
        f.in_range("loss.waveform", waveform, waveform >= 0.0, "of at least 0");
        f.in_range("loss.spectrum", spectrum, spectrum >= 0.0, "of at least 0");
        f.require(
            waveform > 0.0 || spectrum > 0.0,
            "loss",
            "has only weights of 0, so nothing would be learned",
            "give `waveform` or `spectrum` a weight above 0",
        );
        f.learning_rate("separator", self.optimizer.lr.separator);
        f.require(
            spec.data.holdout_episodes.is_empty(),
            "data.holdout_episodes",
            "is given, but tracks have no episodes",
            "use `data.holdout_every`",
        );
        f.require(
            spec.cache.mode == CacheMode::Off,
            "cache.mode",
            "is not `off`, but nothing here is frozen",
            "remove it",
        );
        f.require(
            spec.memory.offload != Offload::Layers,
            "memory.offload",
            "is `layers`, but nothing here is frozen",
            "remove it",
        );
        f.require(
            spec.memory.offload != Offload::Embedding,
            "memory.offload",
            "is `embedding`, but this model has no token embedding",
            "remove it",
        );
        f.require(
            spec.memory.shard != Shard::Frozen,
            "memory.shard",
            "is `frozen`, but nothing here is frozen",
            "remove it",
        );
    }
}

fn check_network(network: &SeparatorNetwork, f: &mut Findings) {
    let SeparatorNetwork { n_fft, hop, bands, hidden_dim, layers, heads, .. } = *network;
    f.require(
        n_fft >= 4 && n_fft.is_multiple_of(2),
        "network.n_fft",
        format_args!("is {n_fft}"),
        "give an even number of at least 4",
    );
    f.require(
        hop >= 1 && hop <= n_fft / 4,
        "network.hop",
        format_args!("is {hop}, but frames of {n_fft} samples must overlap by at least three quarters"),
        "give at least 1 and at most a quarter of `network.n_fft`",
    );
    f.require(
        bands >= 1 && bands <= n_fft / 2 + 1,
        "network.bands",
        format_args!("is {bands}, but {n_fft} samples have {} frequencies", n_fft / 2 + 1),
        "give 1 or more bands, at most one per frequency",
    );
    f.at_least_one("network.layers", layers);
    f.require(
        heads >= 1 && hidden_dim >= 1 && hidden_dim.is_multiple_of(2 * heads.max(1)),
        "network.heads",
        format_args!("is {heads}, which does not divide half of `network.hidden_dim` ({hidden_dim})"),
        "choose a divisor of half of `network.hidden_dim`: rotary embeddings rotate pairs of values",
    );
}

/// Whether a stem can have this name.
pub(super) fn is_stem(name: &str) -> bool {
    let letters = name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
    (1..=MAX_STEM).contains(&name.len()) && letters && name != "mixture"
}

fn check_data(data: &TrackData, n_fft: usize, f: &mut Findings) {
    f.require(!data.stems.is_empty(), "data.stems", "names no stem", "list the stems of a mixture");
    for (at, stem) in data.stems.iter().enumerate() {
        f.require(
            is_stem(stem) && !data.stems[..at].contains(stem),
            "data.stems",
            format_args!("has `{stem}`"),
            &format!("give names of files without `.wav`, each once, of at most {MAX_STEM} letters, digits and `_`, and not `mixture`"),
        );
    }
    f.at_least_one("data.sample_rate", data.sample_rate as usize);
    f.require(
        data.segment_seconds.is_finite() && data.segment_seconds > 0.0 && data.segment() > n_fft / 2,
        "data.segment_seconds",
        format_args!("is {} ({} samples)", data.segment_seconds, data.segment()),
        "give a finite length of more samples than half of `network.n_fft`",
    );
    let hop = data.hop_seconds.unwrap_or(1.0);
    f.in_range("data.hop_seconds", hop, hop.is_finite() && hop > 0.0, "above 0");
    f.require(data.holdout_every != 1, "data.holdout_every", "holds out every track", "give 0 or at least 2");
}
