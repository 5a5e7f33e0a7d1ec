//! The keys of the task `seq2seq`.

use coxswain_models::pretrained::settings::Model;
use coxswain_nn::{
    dtypes::ActivationsDtype,
    lora::{Bias, Lora, LoraTargets},
};
use coxswain_proto::{
    config::{
        Findings, SettingsError, TaskSchema, TaskSettings,
        bounds::{ABOVE_ZERO, Bounds, COUNT, NO_MOST, RANK, SIZE},
    },
    identity::{
        Class::{Base, Learned, LearnedInOrder, Outside},
        Classes,
    },
    run_spec::{Offload, Recompute, RunSpec, Shard},
};
use serde::{Deserialize, Serialize};

use crate::settings::{check_texts, check_trained};

/// The keys' schema.
pub const SCHEMA: TaskSchema = TaskSchema::of::<Seq2SeqSettings>();
/// What gets adapters where `lora.targets` is left out: PEFT's own choice for T5.
const TARGETS: [&str; 2] = ["q", "v"];

/// The task's keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Seq2SeqSettings {
    /// The pretrained encoder and decoder.
    pub model: Model,
    /// Low-rank adapters; absent means that only what `model.train` names trains.
    #[serde(default)]
    pub lora: Option<Lora>,
    /// How samples are read from a table of texts.
    #[serde(default)]
    pub data: PairData,
    /// Learning rates.
    #[serde(default)]
    pub optimizer: Seq2SeqOptimizer,
    /// What evaluation writes.
    #[serde(default)]
    pub eval: Seq2SeqEval,
}

/// How samples are read. `data.path`, the engine's key, is a file of JSON lines, or a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PairData {
    /// The column, or the field of each object, that is read.
    pub source: String,
    /// The one that is written.
    pub target: String,
    /// What stands before every source.
    pub source_prefix: String,
    /// Tokens of a source, its end included; what is beyond them is cut off.
    pub max_source_tokens: usize,
    /// Tokens of a target, its end included; what is beyond them is cut off.
    pub max_target_tokens: usize,
    /// One of so many pairs is held out; 0: none.
    pub holdout_every: u64,
}

impl Default for PairData {
    fn default() -> Self {
        Self {
            source: "source".into(),
            target: "target".into(),
            source_prefix: String::new(),
            max_source_tokens: 512,
            max_target_tokens: 128,
            holdout_every: 0,
        }
    }
}

/// The task's part of the section `eval`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Seq2SeqEval {
    /// Whether held-out sources are answered, and the answers measured by ROUGE.
    pub rouge: bool,
}

impl Default for Seq2SeqEval {
    fn default() -> Self {
        Self { rouge: true }
    }
}

/// The task's part of the section `optimizer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Seq2SeqOptimizer {
    /// Peak learning rate of each group of trainables.
    pub lr: PairRates,
}

/// By the group's name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PairRates {
    /// LoRA matrices.
    pub lora: f64,
    /// What of the model trains in full (`model.train`).
    pub base: f64,
}

impl Default for PairRates {
    fn default() -> Self {
        Self { lora: 1e-3, base: 1e-4 }
    }
}

impl Seq2SeqSettings {
    /// The settings of a specification; refused if they are another task's, or of other types. Their rules
    /// are the schema's to check.
    pub fn from_spec(spec: &RunSpec) -> Result<Self, SettingsError> {
        let mut settings: Self = spec.settings()?;
        settings.lora = settings.lora.map(meant);
        Ok(settings)
    }
}

/// A section `lora` as it is meant here: the default of its targets names modules that no T5 has.
pub fn meant(lora: Lora) -> Lora {
    if lora.targets != LoraTargets::default() {
        return lora;
    }
    Lora { targets: LoraTargets::Suffixes(TARGETS.map(str::to_owned).into()), ..lora }
}

impl TaskSettings for Seq2SeqSettings {
    const TYPE: &'static str = "seq2seq";

    const IDENTITY: &'static Classes = &[
        ("model.path", Base),
        ("model.backbone", Outside("where a policy's model is stored, not which model it is")),
        ("model.weights_dtype", Learned),
        ("model.activations_dtype", Learned),
        ("model.train", Learned),
        ("lora.rank", Learned),
        ("lora.alpha", Learned),
        ("lora.rslora", Learned),
        ("lora.targets", Learned),
        ("lora.rank_pattern", LearnedInOrder),
        ("lora.alpha_pattern", LearnedInOrder),
        ("lora.dropout", Learned),
        ("lora.use_dora", Learned),
        ("lora.bias", Learned),
        ("lora.exclude_modules", Learned),
        ("lora.layers_to_transform", Learned),
        ("lora.layers_pattern", Learned),
        ("lora.init_from", Learned),
        ("data.source", Learned),
        ("data.target", Learned),
        ("data.source_prefix", Learned),
        ("data.max_source_tokens", Learned),
        ("data.max_target_tokens", Learned),
        ("data.holdout_every", Learned),
        ("optimizer.lr.lora", Learned),
        ("optimizer.lr.base", Learned),
        ("eval.rouge", Outside("what is evaluated, not what is learned")),
    ];

    const BOUNDS: &'static Bounds = &[
        ("lora.rank", 1.0, RANK),
        ("lora.alpha", ABOVE_ZERO, 1e9),
        ("lora.rank_pattern", 1.0, RANK),
        ("lora.alpha_pattern", ABOVE_ZERO, 1e9),
        ("lora.dropout", 0.0, 1.0),
        ("lora.layers_to_transform", 0.0, SIZE),
        ("data.max_source_tokens", 2.0, SIZE),
        ("data.max_target_tokens", 2.0, 4096.0),
        ("data.holdout_every", 0.0, COUNT),
        ("optimizer.lr.lora", 0.0, NO_MOST),
        ("optimizer.lr.base", 0.0, NO_MOST),
    ];

    fn check(&self, spec: &RunSpec, f: &mut Findings) {
        self.model.check(spec, f);
        f.require(
            self.model.backbone.is_none(),
            "model.backbone",
            "is only for LeRobot policies, whose files name a backbone",
            "remove it",
        );
        if let Some(lora) = &self.lora {
            lora.check(f);
            f.require(lora.bias == Bias::None, "lora.bias", "is given, but a T5 has no biases", "remove it");
        }
        let PairRates { lora, base } = self.optimizer.lr;
        check_trained(self.lora.as_ref(), &self.model.train, [lora, base], f);
        check_data(&self.data, f);
        check_texts(spec, "pairs of texts", f);
        f.require(
            spec.memory.offload != Offload::Layers,
            "memory.offload",
            "is `layers`, but this task keeps all blocks in memory",
            "remove it; `model.weights_dtype: bfloat16` halves the frozen weights",
        );
        f.require(
            spec.memory.offload != Offload::Embedding,
            "memory.offload",
            "is `embedding`, but this task keeps the token embeddings with the rest of the model",
            "remove it; `model.weights_dtype: bfloat16` halves the frozen weights",
        );
        f.require(
            spec.memory.shard != Shard::Frozen,
            "memory.shard",
            "is `frozen`, but every rank of this task holds all blocks",
            "remove it; `model.weights_dtype: bfloat16` halves the frozen weights",
        );
        f.require(
            self.model.activations_dtype == ActivationsDtype::Float32
                || spec.train.recompute != Recompute::None,
            "model.activations_dtype",
            "is `bfloat16`, which rounds values, and saves memory only with recompute",
            "set `train.recompute: full` or `selective`",
        );
    }
}

fn check_data(data: &PairData, f: &mut Findings) {
    f.named("data.source", &data.source, "name the column of the sources");
    f.named("data.target", &data.target, "name the column of the targets");
    f.require(
        data.source != data.target,
        "data.target",
        "is the same as `data.source`, so a text would be learned from itself",
        "name two different columns",
    );
    for (key, tokens) in [
        ("data.max_source_tokens", data.max_source_tokens),
        ("data.max_target_tokens", data.max_target_tokens),
    ] {
        f.require(
            tokens >= 2,
            key,
            format_args!("is {tokens}, but each text ends with an end-of-sequence token, which counts"),
            "give at least 2",
        );
    }
    f.require(data.holdout_every != 1, "data.holdout_every", "holds out every pair", "give 0 or at least 2");
}
