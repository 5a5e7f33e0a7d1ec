//! The keys of the task `sft`.

use coxswain_models::pretrained::settings::{Model, check_blocks};
use coxswain_nn::lora::Lora;
use coxswain_proto::{
    config::{
        Findings, SettingsError, TaskSchema, TaskSettings,
        bounds::{ABOVE_ZERO, Bounds, COUNT, NO_MOST, RANK, SIZE},
    },
    identity::{
        Class::{Base, Learned, LearnedInOrder, LearnedSince, Outside},
        Classes,
    },
    run_spec::RunSpec,
};
use serde::{Deserialize, Serialize};

use crate::settings::{check_texts, check_trained};

/// The keys' schema.
pub const SCHEMA: TaskSchema = TaskSchema::of::<SftSettings>();

/// The task's keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SftSettings {
    /// The pretrained vision-language model.
    pub model: Model,
    /// Low-rank adapters; absent means that only what `model.train` names trains.
    #[serde(default)]
    pub lora: Option<Lora>,
    /// How samples are read from chats.
    #[serde(default)]
    pub data: ChatData,
    /// Learning rates.
    #[serde(default)]
    pub optimizer: SftOptimizer,
}

/// How samples are read from chats. `data.path`, the engine's key, is a JSONL file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChatData {
    /// Where the paths of images begin; the directory of the JSONL file if absent.
    pub images: Option<String>,
    /// Tokens of a sample, images included; what is beyond them is cut off.
    pub max_tokens: usize,
    /// One of so many chats is held out; 0: none.
    pub holdout_every: u64,
    /// Bounds of an image's pixels after `smart_resize`; the checkpoint's own when absent. An upper bound is
    /// always applied.
    pub min_pixels: Option<usize>,
    /// See `min_pixels`.
    pub max_pixels: Option<usize>,
}

impl Default for ChatData {
    fn default() -> Self {
        Self { images: None, max_tokens: 4096, holdout_every: 0, min_pixels: None, max_pixels: None }
    }
}

/// The task's part of the section `optimizer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SftOptimizer {
    /// Peak learning rate of each group of trainables.
    pub lr: Rates,
}

/// By the group's name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rates {
    /// LoRA matrices.
    pub lora: f64,
    /// What of the model trains in full (`model.train`).
    pub base: f64,
}

impl Default for Rates {
    fn default() -> Self {
        Self { lora: 1e-4, base: 1e-5 }
    }
}

impl SftSettings {
    /// The settings of a specification; refused if they are another task's, or of other types. Their rules
    /// are the schema's to check.
    pub fn from_spec(spec: &RunSpec) -> Result<Self, SettingsError> {
        spec.settings()
    }
}

impl TaskSettings for SftSettings {
    const TYPE: &'static str = "sft";

    const IDENTITY: &'static Classes = &[
        ("model.path", Base),
        ("model.backbone", Outside("where a policy's model is stored, not which model it is")),
        ("model.weights_dtype", Learned),
        ("model.activations_dtype", Learned),
        ("model.train", LearnedSince("[]")),
        ("lora.rank", Learned),
        ("lora.alpha", Learned),
        ("lora.rslora", Learned),
        ("lora.targets", Learned),
        ("lora.rank_pattern", LearnedInOrder),
        ("lora.alpha_pattern", LearnedInOrder),
        ("lora.dropout", Learned),
        ("lora.use_dora", LearnedSince("false")),
        ("lora.bias", LearnedSince("\"none\"")),
        ("lora.exclude_modules", Learned),
        ("lora.layers_to_transform", Learned),
        ("lora.layers_pattern", Learned),
        ("lora.init_from", Learned),
        ("data.images", Learned),
        ("data.max_tokens", Learned),
        ("data.holdout_every", Learned),
        ("data.min_pixels", Learned),
        ("data.max_pixels", Learned),
        ("optimizer.lr.lora", Learned),
        ("optimizer.lr.base", LearnedSince("1e-5")),
    ];

    const BOUNDS: &'static Bounds = &[
        ("lora.rank", 1.0, RANK),
        ("lora.alpha", ABOVE_ZERO, 1e9),
        ("lora.rank_pattern", 1.0, RANK),
        ("lora.alpha_pattern", ABOVE_ZERO, 1e9),
        ("lora.dropout", 0.0, 1.0),
        ("lora.layers_to_transform", 0.0, SIZE),
        ("data.max_tokens", 2.0, 16_777_216.0),
        ("data.holdout_every", 0.0, COUNT),
        ("data.min_pixels", 1.0, 2_147_483_648.0),
        ("data.max_pixels", 1.0, 2_147_483_648.0),
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
        }
        let Rates { lora, base } = self.optimizer.lr;
        check_trained(self.lora.as_ref(), &self.model.train, [lora, base], f);
        check_data(&self.data, f);
        check_blocks(spec, true, f);
        check_texts(spec, "chats", f);
    }
}

fn check_data(data: &ChatData, f: &mut Findings) {
    if let Some(images) = &data.images {
        f.named("data.images", images, "name the directory of the images or remove the key");
    }
    f.require(
        data.max_tokens >= 2,
        "data.max_tokens",
        format_args!(
            "is {}, but at least two tokens are needed: each is predicted from the one before it",
            data.max_tokens
        ),
        "give at least 2",
    );
    f.require(data.holdout_every != 1, "data.holdout_every", "holds out every chat", "give 0 or at least 2");
    f.at_least_one("data.min_pixels", data.min_pixels.unwrap_or(1));
    f.at_least_one("data.max_pixels", data.max_pixels.unwrap_or(1));
    if let (Some(min), Some(max)) = (data.min_pixels, data.max_pixels) {
        f.require(
            min <= max,
            "data.min_pixels",
            format_args!("{min} is above `data.max_pixels` ({max})"),
            "swap them or remove one",
        );
    }
}
