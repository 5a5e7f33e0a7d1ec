//! A family of models that lend their layers.

use std::path::Path;

use coxswain_nn::kernels::Tape;

use super::{model::JointModel, outline::JointOutline};
use crate::pretrained::{error::ModelError, family::ModelTypes, loader::Loader, location::FileLocation};

/// A family of models that lend their layers, as far as no device is needed.
pub trait JointFamily: ModelTypes {
    /// What `config.json` of the model's own directory says, of a model that lies within a policy's file.
    fn outline(&self, dir: &Path, within: FileLocation<'_>) -> Result<JointOutline, ModelError>;
}

/// The family on one kind of device.
pub trait JointFamilyOn<B: Tape<Base = B>>: JointFamily {
    /// Reads a model. `dir` is the model's own directory, for `config.json` alone: weights come from
    /// `loader`.
    fn load(
        &self,
        dir: &Path,
        within: FileLocation<'_>,
        loader: &mut Loader<'_, B>,
    ) -> Result<Box<dyn JointModel<B>>, ModelError>;
}
