//! Tower, connector, table and decoder layers.

use burn::tensor::{DType, Int, Tensor, TensorData};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    params::{ParamScope, Trainables},
};

use super::{config::SmolVlmConfig, vision::ImageTower};
use crate::{
    joint::{JointModel, JointOutline, StreamLayer},
    pretrained::{error::ModelError, loader::Loader},
};

/// A SmolVLM2 model, without its LM head.
pub(super) struct SmolVlmModel<B: ModelBackend> {
    outline: JointOutline,
    images: ImageTower<B>,
    table_vd: Tensor<B, 2>,
    layers: Vec<StreamLayer<B>>,
}

impl<B: ModelBackend> SmolVlmModel<B> {
    /// Loads what lies behind `prefix`.
    pub fn load(
        config: &SmolVlmConfig,
        outline: JointOutline,
        prefix: &str,
        loader: &mut Loader<'_, B>,
    ) -> Result<Self, ModelError> {
        let at = format!("{prefix}model");
        let images = ImageTower::load(config, &at, loader)?;
        let table = format!("{at}.text_model.embed_tokens.weight");
        let table_vd = loader.matrix(&table, [config.vocab_size, config.layer.width])?;
        let layer =
            |number| StreamLayer::load(loader, &format!("{at}.text_model.layers.{number}"), config.layer);
        let layers = (0..outline.layers).map(layer).collect::<Result<_, _>>()?;
        Ok(Self { outline, images, table_vd, layers })
    }
}

impl<B: Tape<Base = B>> JointModel<B> for SmolVlmModel<B> {
    fn outline(&self) -> &JointOutline {
        &self.outline
    }

    fn image_features(&self, trainables: &Trainables<B>, patches_pi: Tensor<B, 2>) -> Tensor<B, 2> {
        self.images.run(&ParamScope::<B>::frozen(trainables), patches_pi)
    }

    fn token_embeddings(&self, _trainables: &Trainables<B>, ids: &[u32]) -> Tensor<B, 2> {
        let ids: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        let count = ids.len();
        let ids: Tensor<B, 1, Int> =
            Tensor::from_data(TensorData::new(ids, [count]), &self.table_vd.device());
        let rows_nd = self.table_vd.clone().select(0, ids);
        if rows_nd.dtype() == DType::F32 { rows_nd } else { rows_nd.cast(DType::F32) }
    }

    fn layers(&self) -> &[StreamLayer<B>] {
        &self.layers
    }
}
