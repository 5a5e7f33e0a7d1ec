//! PaliGemma as policies find it.

use std::path::Path;

use coxswain_nn::kernels::Tape;

use super::{config::PaliGemmaConfig, model::PaliGemmaModel};
use crate::{
    joint::{JointFamily, JointFamilyOn, JointModel, JointOutline, Within},
    pretrained::{error::ModelError, family::Named, loader::Loader},
};

/// The family `paligemma`.
#[derive(Clone, Copy, Debug)]
pub struct PaliGemma;

impl Named for PaliGemma {
    fn model_types(&self) -> &'static [&'static str] {
        &["paligemma"]
    }
}

impl JointFamily for PaliGemma {
    fn outline(&self, dir: &Path, within: Within<'_>) -> Result<JointOutline, ModelError> {
        PaliGemmaConfig::read(dir)?.outline(dir, within)
    }
}

impl<B: Tape<Base = B>> JointFamilyOn<B> for PaliGemma {
    fn load(
        &self,
        dir: &Path,
        within: Within<'_>,
        loader: &mut Loader<'_, B>,
    ) -> Result<Box<dyn JointModel<B>>, ModelError> {
        let config = PaliGemmaConfig::read(dir)?;
        let outline = config.outline(dir, within)?;
        Ok(Box::new(PaliGemmaModel::load(&config, outline, within.prefix, loader)?))
    }
}
