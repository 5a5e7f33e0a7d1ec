//! SmolVLM2 as policies find it.

use std::path::Path;

use coxswain_nn::kernels::Tape;

use super::{config::SmolVlmConfig, model::SmolVlmModel};
use crate::{
    joint::{FileLocation, JointFamily, JointFamilyOn, JointModel, JointOutline},
    pretrained::{error::ModelError, family::ModelTypes, loader::Loader},
};

/// The family `smolvlm`.
#[derive(Clone, Copy, Debug)]
pub struct SmolVlm;

impl ModelTypes for SmolVlm {
    fn model_types(&self) -> &'static [&'static str] {
        &["smolvlm"]
    }
}

impl JointFamily for SmolVlm {
    fn outline(&self, dir: &Path, within: FileLocation<'_>) -> Result<JointOutline, ModelError> {
        SmolVlmConfig::from_dir(dir)?.outline(dir, within)
    }
}

impl<B: Tape<Base = B>> JointFamilyOn<B> for SmolVlm {
    fn load(
        &self,
        dir: &Path,
        within: FileLocation<'_>,
        loader: &mut Loader<'_, B>,
    ) -> Result<Box<dyn JointModel<B>>, ModelError> {
        let config = SmolVlmConfig::from_dir(dir)?;
        let outline = config.outline(dir, within)?;
        Ok(Box::new(SmolVlmModel::load(&config, outline, within.prefix, loader)?))
    }
}
