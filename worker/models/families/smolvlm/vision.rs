//! Images to what the connector reads, and the connector: SigLIP, pixel shuffle.
//!
//! ```text
//! token = W_connector [squares of r x r patches of the tower's features, row by row]
//! ```

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
    params::ParamScope,
};

use super::config::SmolVlmConfig;
use crate::{
    joint::SiglipTower,
    pretrained::{error::ModelError, loader::Loader},
};

/// The tower, which does not train, and what joins it to the language model.
pub(super) struct ImageTower<B: ModelBackend> {
    tower: SiglipTower<B>,
    shuffle: usize,
    /// From a row of the tower's output to the language model's width.
    pub connector: LoraLinear<B>,
}

impl<B: ModelBackend> ImageTower<B> {
    /// Loads what lies at `at.vision_model` and `at.connector`.
    pub fn load(config: &SmolVlmConfig, at: &str, loader: &mut Loader<'_, B>) -> Result<Self, ModelError> {
        let shuffled = config.vision.width * config.shuffle * config.shuffle;
        Ok(Self {
            tower: SiglipTower::load(config.vision.clone(), &format!("{at}.vision_model"), loader)?,
            shuffle: config.shuffle,
            connector: loader.linear(
                &format!("{at}.connector.modality_projection.proj"),
                [shuffled, config.layer.width],
                false,
            )?,
        })
    }
}

impl<B: Tape<Base = B>> ImageTower<B> {
    /// `[images * patches, values]` to `[images * tokens, r * r * d]`.
    pub fn run(&self, params: &ParamScope<'_, B>, patches_pi: Tensor<B, 2>) -> Tensor<B, 2> {
        let side = self.tower.sizes.patches();
        let images = patches_pi.dims()[0] / (side * side);
        self.shuffled(self.tower.run(params, patches_pi), images)
    }

    /// Squares of patches as one row each, their patches row by row.
    fn shuffled(&self, x_nd: Tensor<B, 2>, images: usize) -> Tensor<B, 2> {
        let (r, d) = (self.shuffle, self.tower.sizes.width);
        let n = self.tower.sizes.patches() / r;
        let squares = x_nd.reshape([images, n, r, n, r, d]).permute([0, 1, 3, 2, 4, 5]);
        squares.reshape([images * n * n, r * r * d])
    }
}
