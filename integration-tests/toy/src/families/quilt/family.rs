//! What tasks find.

use std::{path::Path, sync::Arc};

use coxswain_data::DataError;
use coxswain_models::{
    pretrained::{
        error::ModelError,
        family::ModelTypes,
        job::ForwardJob,
        pictures::{ImageProcessor, PatchShape, PixelBounds, SmartResize},
        synthetic::{SyntheticCheckpoint, SyntheticSummary},
        trains::Trains,
    },
    vision_language::{
        ChatEncoder, LoadOptions, ModelOutline, PromptEncoder, PromptForm, VisionLanguage, VisionTrunk,
        VlFamily, VlFamilyOn,
    },
};
use coxswain_nn::{kernels::Tape, params::TrainableLayout};

use super::{
    config::Config,
    model::Quilt,
    modules::modules,
    outline::{outline, patch_shape},
    processor::{Chats, Prompts, TOKEN_IDS, Text, unread},
    rules::MODEL_TYPE,
};

/// The family.
#[derive(Clone, Copy, Debug)]
pub struct Family;

impl ModelTypes for Family {
    fn model_types(&self) -> &'static [&'static str] {
        &[MODEL_TYPE]
    }
}

impl VlFamily for Family {
    fn outline(&self, dir: &Path) -> Result<ModelOutline, ModelError> {
        Ok(outline(&Config::read(dir)?))
    }

    fn patches(&self, dir: &Path) -> Result<PatchShape, DataError> {
        Ok(patch_shape(&Config::read(dir).map_err(unread)?))
    }

    fn images(&self, dir: &Path, bounds: PixelBounds) -> Result<Box<dyn ImageProcessor>, DataError> {
        Ok(Box::new(SmartResize::from_checkpoint(dir, self.patches(dir)?, bounds)?))
    }

    fn prompts(&self, dir: &Path, form: &PromptForm<'_>) -> Result<Box<dyn PromptEncoder>, DataError> {
        Ok(Box::new(Prompts::new(Arc::new(Text::open(dir)?), form)))
    }

    fn chats(&self, dir: &Path) -> Result<Box<dyn ChatEncoder>, DataError> {
        Ok(Box::new(Chats(Text::open(dir)?)))
    }

    fn make_checkpoint(&self, job: &SyntheticCheckpoint<'_>) -> Result<SyntheticSummary, ModelError> {
        job.write(&modules(&Config::read(job.like)?), TOKEN_IDS)
    }
}

impl<B: Tape<Base = B>> VlFamilyOn<B> for Family {
    fn load(
        &self,
        dir: &Path,
        options: LoadOptions,
        trains: Trains<'_>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Box<dyn VisionLanguage<B>>, ModelError> {
        Ok(Box::new(Quilt::load(dir, options, trains, layout, device)?))
    }

    fn trunk(
        &self,
        dir: &Path,
        _options: LoadOptions,
        _depth: usize,
        _device: &B::Device,
    ) -> Result<Box<dyn VisionTrunk<B>>, ModelError> {
        Err(refused(dir, "there is nothing between the blocks of its vision tower, which has none"))
    }

    fn forward(&self, job: &ForwardJob<'_>, _device: &B::Device) -> Result<(), ModelError> {
        Err(refused(job.model, "nothing else computes such a model, with which a pass could be compared"))
    }
}

fn refused(dir: &Path, why: &str) -> ModelError {
    let problem = format!("is \"{MODEL_TYPE}\": {why}; name a model of another family");
    ModelError::Config { path: dir.join("config.json"), field: "model_type".into(), problem }
}
