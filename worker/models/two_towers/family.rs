//! A family of two towers whose prompts are ChatML, as tasks find it.

use std::path::Path;

use coxswain_data::DataError;
use coxswain_nn::{kernels::Tape, params::TrainableLayout};

use super::{forward, model::TwoTowers, sizes::TowersConfig, trunk::TowerTrunk, vision::VisionTower};
use crate::{
    chatml::{ChatMlChats, ChatMlForm, ChatMlPrompts, ModelFacts, TOKEN_IDS},
    pretrained::{
        error::ModelError,
        family::ModelTypes,
        job::ForwardJob,
        loader::Loader,
        location::FileLocation,
        pictures::{ImageProcessor, PatchShape, PixelBounds, SmartResize},
        synthetic::{SyntheticCheckpoint, SyntheticSummary},
        trains::Trains,
    },
    vision_language::{
        ChatEncoder, LoadOptions, ModelOutline, PromptEncoder, PromptForm, VisionLanguage, VisionTrunk,
        VlFamily, VlFamilyOn,
    },
};

/// What such a family says; the rest follows.
pub trait TowersFamily: ModelTypes {
    /// `config.json`.
    type Config: TowersConfig;

    /// How prompts and chats are rendered.
    const FORM: ChatMlForm;
}

/// A family on one kind of device.
pub trait TowersFamilyOn<B: Tape<Base = B>>: TowersFamily {
    /// Vision tower.
    type Tower: VisionTower<B, Config = Self::Config> + 'static;
}

impl<F: TowersFamily> VlFamily for F {
    fn outline(&self, dir: &Path) -> Result<ModelOutline, ModelError> {
        Ok(F::Config::read(dir)?.outline())
    }

    fn outline_within(&self, dir: &Path, within: FileLocation<'_>) -> Result<ModelOutline, ModelError> {
        Ok(cut(F::Config::read(dir)?, within).outline())
    }

    fn patches(&self, dir: &Path) -> Result<PatchShape, DataError> {
        Ok(ModelFacts::read(dir, F::FORM)?.patches)
    }

    fn images(&self, dir: &Path, bounds: PixelBounds) -> Result<Box<dyn ImageProcessor>, DataError> {
        Ok(Box::new(SmartResize::from_checkpoint(dir, self.patches(dir)?, bounds)?))
    }

    fn prompts(&self, dir: &Path, form: &PromptForm<'_>) -> Result<Box<dyn PromptEncoder>, DataError> {
        Ok(Box::new(ChatMlPrompts::from_checkpoint(dir, ModelFacts::read(dir, F::FORM)?, form)?))
    }

    fn chats(&self, dir: &Path) -> Result<Box<dyn ChatEncoder>, DataError> {
        Ok(Box::new(ChatMlChats::from_checkpoint(dir, ModelFacts::read(dir, F::FORM)?)?))
    }

    fn make_checkpoint(&self, job: &SyntheticCheckpoint<'_>) -> Result<SyntheticSummary, ModelError> {
        job.write(&F::Config::read(job.like)?.modules(), TOKEN_IDS)
    }
}

fn cut<C: TowersConfig>(config: C, within: FileLocation<'_>) -> C {
    match within.layers {
        Some(layers) => config.cut(layers),
        None => config,
    }
}

impl<B: Tape<Base = B>, F: TowersFamilyOn<B>> VlFamilyOn<B> for F {
    fn load(
        &self,
        dir: &Path,
        options: LoadOptions,
        trains: Trains<'_>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Box<dyn VisionLanguage<B>>, ModelError> {
        Ok(Box::new(TwoTowers::<B, F::Tower>::load(dir, options, trains, layout, device)?))
    }

    fn load_within(
        &self,
        dir: &Path,
        within: FileLocation<'_>,
        loader: &mut Loader<'_, B>,
    ) -> Result<Box<dyn VisionLanguage<B>>, ModelError> {
        let (config, options) = (cut(F::Config::read(dir)?, within), LoadOptions::from(loader.dtype));
        Ok(Box::new(TwoTowers::<B, F::Tower>::assemble(&config, loader, options)?))
    }

    fn trunk(
        &self,
        dir: &Path,
        options: LoadOptions,
        depth: usize,
        device: &B::Device,
    ) -> Result<Box<dyn VisionTrunk<B>>, ModelError> {
        Ok(Box::new(TowerTrunk::<B, F::Tower>::load(dir, options, depth, device)?))
    }

    fn forward(&self, job: &ForwardJob<'_>, device: &B::Device) -> Result<(), ModelError> {
        forward::run::<B, F::Tower>(job, device)
    }
}
