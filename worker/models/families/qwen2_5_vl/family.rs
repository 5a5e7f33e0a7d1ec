//! Qwen2.5-VL as tasks find it.

use std::path::Path;

use coxswain_data::DataError;
use coxswain_nn::{kernels::Tape, params::TrainableLayout};

use super::{
    config::QwenConfig,
    modules::modules,
    outline::outline,
    vision::{QwenVl, WindowTower},
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
    ChatMlForm { family: "Qwen2.5-VL", patch: 14, own_system_turn: true, tool_turns: ToolTurns::AsTheyAre };

/// The family `qwen2_5_vl`.
#[derive(Clone, Copy, Debug)]
pub struct Qwen2_5Vl;

impl Named for Qwen2_5Vl {
    fn model_types(&self) -> &'static [&'static str] {
        &["qwen2_5_vl"]
    }
}

impl VlFamily for Qwen2_5Vl {
    fn outline(&self, dir: &Path) -> Result<ModelOutline, ModelError> {
        Ok(outline(&QwenConfig::read(dir)?))
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
        job.write(&modules(&QwenConfig::read(job.like)?), TOKEN_IDS)
    }
}

impl<B: Tape<Base = B>> VlFamilyOn<B> for Qwen2_5Vl {
    fn load(
        &self,
        dir: &Path,
        options: LoadOptions,
        trains: Trains<'_>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Box<dyn VisionLanguage<B>>, ModelError> {
        Ok(Box::new(QwenVl::<B>::load(dir, options, trains, layout, device)?))
    }

    fn trunk(
        &self,
        dir: &Path,
        options: LoadOptions,
        depth: usize,
        device: &B::Device,
    ) -> Result<Box<dyn VisionTrunk<B>>, ModelError> {
        Ok(Box::new(TowerTrunk::<B, WindowTower<B>>::load(dir, options, depth, device)?))
    }

    fn forward(&self, job: &ForwardJob<'_>, device: &B::Device) -> Result<(), ModelError> {
        forward::run::<B, WindowTower<B>>(job, device)
    }
}
