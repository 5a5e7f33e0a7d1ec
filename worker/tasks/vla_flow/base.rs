//! What a run starts from: a plain vision-language model, or a policy directory of LeRobot's, whose
//! images and prompts are made as the policy has them.

use std::path::{Path, PathBuf};

use coxswain_data::{DataError, NormMode};
use coxswain_models::{
    Shelf,
    joint::JointOutline,
    pretrained::{
        directory,
        error::ModelError,
        pictures::{ImageProcessor, PixelBounds},
    },
    vision_language::{PromptEncoder, PromptForm, VlFamily},
};
use coxswain_nn::{
    dtypes::ActivationsDtype,
    kernels::{Tape, sizes::Sizes},
};
use coxswain_policies::{
    backbone::{self, NamedIn},
    directory::{PolicyDirectory, is_policy},
    smolvla::{SmolVlaConfig, SmolVlaImages, SmolVlaPrompts},
};
use coxswain_proto::run_spec::{CacheMode, Offload, RunSpec, Shard};

use super::config::{Expert, VlaSettings};
use crate::settings::unread;

/// A policy directory that a run starts from.
#[derive(Clone, Debug)]
pub struct PolicyBase {
    /// The directory.
    pub directory: PolicyDirectory,
    /// Its configuration.
    pub config: SmolVlaConfig,
    /// The directory of its vision-language model.
    pub backbone: PathBuf,
    /// What that says.
    pub outline: JointOutline,
}

impl PolicyBase {
    /// That of a run; none if `model.path` is a plain model.
    pub fn of<B: Tape<Base = B>>(vla: &VlaSettings, models: Shelf<B>) -> Result<Option<Self>, ModelError> {
        let dir = Path::new(&vla.model.path);
        if !is_policy(dir) {
            return Ok(None);
        }
        let directory = PolicyDirectory::open(dir)?;
        let config = SmolVlaConfig::of(&directory)?;
        let given = vla.model.backbone.as_deref().map(Path::new);
        let named = NamedIn { path: &directory.path, field: "vlm_model_name", repository: &config.vlm };
        let backbone = backbone::find(given, named)?;
        let outline = models.joint.of(&backbone)?.outline(&backbone, config.within())?;
        Ok(Some(Self { directory, config, backbone, outline }))
    }

    /// What of a run's settings such a policy does not have; the key, and what is wrong with it.
    pub fn misfit(&self, vla: &VlaSettings, spec: &RunSpec) -> Option<(&'static str, String)> {
        let Self { config, .. } = self;
        let (chunk, cameras) = (config.chunk, config.cameras.len());
        let modes = vla.data.normalization;
        let not_yet = "is not there yet for a policy of LeRobot's; leave it out";
        let rules: [(bool, &'static str, String); 18] = [
            (vla.lora.is_none(), "lora", not_yet.into()),
            (vla.model.train.is_empty(), "model.train", not_yet.into()),
            (vla.data.sensor.is_none(), "data.sensor", not_yet.into()),
            (vla.data.sets.is_empty(), "data.sets", not_yet.into()),
            // What LeRobot would not do with the actions and images that it is given.
            (!vla.data.delta_actions.contains(&true), "data.delta_actions", not_yet.into()),
            (vla.data.action_stride == 1, "data.action_stride", not_yet.into()),
            (
                vla.data.pixel_bounds() == PixelBounds::default(),
                "data.resize",
                "or a bound of pixels is given, and the policy scales images itself; leave them out".into(),
            ),
            (vla.observation.frames() == 1, "observation.history", not_yet.into()),
            (spec.cache.mode == CacheMode::Off, "cache.mode", not_yet.into()),
            (
                vla.expert == Expert::default(),
                "expert",
                "has keys, and the expert is as the policy's config.json says; leave it out".into(),
            ),
            (spec.memory.offload == Offload::None, "memory.offload", not_yet.into()),
            (spec.memory.shard == Shard::None, "memory.shard", not_yet.into()),
            (vla.model.weights_dtype.packing().is_none(), "model.weights_dtype", not_yet.into()),
            (
                vla.model.activations_dtype == ActivationsDtype::Float32,
                "model.activations_dtype",
                not_yet.into(),
            ),
            (
                vla.data.horizon == chunk,
                "data.horizon",
                format!("is {}, and the policy's chunk_size {chunk}; set it so", vla.data.horizon),
            ),
            (
                vla.data.cameras.len() <= cameras,
                "data.cameras",
                format!(
                    "are {}, and the policy sees {cameras}: {}",
                    vla.data.cameras.len(),
                    config.cameras.join(", ")
                ),
            ),
            (
                [modes.state, modes.action] == [NormMode::MeanStd; 2],
                "data.normalization",
                "is another than mean_std, by which the policy was trained".into(),
            ),
            (
                vla.data.has_state(),
                "data.state",
                "is none, and the policy's prefix ends with the state".into(),
            ),
        ];
        rules.into_iter().find(|(fits, ..)| !fits).map(|(_, key, problem)| (key, problem))
    }
}

/// What makes a model's input of images and tasks.
pub(super) enum InputMakers {
    /// A plain model's.
    Model(&'static dyn VlFamily, PathBuf),
    /// A policy's.
    Policy(Box<PolicyBase>),
}

impl InputMakers {
    /// Those of a run.
    pub fn of(vla: &VlaSettings, models: Shelf<Sizes>) -> Result<Self, DataError> {
        if let Some(base) = PolicyBase::of(vla, models).map_err(unread)? {
            return Ok(Self::Policy(Box::new(base)));
        }
        let dir = directory::outline(&vla.model.path)?;
        let family = models.vision_language.of(&dir).map_err(unread)?;
        Ok(Self::Model(family, dir))
    }

    /// Images to the model's input.
    pub fn images(&self, vla: &VlaSettings) -> Result<Box<dyn ImageProcessor>, DataError> {
        match self {
            Self::Model(family, dir) => family.images(dir, vla.data.pixel_bounds()),
            Self::Policy(base) => Ok(Box::new(SmolVlaImages::of(&base.outline))),
        }
    }

    /// Tasks to ids.
    pub fn prompts(&self, form: &PromptForm<'_>) -> Result<Box<dyn PromptEncoder>, DataError> {
        match self {
            Self::Model(family, dir) => family.prompts(dir, form),
            Self::Policy(base) => {
                let PolicyBase { backbone, outline, config, .. } = &**base;
                Ok(Box::new(SmolVlaPrompts::open(backbone, outline, config.most_tokens, form)?))
            }
        }
    }

    /// Where the tokenizer is.
    pub fn tokenizer(&self) -> PathBuf {
        let dir = match self {
            Self::Model(_, dir) => dir,
            Self::Policy(base) => &base.backbone,
        };
        dir.join("tokenizer.json")
    }
}
