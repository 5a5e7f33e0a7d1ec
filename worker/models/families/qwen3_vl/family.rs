//! Qwen3-VL as tasks find it.

use std::path::Path;

use coxswain_data::DataError;
use coxswain_nn::{kernels::Tape, params::TrainableLayout};

use super::{
    config::Qwen3VlConfig,
    modules::modules,
    outline::outline,
    vision::{DeepStackTower, Qwen3VlModel},
};
use crate::{
    chatml::{ChatMlChats, ChatMlForm, ChatMlPrompts, ModelFacts, ToolTurns},
    pretrained::{
        error::ModelError,
        family::Named,
        job::ForwardJob,
        pictures::{ImageProcessor, PatchShape, PixelBounds, SmartResize},
        synthetic::{Made, SyntheticCheckpoint},
        tokens::TokenIds,
        trains::Trains,
    },
    two_towers::{forward, trunk::TowerTrunk},
    vision_language::{
        ChatEncoder, LoadOptions, ModelOutline, PromptEncoder, PromptForm, VisionLanguage, VisionTrunk,
        VlFamily, VlFamilyOn,
    },
};

/// Keys of `config.json` and the tokens that they name.
pub(super) const TOKEN_IDS: TokenIds<'_> = &[
    ("image_token_id", "<|image_pad|>"),
    ("video_token_id", "<|video_pad|>"),
    ("vision_start_token_id", "<|vision_start|>"),
    ("vision_end_token_id", "<|vision_end|>"),
    ("eos_token_id", "<|im_end|>"),
    ("bos_token_id", "<|endoftext|>"),
];

/// How prompts and chats are rendered.
pub(super) const FORM: ChatMlForm =
    ChatMlForm { family: "Qwen3-VL", patch: 16, own_system_turn: false, tool_turns: ToolTurns::AsTheUsers };

/// The family `qwen3_vl`.
#[derive(Clone, Copy, Debug)]
pub struct Qwen3Vl;

impl Named for Qwen3Vl {
    fn model_types(&self) -> &'static [&'static str] {
        &["qwen3_vl"]
    }
}

impl VlFamily for Qwen3Vl {
    fn outline(&self, dir: &Path) -> Result<ModelOutline, ModelError> {
        Ok(outline(&Qwen3VlConfig::read(dir)?))
    }

    fn patches(&self, dir: &Path) -> Result<PatchShape, DataError> {
        Ok(ModelFacts::read(dir, FORM)?.patches)
    }

    fn images(&self, dir: &Path, bounds: PixelBounds) -> Result<Box<dyn ImageProcessor>, DataError> {
        Ok(Box::new(SmartResize::open(dir, self.patches(dir)?, bounds)?))
    }

    fn prompts(&self, dir: &Path, form: &PromptForm<'_>) -> Result<Box<dyn PromptEncoder>, DataError> {
        Ok(Box::new(ChatMlPrompts::open(dir, ModelFacts::read(dir, FORM)?, form)?))
    }

    fn chats(&self, dir: &Path) -> Result<Box<dyn ChatEncoder>, DataError> {
        Ok(Box::new(ChatMlChats::open(dir, ModelFacts::read(dir, FORM)?)?))
    }

    fn make_checkpoint(&self, job: &SyntheticCheckpoint<'_>) -> Result<Made, ModelError> {
        job.write(&modules(&Qwen3VlConfig::read(job.like)?), TOKEN_IDS)
    }
}

impl<B: Tape<Base = B>> VlFamilyOn<B> for Qwen3Vl {
    fn load(
        &self,
        dir: &Path,
        options: LoadOptions,
        trains: Trains<'_>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Box<dyn VisionLanguage<B>>, ModelError> {
        Ok(Box::new(Qwen3VlModel::<B>::load(dir, options, trains, layout, device)?))
    }

    fn trunk(
        &self,
        dir: &Path,
        options: LoadOptions,
        depth: usize,
        device: &B::Device,
    ) -> Result<Box<dyn VisionTrunk<B>>, ModelError> {
        Ok(Box::new(TowerTrunk::<B, DeepStackTower<B>>::load(dir, options, depth, device)?))
    }

    fn forward(&self, job: &ForwardJob<'_>, device: &B::Device) -> Result<(), ModelError> {
        forward::run::<B, DeepStackTower<B>>(job, device)
    }
}
