//! The kinds of policies, and what each answers of its own: all that tasks ask of a policy before it is on a
//! device, and how it comes there.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use coxswain_data::{DataError, NormMode};
use coxswain_models::{
    Shelf,
    joint::JointOutline,
    pretrained::{
        adapters::TunedModules,
        error::ModelError,
        rules::{Place, Rules},
    },
    vision_language::{PromptEncoder, PromptForm},
};
use coxswain_nn::{
    kernels::Tape,
    lora::{Lora, Module},
    params::TrainableLayout,
};

use crate::{
    backbone::{self, NamedIn},
    directory::{GROOT, PolicyDirectory, SMOLVLA},
    export::PROCESSORS,
    gr00t,
    images::{Alignment, LetterboxImages, PolicyImages},
    kept_tokens::KeptTokens,
    network::PolicyLoad,
    normalizer::{Side, mode, step_of},
    pi::{self, PiKind},
    policy::{Policy, PolicyFiles, PolicySizes},
    prompts::{PolicyPrompts, Wording, line},
    smolvla,
    tuning::{TuningSettings, with_targets},
};

/// A kind of policy, with a directory's checked configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum PolicyKind {
    /// SmolVLA.
    SmolVla(smolvla::SmolVlaConfig),
    /// pi0 and pi0.5.
    Pi(pi::PiConfig),
    /// GR00T N1.7.
    Gr00t(gr00t::Gr00tConfig),
}

impl PolicyKind {
    /// Checks a directory's configuration and processors.
    pub fn from_directory(directory: &PolicyDirectory) -> Result<Self, ModelError> {
        match directory.kind() {
            SMOLVLA => {
                let config = smolvla::SmolVlaConfig::from_directory(directory)?;
                smolvla::SmolVlaConfig::check_processors(directory)?;
                Ok(Self::SmolVla(config))
            }
            GROOT => gr00t::Gr00tConfig::from_directory(directory).map(Self::Gr00t),
            _ => pi::PiConfig::from_directory(directory).map(Self::Pi),
        }
    }

    /// The directory of its vision-language model: given, or in Hugging Face's cache.
    pub fn backbone(&self, directory: &PolicyDirectory, given: Option<&Path>) -> Result<PathBuf, ModelError> {
        let (field, repository) = match self {
            Self::SmolVla(config) => ("vlm_model_name", &config.vlm[..]),
            Self::Pi(_) => ("paligemma_variant", pi::PALIGEMMA),
            Self::Gr00t(_) => ("type", gr00t::BACKBONE),
        };
        backbone::find(given, NamedIn { path: &directory.path, field, repository })
    }

    /// What the directory of its vision-language model says, which has to be of the images that it sees.
    pub fn outline<B: Tape<Base = B>>(
        &self,
        directory: &PolicyDirectory,
        backbone: &Path,
        models: Shelf<B>,
    ) -> Result<JointOutline, ModelError> {
        let (within, field, image) = match self {
            Self::SmolVla(config) => (config.within(), "resize_imgs_with_padding", config.image),
            Self::Pi(config) => (pi::PiConfig::within(), "image_resolution", [config.image; 2]),
            Self::Gr00t(config) => {
                let found = models.vision_language.of(backbone)?.outline_within(backbone, config.within())?;
                return config.outline(found, backbone);
            }
        };
        let outline = models.joint.of(backbone)?.outline(backbone, within)?;
        let side = outline.image_side;
        if image == [side; 2] {
            return Ok(outline);
        }
        let problem =
            format!("{image:?}, but the vision tower of {} needs {side}x{side} pixels", backbone.display());
        Err(ModelError::Config { path: directory.path.clone(), field: field.into(), problem })
    }

    /// What it says of samples.
    pub fn sizes(&self) -> PolicySizes<'_> {
        match self {
            Self::SmolVla(config) => config.sizes(),
            Self::Pi(config) => config.sizes(),
            Self::Gr00t(config) => config.sizes(),
        }
    }

    /// How states and actions are normalised, as its processor before the policy says.
    pub fn normalization(directory: &PolicyDirectory) -> Result<[NormMode; 2], ModelError> {
        let of = |kind| mode(directory, kind);
        Ok([of("STATE")?, of("ACTION")?])
    }

    /// What the directory keeps of the data set that it was trained on: tensors, each called by its feature
    /// and what it is.
    pub fn statistics(directory: &PolicyDirectory) -> Result<BTreeMap<String, Vec<f32>>, ModelError> {
        Ok(directory.kept_by(PROCESSORS[0], step_of(directory, Side::Before)?)?)
    }

    /// What names in its file mean.
    pub fn rules(&self) -> Rules {
        match self {
            Self::SmolVla(_) => smolvla::RULES,
            Self::Pi(config) => config.kind.rules(),
            Self::Gr00t(_) => gr00t::RULES,
        }
    }

    /// The name that a tensor of a file has in the policy that a run leaves: one that LeRobot reads.
    pub fn written_name(&self) -> fn(&str) -> String {
        match self {
            Self::SmolVla(_) | Self::Pi(_) => str::to_owned,
            Self::Gr00t(_) => gr00t::written,
        }
    }

    /// What of a sample may be kept: `deep` as the language model makes it, where there is a choice.
    pub fn kept(&self, vlm: &JointOutline, deep: bool) -> KeptTokens {
        match self {
            Self::SmolVla(_) | Self::Pi(_) if deep => KeptTokens::KeysValues,
            Self::SmolVla(_) | Self::Pi(_) => KeptTokens::Images(vlm.image_tokens()),
            Self::Gr00t(_) => KeptTokens::Prompt,
        }
    }

    /// Whether what is kept depends on the module, or on the module that a tensor of this name is part of.
    pub fn is_kept_above(&self, kept: KeptTokens, name: &str) -> bool {
        match (self.rules().place)(name) {
            Place::Vision(_) => true,
            Place::Table | Place::Layer(_) => !matches!(kept, KeptTokens::Images(_)),
            _ => false,
        }
    }

    /// What of the policy in a directory trains beside such a vision-language model.
    pub fn tuned(
        &self,
        directory: &PolicyDirectory,
        vlm: &JointOutline,
        asked: TuningSettings<'_>,
    ) -> Result<TunedModules, ModelError> {
        match self {
            Self::SmolVla(config) => smolvla::tuning::tuned(&directory.dir, config, vlm, asked),
            Self::Pi(config) => pi::tuning::tuned(config, vlm, asked),
            Self::Gr00t(config) => gr00t::tuning::tuned(config, vlm, asked),
        }
    }

    /// The section `lora`, with LeRobot's targets where it has none.
    pub fn with_targets(&self, lora: &Lora) -> Lora {
        let targets = match self {
            Self::SmolVla(_) => smolvla::tuning::TARGETS,
            Self::Pi(_) => pi::tuning::TARGETS,
            // LeRobot has none for it.
            Self::Gr00t(_) => return lora.clone(),
        };
        with_targets(lora, targets)
    }

    /// All its modules, beside such a vision-language model.
    pub fn modules(&self, directory: &PolicyDirectory, vlm: &JointOutline) -> Vec<Module> {
        match self {
            Self::SmolVla(config) => smolvla::tuning::modules(&directory.dir, config, vlm),
            Self::Pi(config) => pi::tuning::modules(config, vlm),
            Self::Gr00t(config) => gr00t::tuning::modules(config, vlm),
        }
    }

    /// Reads a policy. What trains of it is registered in `layout`: what is in full under the file's names,
    /// adapters under PEFT's.
    pub fn load<B: Tape<Base = B>>(
        &self,
        files: PolicyFiles<'_>,
        tuned: &TunedModules,
        models: Shelf<B>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Box<dyn Policy<B>>, ModelError> {
        let job = PolicyLoad { files, tuned, models, layout, device };
        match self {
            Self::SmolVla(config) => smolvla::load(config, job),
            Self::Pi(config) => pi::load(config, job),
            Self::Gr00t(config) => gr00t::load(config, job),
        }
    }

    /// Pictures to its input, with the processor in `backbone` where it has one.
    pub fn images(&self, backbone: &Path, vlm: &JointOutline) -> Result<Box<dyn PolicyImages>, DataError> {
        let (policy, alignment) = match self {
            Self::SmolVla(_) => ("SmolVLA", Alignment::End),
            Self::Pi(config) if config.kind == PiKind::Pi0 => ("pi0", Alignment::Centre),
            Self::Pi(_) => ("pi0.5", Alignment::Centre),
            Self::Gr00t(config) => return config.pictures(backbone, vlm),
        };
        Ok(Box::new(LetterboxImages { policy, side: vlm.image_side, patches: vlm.patches, alignment }))
    }

    /// Tasks and states to ids, with the tokenizer in `backbone`.
    pub fn prompts(
        &self,
        backbone: &Path,
        vlm: &JointOutline,
        form: &PromptForm<'_>,
    ) -> Result<Box<dyn PromptEncoder>, DataError> {
        let (wording, most) = match self {
            Self::SmolVla(config) => (line as Wording, config.most_tokens),
            Self::Pi(config) => config.wording(),
            Self::Gr00t(config) => return config.prompts(backbone, vlm, form),
        };
        Ok(Box::new(PolicyPrompts::from_backbone(backbone, vlm, wording, most, form)?))
    }

    /// About how many tokens a prompt has beside its task, with so many values of a state, at most.
    pub fn told_tokens(&self, state: usize) -> usize {
        match self {
            Self::SmolVla(_) => 0,
            Self::Pi(config) => config.told_tokens(state),
            Self::Gr00t(_) => 0,
        }
    }

    /// Module and class of LeRobot's policy, as Python has them.
    pub fn class(&self) -> [&'static str; 2] {
        match self {
            Self::SmolVla(_) => ["lerobot.policies.smolvla.modeling_smolvla", "SmolVLAPolicy"],
            Self::Gr00t(_) => ["lerobot.policies.groot.modeling_groot", "GrootPolicy"],
            Self::Pi(config) if config.kind == PiKind::Pi0 => {
                ["lerobot.policies.pi0.modeling_pi0", "PI0Policy"]
            }
            Self::Pi(_) => ["lerobot.policies.pi05.modeling_pi05", "PI05Policy"],
        }
    }
}
