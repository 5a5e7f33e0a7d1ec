//! `config.json` of a pi0 or pi0.5 policy, as checked values, the sizes that only its tensors have, and the
//! table of those that were published.
//!
//! Keys whose other values LeRobot has and this project has not are refused by name.

use std::path::Path;

use coxswain_models::{
    joint::{JointOutline, LayerKind, StreamShape, outline::NamedShape},
    pretrained::{checkpoint::Checkpoint, error::ModelError, fields::Fields, location::FileLocation},
};

use super::{
    names::{EXPERT_AT, EXPERT_HEAD, PiKind, VLM},
    prompt::{told, told_tokens},
};
use crate::{
    directory::{PI0, PolicyDirectory},
    features::PolicyFeatures,
    policy::PolicySizes,
    processors::ReadProcessors,
    projections::{self, NamedLinear, tensors_of},
    prompts::{Wording, line},
    state_suffix::StateForm,
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
/// Steps of the processor behind the policy that are read.
const BEHIND: &[&str] = &["unnormalizer_processor", "absolute_actions_processor", "device_processor"];
/// Steps of the processor before the policy that are read.
const BEFORE: [&str; 6] = [
    "rename_observations_processor",
    "to_batch_processor",
    "relative_actions_processor",
    "normalizer_processor",
    "tokenizer_processor",
    "device_processor",
];
/// And the step that is a policy's own.
const fn steps(own: &'static str) -> [&'static str; 7] {
    let [rename, batch, relative, normalizer, tokenizer, device] = BEFORE;
    [rename, batch, relative, normalizer, own, tokenizer, device]
}
const OF_PI0: [&str; 7] = steps("pi0_new_line_processor");
const OF_PI05: [&str; 7] = steps("pi05_prepare_state_tokenizer_processor_step");

/// Such a policy's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct PiConfig {
    /// Which it is of.
    pub kind: PiKind,
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
    pub fn from_directory(directory: &PolicyDirectory) -> Result<Self, ModelError> {
        let fields = directory.fields()?;
        refuse_others(&fields)?;
        let (kind, own, most) = match directory.kind() {
            PI0 => (PiKind::Pi0, &OF_PI0, 48),
            _ => (PiKind::Pi05, &OF_PI05, 200),
        };
        ReadProcessors { steps: [own, BEHIND], modes: &["QUANTILES", "MEAN_STD"] }.check(directory)?;
        let number =
            |key: &str, otherwise: usize| Ok::<_, ModelError>(fields.uint(key)?.unwrap_or(otherwise));
        let factor =
            |key: &str, otherwise: f64| Ok::<_, ModelError>(fields.positive(key)?.unwrap_or(otherwise));
        Ok(Self {
            kind,
            features: PolicyFeatures::from_directory(directory, "num_inference_steps", true)?,
            image: side(&fields)?,
            most_tokens: number("tokenizer_max_length", most)?,
            periods: [factor("min_period", 4e-3)?, factor("max_period", 4.0)?],
            expert: expert_sizes(&directory.dir, kind, &fields)?,
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
        (if self.kind == PiKind::Pi0 { line } else { told }, self.most_tokens)
    }

    /// About how many tokens a prompt has beside its task, with so many values of a state, at most.
    pub(crate) fn told_tokens(&self, state: usize) -> usize {
        if self.kind == PiKind::Pi0 { 0 } else { told_tokens(state).min(self.most_tokens) }
    }

    /// Every tensor that the policy has beside such a vision-language model: the expert, whose head nothing
    /// reads, and the projections.
    pub fn own_tensors(&self, vlm: &JointOutline) -> Vec<NamedShape> {
        let (shape, told) = (self.expert(&vlm.layer), self.kind == PiKind::Pi05);
        let e = shape.width;
        // A norm that is told the time has a linear in the place of its gain.
        let norm = |at: String| match told {
            true => {
                vec![
                    (format!("{at}.dense.weight"), vec![3 * e, e]),
                    (format!("{at}.dense.bias"), vec![3 * e]),
                ]
            }
            false => vec![(format!("{at}.weight"), vec![e])],
        };
        let layers = (0..vlm.layers).flat_map(|layer| {
            let at = format!("{EXPERT_AT}.layers.{layer}");
            let linears = shape.tensors(&at).into_iter();
            let linears = linears.filter(|(name, _)| !name.ends_with("layernorm.weight"));
            let norms = ["input_layernorm", "post_attention_layernorm"];
            linears.chain(norms.map(|name| norm(format!("{at}.{name}"))).concat())
        });
        let head = (format!("{EXPERT_HEAD}.weight"), vec![vlm.vocab_size, e]);
        let linears = match self.kind {
            PiKind::Pi0 => projections::linears(self.features.padded, e, e).to_vec(),
            PiKind::Pi05 => self.told_linears().to_vec(),
        };
        layers.chain(norm(format!("{EXPERT_AT}.norm"))).chain([head]).chain(tensors_of(&linears)).collect()
    }

    /// How pi0 goes on behind the prefix.
    pub(super) fn form(&self) -> StateForm {
        StateForm {
            features: self.features.clone(),
            expert: EXPERT_AT,
            kind: LayerKind::Gemma,
            state_in_vlm: false,
            joint_every: 1,
            causal: false,
            scaled: false,
            periods: self.periods,
        }
    }

    /// pi0.5's projections of actions and of the time that norms are told.
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
        Some(found) => Err(fields.error("image_resolution", format!("{found:?}; expected two equal sides"))),
    }
}

/// Sizes by the file's header, or, where there is no file, by the named variant: plans are made without.
fn expert_sizes(dir: &Path, kind: PiKind, fields: &Fields<'_>) -> Result<ExpertSizes, ModelError> {
    let named = fields.str("action_expert_variant")?.unwrap_or(VARIANTS[0].0);
    let Some((_, published)) = VARIANTS.into_iter().find(|(name, _)| *name == named) else {
        let known = VARIANTS.map(|(name, _)| name).join(" and ");
        return Err(fields.error("action_expert_variant", format!("{named:?}; supported are {known}")));
    };
    let gate = format!("{EXPERT_AT}.layers.0.mlp.gate_proj.weight");
    let checkpoint = Checkpoint::open(dir, kind.rules()).ok();
    let stored = checkpoint.as_ref().and_then(|checkpoint| checkpoint.stored(&gate).ok());
    Ok(match stored.map(|(_, shape, _)| shape) {
        Some(&[inner, width]) => ExpertSizes { width, inner },
        _ => published,
    })
}
