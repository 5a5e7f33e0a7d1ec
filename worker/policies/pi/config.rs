//! `config.json` of a pi0.5 policy, as checked values, the sizes that only its tensors have, and the table of
//! those that were published.
//!
//! Keys whose other values LeRobot has and this project has not are refused by name.

use std::path::Path;

use coxswain_models::{
    joint::{FileLocation, JointOutline, StreamShape, outline::NamedShape},
    pretrained::{checkpoint::Checkpoint, error::ModelError, fields::Fields},
};

use super::{
    names::{EXPERT_AT, EXPERT_HEAD, RULES, VLM},
    prompt::{told, told_tokens},
};
use crate::{
    directory::PolicyDirectory,
    features::PolicyFeatures,
    policy::PolicySizes,
    processors::ReadProcessors,
    projections::{NamedLinear, tensors_of},
    prompts::Wording,
};

/// Where tokenizer and configuration of its model are, on the hub. Access has to be asked for there.
pub const PALIGEMMA: &str = concat!("google/", "paligemma-3b-pt-224");
/// openpi's variants of Gemma as experts: width, and width of the MLP.
const VARIANTS: [(&str, ExpertSizes); 2] = [
    ("gemma_300m", ExpertSizes { width: 1024, inner: 4096 }),
    ("gemma_2b", ExpertSizes { width: 2048, inner: 16_384 }),
];
/// Keys of which openpi's value alone is read: the draw of times, `0.999 Beta(1.5, 1) + 0.001`.
const DRAW: [(&str, f64); 4] = [
    ("time_sampling_beta_alpha", 1.5),
    ("time_sampling_beta_beta", 1.0),
    ("time_sampling_scale", 0.999),
    ("time_sampling_offset", 0.001),
];
/// What is read of the processors.
const READ: ReadProcessors = ReadProcessors {
    steps: [
        &[
            "rename_observations_processor",
            "to_batch_processor",
            "relative_actions_processor",
            "normalizer_processor",
            "pi05_prepare_state_tokenizer_processor_step",
            "tokenizer_processor",
            "device_processor",
        ],
        &["unnormalizer_processor", "absolute_actions_processor", "device_processor"],
    ],
    modes: &["QUANTILES", "MEAN_STD"],
};

/// A pi0.5 policy's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct PiConfig {
    pub(super) features: PolicyFeatures,
    /// Side of images.
    pub image: usize,
    /// Tokens of a prompt that are kept.
    pub most_tokens: usize,
    /// Shortest and longest period of the time's sinusoids.
    pub periods: [f64; 2],
    expert: ExpertSizes,
}

/// Sizes of the expert that are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExpertSizes {
    width: usize,
    inner: usize,
}

impl PiConfig {
    /// Checks the configuration of a policy directory, and its processors.
    pub fn of(directory: &PolicyDirectory) -> Result<Self, ModelError> {
        let fields = directory.fields()?;
        refuse_others(&fields)?;
        READ.check(directory)?;
        let number =
            |key: &str, otherwise: usize| Ok::<_, ModelError>(fields.uint(key)?.unwrap_or(otherwise));
        let factor =
            |key: &str, otherwise: f64| Ok::<_, ModelError>(fields.positive(key)?.unwrap_or(otherwise));
        Ok(Self {
            features: PolicyFeatures::of(directory, "num_inference_steps", true)?,
            image: side(&fields)?,
            most_tokens: number("tokenizer_max_length", 200)?,
            periods: [factor("min_period", 4e-3)?, factor("max_period", 4.0)?],
            expert: expert_sizes(&directory.dir, &fields)?,
        })
    }

    /// What it says of samples.
    pub fn sizes(&self) -> PolicySizes<'_> {
        self.features.sizes()
    }

    /// The part of the vision-language model that lies in the policy's file: all of it.
    pub fn within() -> FileLocation<'static> {
        FileLocation { prefix: VLM.model, layers: None }
    }

    /// Sizes of the expert's layers beside such a language model.
    pub fn expert(&self, vlm: &StreamShape) -> StreamShape {
        let ExpertSizes { width, inner } = self.expert;
        StreamShape { width, inner, kv_inputs: width, ..*vlm }
    }

    /// The text of its prompts, and how many tokens of it are kept.
    pub(crate) fn wording(&self) -> (Wording, usize) {
        (told, self.most_tokens)
    }

    /// About how many tokens a prompt has beside its task, with so many values of a state, at most.
    pub(crate) fn told_tokens(&self, state: usize) -> usize {
        told_tokens(state).min(self.most_tokens)
    }

    /// Every tensor that the policy has beside such a vision-language model: the expert, whose head nothing
    /// reads, and the projections.
    pub fn own_tensors(&self, vlm: &JointOutline) -> Vec<NamedShape> {
        let shape = self.expert(&vlm.layer);
        let e = shape.width;
        let dense = |at: String| {
            [(format!("{at}.dense.weight"), vec![3 * e, e]), (format!("{at}.dense.bias"), vec![3 * e])]
        };
        let layers = (0..vlm.layers).flat_map(|layer| {
            let at = format!("{EXPERT_AT}.layers.{layer}");
            let linears = shape.tensors(&at).into_iter();
            let linears = linears.filter(|(name, _)| !name.ends_with("layernorm.weight"));
            let norms = ["input_layernorm", "post_attention_layernorm"];
            linears.chain(norms.map(|norm| dense(format!("{at}.{norm}"))).concat())
        });
        let head = (format!("{EXPERT_HEAD}.weight"), vec![vlm.vocab_size, e]);
        let linears = self.told_linears();
        layers.chain(dense(format!("{EXPERT_AT}.norm"))).chain([head]).chain(tensors_of(&linears)).collect()
    }

    /// Projections of actions and of the time that norms are told.
    pub(super) fn told_linears(&self) -> [NamedLinear; 4] {
        let (e, [_, action]) = (self.expert.width, self.features.padded);
        [
            ("model.action_in_proj", [action, e]),
            ("model.action_out_proj", [e, action]),
            ("model.time_mlp_in", [e, e]),
            ("model.time_mlp_out", [e, e]),
        ]
    }
}

/// Keys of which one value alone is read.
fn refuse_others(fields: &Fields<'_>) -> Result<(), ModelError> {
    fields.expect_str("paligemma_variant", "gemma_2b")?;
    if fields.bool("use_relative_actions")? == Some(true) {
        return Err(fields.error("use_relative_actions", "true, which is not supported"));
    }
    for (key, read) in DRAW {
        if let Some(other) = fields.positive(key)?.filter(|value| *value != read) {
            return Err(fields.error(key, format!("{other}; only {read} is supported")));
        }
    }
    Ok(())
}

fn side(fields: &Fields<'_>) -> Result<usize, ModelError> {
    match fields.uints("image_resolution")?.as_deref() {
        None => Ok(224),
        Some(&[height, width]) if height == width && height > 0 => Ok(height),
        found => Err(fields.error("image_resolution", format!("{found:?}; expected two equal sides"))),
    }
}

/// Those of the file's header; of the variant that is named, where there is no file: plans are made without.
fn expert_sizes(dir: &Path, fields: &Fields<'_>) -> Result<ExpertSizes, ModelError> {
    let named = fields.str("action_expert_variant")?.unwrap_or(VARIANTS[0].0);
    let Some((_, published)) = VARIANTS.into_iter().find(|(name, _)| *name == named) else {
        let known = VARIANTS.map(|(name, _)| name).join(" and ");
        return Err(fields.error("action_expert_variant", format!("{named:?}; supported are {known}")));
    };
    let gate = format!("{EXPERT_AT}.layers.0.mlp.gate_proj.weight");
    let checkpoint = Checkpoint::open(dir, RULES).ok();
    let stored = checkpoint.as_ref().and_then(|checkpoint| checkpoint.stored(&gate).ok());
    Ok(match stored.map(|(_, shape, _)| shape) {
        Some(&[inner, width]) => ExpertSizes { width, inner },
        _ => published,
    })
}
