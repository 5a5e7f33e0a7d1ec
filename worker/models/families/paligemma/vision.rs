//! Images to features: SigLIP, and one linear with a bias.

use coxswain_nn::{kernels::ModelBackend, lora::LoraLinear};

use super::config::PaliGemmaConfig;
use crate::{
    joint::SiglipTower,
    pretrained::{error::ModelError, loader::Loader},
};

/// The tower, which does not train, and what joins it to the language model.
pub(super) struct ProjectedTower<B: ModelBackend> {
    /// Patches to features.
    pub tower: SiglipTower<B>,
    /// From a row of the tower's output to the language model's width.
    pub projector: LoraLinear<B>,
}

impl<B: ModelBackend> ProjectedTower<B> {
    /// Loads what lies at `at.vision_tower.vision_model` and `at.multi_modal_projector`.
    pub fn load(config: &PaliGemmaConfig, at: &str, loader: &mut Loader<'_, B>) -> Result<Self, ModelError> {
        let tower = format!("{at}.vision_tower.vision_model");
        let features = [config.vision.width, config.layer.width];
        Ok(Self {
            tower: SiglipTower::load(config.vision.clone(), &tower, loader)?,
            projector: loader.linear(&format!("{at}.multi_modal_projector.linear"), features, true)?,
        })
    }
}
