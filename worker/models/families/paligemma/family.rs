//! PaliGemma as policies find it.

use std::path::Path;

use coxswain_nn::kernels::Tape;

use super::{config::PaliGemmaConfig, model::PaliGemmaModel};
use crate::{
    joint::{FileLocation, JointFamily, JointFamilyOn, JointModel, JointOutline},
    pretrained::{error::ModelError, family::ModelTypes, loader::Loader},
};

/// The family `paligemma`.
#[derive(Clone, Copy, Debug)]
pub struct PaliGemma;

impl ModelTypes for PaliGemma {
    fn model_types(&self) -> &'static [&'static str] {
        &["paligemma"]
    }
}

impl JointFamily for PaliGemma {
    fn outline(&self, dir: &Path, within: FileLocation<'_>) -> Result<JointOutline, ModelError> {
        PaliGemmaConfig::from_dir(dir)?.outline(dir, within)
    }
}

impl<B: Tape<Base = B>> JointFamilyOn<B> for PaliGemma {
    fn load(
        &self,
        dir: &Path,
        within: FileLocation<'_>,
        loader: &mut Loader<'_, B>,
    ) -> Result<Box<dyn JointModel<B>>, ModelError> {
        let config = PaliGemmaConfig::from_dir(dir)?;
        let outline = config.outline(dir, within)?;
        Ok(Box::new(PaliGemmaModel::load(&config, outline, within.prefix, loader)?))
    }
}
