//! `config.json` of a SmolVLA policy, as checked values, and the sizes that only its tensors have.
//!
//! Keys whose other values LeRobot has and this project has not are refused by name.

use coxswain_models::{
    joint::{JointOutline, LayerKind, StreamShape, outline::NamedShape},
    pretrained::{error::ModelError, fields::Fields, location::FileLocation},
};
use serde_json::Value;

use super::names::{EXPERT_AT, VLM};
use crate::{
    directory::PolicyDirectory,
    features::PolicyFeatures,
    policy::PolicySizes,
    processors::ReadProcessors,
    projections::{self, tensors_of},
    state_suffix::{StateForm, is_joint},
};

/// What is done to the expert's MLP without a tensor to look at: `ffn_dim_multiplier`, in LeRobot's words.
const MULTIPLE: usize = 256;

/// What is read of the processors.
const READ: ReadProcessors = ReadProcessors {
    steps: [
        &[
            "rename_observations_processor",
            "to_batch_processor",
            "smolvla_new_line_processor",
            "tokenizer_processor",
            "device_processor",
            "normalizer_processor",
        ],
        &["unnormalizer_processor", "device_processor"],
    ],
    modes: &["MEAN_STD"],
};

/// A SmolVLA policy's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct SmolVlaConfig {
    /// The name of its vision-language model on the hub.
    pub vlm: String,
    pub(super) features: PolicyFeatures,
    /// Cameras that may be absent.
    pub empty_cameras: usize,
    /// Width and height of images.
    pub image: [usize; 2],
    /// Tokens of a prompt that are kept.
    pub most_tokens: usize,
    /// Layers of the language model; all if none.
    pub layers: Option<usize>,
    /// Every so many layers, from the first on, the expert attends jointly; it never does if 0.
    pub joint_every: usize,
    /// The expert's width, relative to the language model's.
    pub width_factor: f64,
    /// Shortest and longest period of the time's sinusoids.
    pub periods: [f64; 2],
    /// What trains beside the expert where the run does not say it.
    pub trains: DefaultTraining,
}

/// What a policy's configuration lets train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefaultTraining {
    /// `state_proj`.
    pub state: bool,
    /// The language model and the connector.
    pub vlm: bool,
}

impl SmolVlaConfig {
    /// Checks the configuration of a policy directory.
    pub fn from_directory(directory: &PolicyDirectory) -> Result<Self, ModelError> {
        let fields = directory.fields()?;
        refuse_others(&fields)?;
        let number =
            |key: &str, otherwise: usize| Ok::<_, ModelError>(fields.uint(key)?.unwrap_or(otherwise));
        let factor =
            |key: &str, otherwise: f64| Ok::<_, ModelError>(fields.positive(key)?.unwrap_or(otherwise));
        Ok(Self {
            vlm: fields.str("vlm_model_name")?.unwrap_or("HuggingFaceTB/SmolVLM2-500M-Video-Instruct").into(),
            features: PolicyFeatures::from_directory(directory, "num_steps", false)?,
            empty_cameras: number("empty_cameras", 0)?,
            image: sides(&fields)?,
            most_tokens: number("tokenizer_max_length", 48)?,
            layers: layers(&fields)?,
            joint_every: every(&fields)?,
            width_factor: factor("expert_width_multiplier", 0.75)?,
            periods: [factor("min_period", 4e-3)?, factor("max_period", 4.0)?],
            trains: DefaultTraining {
                state: fields.bool("train_state_proj")?.unwrap_or(true),
                vlm: fields.bool("train_expert_only")? == Some(false),
            },
        })
    }

    /// Refuses processors with steps that are not known here, or by which values would be normalised in
    /// another way; and a directory that has none.
    pub fn check_processors(directory: &PolicyDirectory) -> Result<(), ModelError> {
        READ.check(directory)
    }

    /// What it says of samples.
    pub(crate) fn sizes(&self) -> PolicySizes<'_> {
        self.features.sizes()
    }

    /// How it goes on behind the prefix.
    pub(crate) fn form(&self) -> StateForm {
        StateForm {
            features: self.features.clone(),
            expert: EXPERT_AT,
            kind: LayerKind::Llama,
            state_in_vlm: true,
            joint_every: self.joint_every,
            causal: true,
            scaled: true,
            periods: self.periods,
        }
    }

    /// The part of the language model that lies in the policy's file.
    pub fn within(&self) -> FileLocation<'static> {
        FileLocation { prefix: VLM.model, layers: self.layers }
    }

    /// Sizes of the expert's layer of this number beside such a language model. `inner`: of its MLP; by
    /// LeRobot's rule if none.
    pub fn expert(&self, vlm: &StreamShape, layer: usize, inner: Option<usize>) -> StreamShape {
        let width = (vlm.width as f64 * self.width_factor) as usize;
        let inner = inner.unwrap_or_else(|| (4 * (2 * width / 3)).next_multiple_of(MULTIPLE));
        let kv_inputs = if is_joint(self.joint_every, layer) { width } else { vlm.kv_width() };
        StreamShape { width, inner, kv_inputs, ..*vlm }
    }

    /// Every tensor that LeRobot trains by default beside such a language model: the expert and the
    /// projections.
    pub fn own_tensors(&self, vlm: &JointOutline, inner: Option<usize>) -> Vec<NamedShape> {
        let e = self.expert(&vlm.layer, 0, inner).width;
        let layers = (0..vlm.layers).flat_map(|layer| {
            self.expert(&vlm.layer, layer, inner).tensors(&format!("{EXPERT_AT}.layers.{layer}"))
        });
        let norm = (format!("{EXPERT_AT}.norm.weight"), vec![e]);
        let linears = projections::linears(self.features.padded, vlm.layer.width, e);
        layers.chain([norm]).chain(tensors_of(&linears)).collect()
    }
}

/// Keys of which one value alone is read.
fn refuse_others(fields: &Fields<'_>) -> Result<(), ModelError> {
    fields.expect_str("attention_mode", "cross_attn")?;
    for key in ["adapt_to_pi_aloha", "use_delta_joint_actions_aloha", "add_image_special_tokens"] {
        if fields.bool(key)? == Some(true) {
            return Err(fields.error(key, "true, which is not supported"));
        }
    }
    if fields.bool("train_expert_only")? == Some(false)
        && fields.bool("freeze_vision_encoder")? == Some(false)
    {
        return Err(
            fields.error("freeze_vision_encoder", "false; training the vision tower is not supported")
        );
    }
    Ok(())
}

fn sides(fields: &Fields<'_>) -> Result<[usize; 2], ModelError> {
    match fields.uints("resize_imgs_with_padding")?.as_deref() {
        None => Err(fields.error("resize_imgs_with_padding", "null is not supported; give width and height")),
        Some(&[width, height]) if width == height && width > 0 => Ok([width, height]),
        Some(found) => {
            Err(fields.error("resize_imgs_with_padding", format!("{found:?}; expected two equal sides")))
        }
    }
}

/// `num_vlm_layers`, where -1 means all; the expert must have as many.
fn layers(fields: &Fields<'_>) -> Result<Option<usize>, ModelError> {
    let signed = |key: &str| fields.get(key).and_then(Value::as_i64).filter(|layers| *layers > 0);
    let layers = signed("num_vlm_layers").and_then(|layers| usize::try_from(layers).ok());
    let own = signed("num_expert_layers").and_then(|layers| usize::try_from(layers).ok());
    if own.is_some_and(|own| Some(own) != layers) {
        return Err(fields.error(
            "num_expert_layers",
            "the expert must have as many layers as the language model (num_vlm_layers)",
        ));
    }
    Ok(layers)
}

/// `self_attn_every_n_layers`, where nothing above 0 means never.
fn every(fields: &Fields<'_>) -> Result<usize, ModelError> {
    let key = "self_attn_every_n_layers";
    let Some(value) = fields.get(key) else { return Ok(2) };
    let number =
        value.as_i64().ok_or_else(|| fields.error(key, format!("{value}; expected a whole number")))?;
    Ok(usize::try_from(number).unwrap_or(0))
}
