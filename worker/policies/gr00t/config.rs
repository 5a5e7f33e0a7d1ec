//! `config.json` of a policy of type `groot`, the steps of its processors, and the configuration of the
//! model that it is made of, as checked sizes.
//!
//! The policy's directory names that model (`base_model_path`) and has none of its sizes. They are read from
//! its own `config.json`, in a directory or in Hugging Face's cache; without one they are those of N1.7 as
//! it is published. What is not read is refused by key.

use std::path::{Path, PathBuf};

use coxswain_data::{DataError, place::hub};
use coxswain_models::{
    joint::{JointOutline, StreamShape},
    pretrained::{config_file, error::ModelError, fields::Fields, location::FileLocation},
    vision_language::{ModelOutline, PromptEncoder, PromptForm},
};
use serde_json::{Value, json};

use super::{
    images::{Gr00tImages, ImageGeometry},
    names::within,
    prompt::{Gr00tPrompts, PromptModel},
    steps::PackedInputs,
};
use crate::{
    directory::PolicyDirectory,
    features::PolicyFeatures,
    images::PolicyImages,
    policy::{NoiseEnd, PolicySizes},
};

/// The model whose configuration and tokenizer the backbone has.
pub const BACKBONE: &str = "nvidia/Cosmos-Reason2-2B";
/// As the model's own configuration calls it.
pub(super) const MODEL_TYPE: &str = "Gr00tN1d7";
/// Keys of the model of which one value alone is read, which is the default.
const FIXED: [(&str, f64); 6] = [
    ("state_history_length", 1.0),
    ("noise_beta_alpha", 1.5),
    ("noise_beta_beta", 1.0),
    ("noise_s", 0.999),
    ("num_timestep_buckets", 1000.0),
    ("num_timesteps", 1000.0),
];
/// Keys that have to be true.
const ON: [&str; 3] = ["add_pos_embed", "use_vlln", "use_alternate_vl_dit"];

/// Such a policy's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Gr00tConfig {
    pub(super) features: PolicyFeatures,
    pub(super) head: HeadSizes,
    /// Decoder layers of the language model that are there.
    pub(super) layers: usize,
    pub(super) trains: TrainedParts,
    pub(super) dropout: DropoutRates,
    pub(super) images: ImageGeometry,
    /// Whether tasks are told in small letters, without punctuation.
    pub(super) plain_text: bool,
}

/// Sizes of what stands behind the vision-language model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadSizes {
    /// Width of the hidden states that it reads.
    pub context: usize,
    /// Layers of self-attention on them.
    pub vl_layers: usize,
    pub vl_heads: usize,
    /// Width of its tokens.
    pub width: usize,
    pub blocks: usize,
    pub heads: usize,
    /// Every so many blocks that read the hidden states, one reads those of the text; the others read those
    /// of images.
    pub text_every: usize,
    /// Width of the encoders by embodiment, and of what the decoder reads.
    pub hidden: usize,
    /// Rows of the table of positions.
    pub positions: usize,
    /// Embodiments that there are weights for, and the one that is meant.
    pub embodiments: usize,
    pub embodiment: usize,
    /// What states and actions are padded to.
    pub padded: [usize; 2],
    pub chunk: usize,
}

/// What trains by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TrainedParts {
    pub projector: bool,
    pub blocks: bool,
    pub vl: bool,
    pub language: bool,
    pub vision: bool,
    /// So many of the last layers of the language model.
    pub top_layers: usize,
}

/// What is dropped in training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DropoutRates {
    /// Rate for what blocks add, and for their MLPs.
    pub blocks: f64,
    /// Rate for the layers on hidden states.
    pub vl: f64,
    /// Rate for tokens of states, each as a whole.
    pub state: f64,
}

impl DropoutRates {
    /// Whether anything is dropped.
    pub fn any(self) -> bool {
        self.blocks > 0.0 || self.vl > 0.0 || self.state > 0.0
    }
}

impl Gr00tConfig {
    /// Checks the configuration of a policy directory, its processors, and the model's own configuration.
    pub fn from_directory(directory: &PolicyDirectory) -> Result<Self, ModelError> {
        let fields = directory.fields()?;
        if fields.bool("use_relative_actions")? == Some(true) {
            return Err(fields.error("use_relative_actions", "true, which is not supported"));
        }
        let (path, json) = base_config(directory, &fields)?;
        let base = Fields::new(&path, &json)?;
        check_base(&base)?;
        let mut features = PolicyFeatures::from_directory(directory, "num_inference_timesteps", false)?;
        if fields.uint("num_inference_timesteps")?.is_none() {
            features.steps = number(&base, "num_inference_timesteps", 4)?.max(1);
        }
        (features.noise, features.blanks_padding) = (NoiseEnd::Zero, true);
        let agree = |key: &str, base_key: &str, own: usize, of_base: usize| match own == of_base {
            true => Ok(()),
            false => {
                Err(fields.error(key, format!("{own}, but `{base_key}` in {} is {of_base}", path.display())))
            }
        };
        agree("chunk_size", "action_horizon", features.chunk, number(&base, "action_horizon", 40)?)?;
        agree("max_state_dim", "max_state_dim", features.padded[0], number(&base, "max_state_dim", 132)?)?;
        agree("max_action_dim", "max_action_dim", features.padded[1], number(&base, "max_action_dim", 132)?)?;
        let packed = PackedInputs::from_directory(directory, &mut features)?;
        let head = head_sizes(&base, &features, packed.embodiment)?;
        let flag = |key: &str, otherwise: bool| Ok::<_, ModelError>(fields.bool(key)?.unwrap_or(otherwise));
        let trains = TrainedParts {
            projector: flag("tune_projector", true)?,
            blocks: flag("tune_diffusion_model", true)?,
            vl: flag("tune_vlln", true)?,
            language: flag("tune_llm", false)?,
            vision: flag("tune_visual", false)?,
            top_layers: fields.uint("tune_top_llm_layers")?.unwrap_or(0),
        };
        let rate = |within: &str| -> Result<f64, ModelError> { dropout(&base, within) };
        let blocks = if trains.blocks { rate("diffusion_model_cfg")? } else { 0.0 };
        let vl = if trains.vl { rate("vl_self_attention_cfg")? } else { 0.0 };
        let state = base.get("state_dropout_prob").and_then(Value::as_f64).unwrap_or(0.2);
        let dropout = DropoutRates { blocks, vl, state };
        features.drops = dropout.any();
        let layers = number(&base, "select_layer", 16)?;
        let (images, plain_text) = (packed.images, packed.plain_text);
        Ok(Self { features, head, layers, trains, dropout, images, plain_text })
    }

    /// What it says of samples.
    pub fn sizes(&self) -> PolicySizes<'_> {
        self.features.sizes()
    }

    /// Where the vision-language model lies in the file.
    pub fn within(&self) -> FileLocation<'static> {
        within(self.layers)
    }

    /// The outline of the vision-language model in `backbone`, which has to fit such a policy. Of its layers
    /// nothing is told but their width: it is run as a whole.
    pub(crate) fn outline(&self, model: ModelOutline, backbone: &Path) -> Result<JointOutline, ModelError> {
        let (width, layers) = (self.head.context, self.layers);
        if model.hidden_size == width && model.layers == layers {
            let layer = StreamShape {
                width,
                heads: self.head.heads,
                kv_heads: self.head.heads,
                head_dim: 0,
                inner: 0,
                kv_inputs: width,
                eps: 0.0,
            };
            return Ok(JointOutline {
                layer,
                layers,
                vocab_size: model.vocab_size,
                image_token: model.tokens.image,
                image_side: self.images.target,
                patches: model.patches,
                tensors: Vec::new(),
                modules: model.modules,
            });
        }
        let problem = format!(
            "{} layers of width {}; the policy needs at least {layers} layers of width {width}",
            model.layers, model.hidden_size
        );
        Err(ModelError::Config { path: backbone.join("config.json"), field: "text_config".into(), problem })
    }

    /// Pictures to its input, with the processor in `backbone`.
    pub(crate) fn pictures(
        &self,
        backbone: &Path,
        vlm: &JointOutline,
    ) -> Result<Box<dyn PolicyImages>, DataError> {
        Ok(Box::new(Gr00tImages::from_backbone(backbone, self.images, vlm.patches)?))
    }

    /// Tasks to ids, with the tokenizer in `backbone`.
    pub(crate) fn prompts(
        &self,
        backbone: &Path,
        vlm: &JointOutline,
        form: &PromptForm<'_>,
    ) -> Result<Box<dyn PromptEncoder>, DataError> {
        let JointOutline { image_token: image, vocab_size: vocab, patches, .. } = *vlm;
        let model = PromptModel { image, vocab, patches, plain_text: self.plain_text };
        Ok(Box::new(Gr00tPrompts::from_backbone(backbone, model, form)?))
    }
}

/// A size; the published one where nothing is said.
pub(super) fn number(fields: &Fields<'_>, key: &str, otherwise: usize) -> Result<usize, ModelError> {
    Ok(fields.uint(key)?.unwrap_or(otherwise))
}

/// The model's own configuration and where it is; an empty one, beside the policy's, if it is nowhere.
fn base_config(directory: &PolicyDirectory, fields: &Fields<'_>) -> Result<(PathBuf, Value), ModelError> {
    let named = fields.str("base_model_path")?.unwrap_or("nvidia/GR00T-N1.7-3B");
    let dir = if Path::new(named).is_dir() { Some(PathBuf::from(named)) } else { hub::model(named).0 };
    match dir.filter(|dir| dir.join("config.json").is_file()) {
        Some(dir) => config_file::read(&dir),
        None => Ok((directory.path.clone(), json!({}))),
    }
}

/// Refuses what is not read of the model's configuration.
pub(super) fn check_base(base: &Fields<'_>) -> Result<(), ModelError> {
    base.expect_str("model_type", MODEL_TYPE)?;
    for (key, read) in FIXED {
        if let Some(other) = base.positive(key)?.filter(|value| *value != read) {
            return Err(base.error(key, format!("{other}; only {read} is supported")));
        }
    }
    for key in ON {
        if base.bool(key)? == Some(false) {
            return Err(base.error(key, "false, which is not supported"));
        }
    }
    let Some(blocks) = base.object("diffusion_model_cfg")? else { return Ok(()) };
    blocks.expect_str("norm_type", "ada_norm")?;
    if blocks.bool("interleave_self_attention")? != Some(true) {
        return Err(blocks.error("interleave_self_attention", "only true is supported"));
    }
    for fields in [Some(blocks), base.object("vl_self_attention_cfg")?].into_iter().flatten() {
        if fields.get("positional_embeddings").is_some() {
            return Err(fields.error("positional_embeddings", "only null is supported"));
        }
        if fields.bool("final_dropout")? == Some(false) {
            return Err(fields.error("final_dropout", "false, which is not supported"));
        }
    }
    Ok(())
}

/// Sizes; the published ones where the model's configuration says nothing.
fn head_sizes(
    base: &Fields<'_>,
    features: &PolicyFeatures,
    embodiment: usize,
) -> Result<HeadSizes, ModelError> {
    let of = |within: &str, published: [usize; 3]| -> Result<[usize; 3], ModelError> {
        let Some(fields) = base.object(within)? else { return Ok(published) };
        Ok([
            fields.size("num_layers")?,
            fields.size("num_attention_heads")?,
            fields.size("attention_head_dim")?,
        ])
    };
    let [blocks, heads, head_dim] = of("diffusion_model_cfg", [32, 32, 48])?;
    let [vl_layers, vl_heads, vl_head_dim] = of("vl_self_attention_cfg", [4, 32, 64])?;
    let (width, context) =
        (number(base, "input_embedding_dim", 1536)?, number(base, "backbone_embedding_dim", 2048)?);
    let hidden = number(base, "hidden_size", 1024)?;
    let out = match base.object("diffusion_model_cfg")? {
        Some(fields) => fields.size("output_dim")?,
        None => 1024,
    };
    for (key, found, wanted) in [
        ("input_embedding_dim", width, heads * head_dim),
        ("backbone_embedding_dim", context, vl_heads * vl_head_dim),
        ("hidden_size", hidden, out),
    ] {
        if found != wanted {
            return Err(base.error(key, format!("{found}, but the adjacent layer's width is {wanted}")));
        }
    }
    let embodiments = number(base, "max_num_embodiments", 32)?;
    if embodiment >= embodiments {
        let problem = format!("{embodiments}, but the policy's embodiment id is {embodiment}");
        return Err(base.error("max_num_embodiments", problem));
    }
    let positions = number(base, "max_seq_len", 1024)?;
    if features.chunk > positions {
        return Err(
            base.error("max_seq_len", format!("{positions}, but a chunk has {} actions", features.chunk))
        );
    }
    Ok(HeadSizes {
        context,
        vl_layers,
        vl_heads,
        width,
        blocks,
        heads,
        text_every: number(base, "attend_text_every_n_blocks", 2)?.max(1),
        hidden,
        positions,
        embodiments,
        embodiment,
        padded: features.padded,
        chunk: features.chunk,
    })
}

/// The fraction that layers drop; where their section does not say it, diffusers' own.
fn dropout(base: &Fields<'_>, within: &str) -> Result<f64, ModelError> {
    let Some(fields) = base.object(within)? else { return Ok(0.2) };
    let Some(found) = fields.get("dropout") else { return Ok(0.1) };
    let rate = found.as_f64().filter(|rate| (0.0..1.0).contains(rate));
    rate.ok_or_else(|| fields.error("dropout", format!("{found}; expected a number from 0 to below 1")))
}
