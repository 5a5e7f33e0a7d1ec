//! A family of vision-language models.

use std::path::Path;

use coxswain_data::DataError;
use coxswain_nn::{kernels::Tape, params::TrainableLayout};

use super::{
    model::{LoadOptions, VisionLanguage, VisionTrunk},
    outline::ModelOutline,
    text::{ChatEncoder, PromptEncoder, PromptForm},
};
use crate::pretrained::{
    error::ModelError,
    family::ModelTypes,
    job::ForwardJob,
    loader::Loader,
    location::FileLocation,
    pictures::{ImageProcessor, PatchShape, PixelBounds},
    synthetic::{SyntheticCheckpoint, SyntheticSummary},
    trains::Trains,
};

/// A family of models, as far as no device is needed. Directories are Hugging Face's.
pub trait VlFamily: ModelTypes {
    /// What `config.json` of a model says.
    fn outline(&self, dir: &Path) -> Result<ModelOutline, ModelError>;

    /// What is known of a model that lies within a policy's file. `dir` is the model's own directory, for
    /// `config.json` alone.
    fn outline_within(&self, dir: &Path, _within: FileLocation<'_>) -> Result<ModelOutline, ModelError> {
        Err(not_within(dir))
    }

    /// Sizes of the patches that a model's images are cut into.
    fn patches(&self, dir: &Path) -> Result<PatchShape, DataError>;

    /// What makes a model's input of images, with the settings of the checkpoint; the run's bounds win over
    /// its.
    fn images(&self, dir: &Path, bounds: PixelBounds) -> Result<Box<dyn ImageProcessor>, DataError>;

    /// What makes token ids of a robot's tasks.
    fn prompts(&self, dir: &Path, form: &PromptForm<'_>) -> Result<Box<dyn PromptEncoder>, DataError>;

    /// What makes token ids of chats.
    fn chats(&self, dir: &Path) -> Result<Box<dyn ChatEncoder>, DataError>;

    /// Makes a checkpoint of random weights.
    fn make_checkpoint(&self, job: &SyntheticCheckpoint<'_>) -> Result<SyntheticSummary, ModelError>;
}

/// A family on one kind of device.
pub trait VlFamilyOn<B: Tape<Base = B>>: VlFamily {
    /// Reads a model. What trains is registered in `layout`, in the order of its modules.
    fn load(
        &self,
        dir: &Path,
        options: LoadOptions,
        trains: Trains<'_>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Box<dyn VisionLanguage<B>>, ModelError>;

    /// Reads a model that lies within a policy's file, of which `loader` reads. `dir` is the model's own
    /// directory, for `config.json` alone.
    fn load_within(
        &self,
        dir: &Path,
        _within: FileLocation<'_>,
        _loader: &mut Loader<'_, B>,
    ) -> Result<Box<dyn VisionLanguage<B>>, ModelError> {
        Err(not_within(dir))
    }

    /// Reads the first `depth` blocks of a model's vision tower, frozen, and nothing else of it.
    fn trunk(
        &self,
        dir: &Path,
        options: LoadOptions,
        depth: usize,
        device: &B::Device,
    ) -> Result<Box<dyn VisionTrunk<B>>, ModelError>;

    /// One forward pass from file to file, for comparison with other implementations.
    fn forward(&self, job: &ForwardJob<'_>, device: &B::Device) -> Result<(), ModelError>;
}

/// The answer of families that no policy's file holds.
fn not_within(dir: &Path) -> ModelError {
    ModelError::Config {
        path: dir.join("config.json"),
        field: "model_type".into(),
        problem: "this model family is not supported as the backbone of a policy".into(),
    }
}
