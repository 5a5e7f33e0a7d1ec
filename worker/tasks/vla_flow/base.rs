//! What a run starts from: a plain vision-language model, or a policy directory of LeRobot's, whose
//! images and prompts are made as the policy has them.

use std::path::{Path, PathBuf};

use coxswain_data::{
    DataError, NormMode,
    place::hub::{self, Repository},
};
use coxswain_models::{
    Shelf,
    joint::JointOutline,
    pretrained::{
        adapters::TunedModules,
        directory,
        error::ModelError,
        pictures::{ImageProcessor, PixelBounds},
    },
    vision_language::{PromptEncoder, PromptForm, VlFamily},
};
use coxswain_nn::{
    dtypes::ActivationsDtype,
    kernels::{Tape, sizes::Sizes},
    lora::Module,
};
use coxswain_policies::{
    KeptTokens, PolicyKind, TuningSettings,
    directory::{PolicyDirectory, is_policy},
    pi::told_tokens,
};
use coxswain_proto::run_spec::{CacheDtype, CacheMode, Offload, RunSpec, Shard};

use super::{
    config::{Data, Expert, HeadKind, PolicyLoss, TapSetting, VlaSettings},
    oft::OftPrompts,
    told::StatePrompts,
};
use crate::settings::unread;

/// A policy directory that a run starts from.
#[derive(Clone, Debug)]
pub struct PolicyBase {
    /// The directory.
    pub directory: PolicyDirectory,
    /// The policy's kind, with its configuration.
    pub kind: PolicyKind,
    /// How its states and actions are normalised.
    pub modes: [NormMode; 2],
    /// The directory of its vision-language model.
    pub backbone: PathBuf,
    /// What that says.
    pub outline: JointOutline,
}

/// Whether a run starts from a policy's directory.
pub fn starts_from_policy(vla: &VlaSettings) -> bool {
    let dir = hub::directory(Path::new(&vla.model.path), Repository::Model);
    dir.is_ok_and(|dir| is_policy(&dir))
}

impl PolicyBase {
    /// The policy that a run starts from; none if `model.path` is a plain model.
    pub fn from_settings<B: Tape<Base = B>>(
        vla: &VlaSettings,
        models: Shelf<B>,
    ) -> Result<Option<Self>, ModelError> {
        let dir = &hub::directory(Path::new(&vla.model.path), Repository::Model)?;
        if !is_policy(dir) {
            return Ok(None);
        }
        Self::from_dir(dir, vla.model.backbone.as_deref().map(Path::new), models).map(Some)
    }

    /// The policy in a directory; that of its vision-language model may be given.
    pub fn from_dir<B: Tape<Base = B>>(
        dir: &Path,
        given: Option<&Path>,
        models: Shelf<B>,
    ) -> Result<Self, ModelError> {
        let directory = PolicyDirectory::from_dir(dir)?;
        let kind = PolicyKind::from_directory(&directory)?;
        let backbone = kind.backbone(&directory, given)?;
        let outline = kind.outline(&directory, &backbone, models)?;
        let modes = PolicyKind::normalization(&directory)?;
        Ok(Self { directory, kind, modes, backbone, outline })
    }

    /// What of it trains in a run.
    pub fn tuned(&self, vla: &VlaSettings) -> Result<TunedModules, ModelError> {
        let asked = TuningSettings { lora: vla.lora.as_ref(), train: &vla.model.train };
        self.kind.tuned(&self.directory, &self.outline, asked)
    }

    /// What of it trains by default: all that its own files say.
    pub fn as_published(&self) -> Result<TunedModules, ModelError> {
        self.kind.tuned(&self.directory, &self.outline, TuningSettings::default())
    }

    /// What a run keeps of samples, if it keeps anything.
    pub fn kept(&self, spec: &RunSpec) -> KeptTokens {
        let deep = TapSetting::try_from(&spec.cache.tap).is_ok_and(|tap| tap == TapSetting::Final);
        self.kind.kept(&self.outline, deep)
    }

    /// Modules of the policy.
    pub fn modules(&self) -> Vec<Module> {
        self.kind.modules(&self.directory, &self.outline)
    }

    /// `data.normalization`, as a run on it has to have it.
    pub fn normalization(&self) -> String {
        let [state, action] = self.modes.map(NormMode::name);
        format!("{{ state: {state}, action: {action} }}")
    }

    /// What of a run's settings such a policy does not have; the key, and what is wrong with it.
    pub fn misfit(&self, vla: &VlaSettings, spec: &RunSpec) -> Option<(&'static str, String)> {
        let chunk = self.kind.sizes().chunk;
        let cameras = self.cameras_misfit(&vla.data);
        let modes = vla.data.normalization;
        let not_yet = "is not supported yet for LeRobot policies; leave it out";
        let rules: [(bool, &'static str, String); 18] = [
            (vla.data.sensor.is_none(), "data.sensor", not_yet.into()),
            (
                vla.data.sets.is_empty(),
                "data.sets",
                "lists several data sets, but a LeRobot policy stores the statistics of only one; remove it, and \
                 name one data set in data.path"
                    .into(),
            ),
            // What LeRobot would not do with the actions and images that it is given.
            (!vla.data.delta_actions.contains(&true), "data.delta_actions", not_yet.into()),
            (vla.data.action_stride == 1, "data.action_stride", not_yet.into()),
            (
                vla.data.pixel_bounds() == PixelBounds::default(),
                "data.resize",
                "has no effect: a LeRobot policy resizes images itself; remove data.resize, data.min_pixels and data.max_pixels".into(),
            ),
            (vla.observation.frames() == 1, "observation.history", not_yet.into()),
            (
                spec.cache.mode != CacheMode::Periodic,
                "cache.mode",
                "is `periodic`, which LeRobot policies do not support; use `exact`".into(),
            ),
            (
                spec.cache.mode == CacheMode::Off
                    || matches!(
                        TapSetting::try_from(&spec.cache.tap),
                        Ok(TapSetting::Auto | TapSetting::Vision | TapSetting::Final)
                    ),
                "cache.tap",
                "must be `auto`, `vision` or `final` for a LeRobot policy; use `auto`".into(),
            ),
            (
                spec.cache.mode == CacheMode::Off
                    || spec.cache.dtype != CacheDtype::Int8
                    || self.kept(spec) != KeptTokens::KeysValues,
                "cache.dtype",
                "is `int8`, whose one scale for a token would be that of the keys and values of all layers; \
                 use `float32` or `bfloat16`"
                    .into(),
            ),
            (
                vla.expert == Expert { loss: vla.expert.loss, ..Expert::default() },
                "expert",
                "has keys besides `loss`, but the policy's config.json defines the expert; leave them out"
                    .into(),
            ),
            (
                vla.expert.loss == PolicyLoss::Lerobot || matches!(self.kind, PolicyKind::Pi(_)),
                "expert.loss",
                "is `openpi`, which is only for pi0 and pi0.5; leave it out".into(),
            ),
            (spec.memory.offload == Offload::None, "memory.offload", not_yet.into()),
            (spec.memory.shard == Shard::None, "memory.shard", not_yet.into()),
            (
                vla.model.activations_dtype == ActivationsDtype::Float32,
                "model.activations_dtype",
                not_yet.into(),
            ),
            (
                vla.data.horizon == chunk,
                "data.horizon",
                format!("is {}; set it to {chunk}, the policy's chunk_size", vla.data.horizon),
            ),
            (cameras.is_none(), "data.cameras", cameras.unwrap_or_default()),
            (
                [modes.state, modes.action] == self.modes,
                "data.normalization",
                format!("differs from the policy's; set it to {}", self.normalization()),
            ),
            (vla.data.has_state(), "data.state", "is `none`, but the policy needs a state; name one".into()),
        ];
        rules.into_iter().find(|(fits, ..)| !fits).map(|(_, key, problem)| (key, problem))
    }

    /// What is wrong with a data set's cameras: each has to be one of the policy's, by name or by the map,
    /// and they come in the policy's order, by which it tells them apart.
    fn cameras_misfit(&self, data: &Data) -> Option<String> {
        let own = self.kind.sizes().cameras;
        let place = |name: &String| own.iter().position(|own| own == data.renamed(name));
        let mut places: Vec<_> = data.cameras.iter().map(|name| (place(name), name)).collect();
        if let Some(name) = data.rename_map.keys().find(|name| !data.cameras.contains(name)) {
            return Some(format!("lack {name}, which data.rename_map maps; add it or remove the mapping"));
        }
        let known = places.iter().all(|(place, _)| place.is_some());
        if known && places.is_sorted_by(|a, b| a.0 < b.0) {
            return None;
        }
        let policy = own.join(", ");
        if known {
            places.sort();
            let names = places.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>().join(", ");
            let twice = places.windows(2).any(|pair| pair[0].0 == pair[1].0);
            return Some(match twice {
                true => format!(
                    "two of [{names}] are mapped to the same camera of the policy; correct data.rename_map"
                ),
                false => format!("are in another order than the policy's ({policy}); list them as [{names}]"),
            });
        }
        let is_free = |name: &&String| {
            !name.contains(".empty_camera_") && !data.cameras.iter().any(|taken| data.renamed(taken) == *name)
        };
        let mut free = own.iter().filter(is_free);
        let strangers = || places.iter().filter(|(place, _)| place.is_none()).map(|(_, name)| name.as_str());
        let map: Option<Vec<_>> = strangers().map(|name| Some(format!("{name}: {}", free.next()?))).collect();
        let strange = strangers().collect::<Vec<_>>().join(", ");
        Some(match map {
            Some(map) => format!(
                "include {strange}, but the policy has {policy}; set, for example, data.rename_map: {{{}}}",
                map.join(", ")
            ),
            None => format!("include {strange}, but the policy has only {policy}; leave some cameras out"),
        })
    }
}

/// What makes a model's input of images and tasks.
pub(super) enum InputMakers {
    /// A plain model's, with what its head reads in a prompt; of an action token for each action so many.
    Model { family: &'static dyn VlFamily, dir: PathBuf, head: HeadKind, horizon: usize },
    /// A policy's.
    Policy(Box<PolicyBase>),
}

impl InputMakers {
    /// The makers of a run.
    pub fn from_settings(vla: &VlaSettings, models: Shelf<Sizes>) -> Result<Self, DataError> {
        if let Some(base) = PolicyBase::from_settings(vla, models).map_err(unread)? {
            return Ok(Self::Policy(Box::new(base)));
        }
        if vla.expert.loss == PolicyLoss::Openpi {
            let path = &vla.model.path;
            let problem =
                format!("expert.loss is `openpi`, but {path} is not a pi0 or pi0.5 policy; remove the key");
            return Err(DataError::Model(problem));
        }
        let dir = directory::outline(&vla.model.path)?;
        let family = models.vision_language.of(&dir).map_err(unread)?;
        Ok(Self::Model { family, dir, head: vla.expert.head, horizon: vla.data.horizon })
    }

    /// Images to the model's input.
    pub fn images(&self, vla: &VlaSettings) -> Result<Box<dyn ImageProcessor>, DataError> {
        match self {
            Self::Model { family, dir, .. } => family.images(dir, vla.data.pixel_bounds()),
            Self::Policy(base) => Ok(base.kind.images(&base.backbone, &base.outline)?),
        }
    }

    /// Tasks to ids.
    pub fn prompts(&self, form: &PromptForm<'_>) -> Result<Box<dyn PromptEncoder>, DataError> {
        match self {
            Self::Model { family, dir, head, horizon } => {
                let own = family.prompts(dir, form)?;
                match head {
                    HeadKind::Flow => return Ok(own),
                    HeadKind::Layerwise => return Ok(Box::new(StatePrompts(own))),
                    HeadKind::Oft => {}
                }
                let with_actions = OftPrompts::new(own, *horizon).map_err(|found| {
                    let remedy = "choose another model, or the head `flow`";
                    DataError::invalid(&dir.join("tokenizer.json"), "model.vocab", found, remedy)
                })?;
                Ok(Box::new(with_actions))
            }
            Self::Policy(base) => {
                let PolicyBase { backbone, outline, kind, .. } = &**base;
                kind.prompts(backbone, outline, form)
            }
        }
    }

    /// About how many tokens a prompt has beside its task, with so many values of a state, at most.
    pub fn told_tokens(&self, state: usize) -> usize {
        match self {
            Self::Model { head: HeadKind::Layerwise, .. } if state > 0 => told_tokens(state),
            Self::Model { .. } => 0,
            Self::Policy(base) => base.kind.told_tokens(state),
        }
    }
}

/// Where the tokenizer of a run is: a policy's is beside the model that it names.
pub fn tokenizer(vla: &VlaSettings) -> Result<PathBuf, ModelError> {
    let dir = directory::outline(&vla.model.path)?;
    if !is_policy(&dir) {
        return Ok(dir.join("tokenizer.json"));
    }
    let directory = PolicyDirectory::from_dir(&dir)?;
    let given = vla.model.backbone.as_deref().map(Path::new);
    let backbone = PolicyKind::from_directory(&directory)?.backbone(&directory, given)?;
    Ok(backbone.join("tokenizer.json"))
}
