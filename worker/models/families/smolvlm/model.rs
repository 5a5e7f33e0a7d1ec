//! Tower, connector, table and decoder layers.

use burn::tensor::{DType, Int, Tensor, TensorData};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
    params::{BaseWeight, ParamId, ParamScope, Trainables},
};

use super::{config::SmolVlmConfig, vision::ImageTower};
use crate::{
    joint::{JointModel, JointOutline, LayerKind, StreamLayer},
    pretrained::{error::ModelError, loader::Loader},
};

/// A SmolVLM2 model, without its LM head.
pub(super) struct SmolVlmModel<B: ModelBackend> {
    outline: JointOutline,
    images: ImageTower<B>,
    table_vd: BaseWeight<B, 2>,
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
        let shape = [config.vocab_size, config.layer.width];
        let table_vd = match loader.trained_table(&table, shape) {
            Some(id) => BaseWeight::Trained(id),
            None => loader.matrix(&table, shape)?.into(),
        };
        let layer = |number| {
            let at = format!("{at}.text_model.layers.{number}");
            StreamLayer::load(loader, &at, config.layer, LayerKind::Llama)
        };
        let layers = (0..outline.layers).map(layer).collect::<Result<_, _>>()?;
        Ok(Self { outline, images, table_vd, layers })
    }
}

impl<B: Tape<Base = B>> JointModel<B> for SmolVlmModel<B> {
    fn outline(&self) -> &JointOutline {
        &self.outline
    }

    fn tower(&self, trainables: &Trainables<B>, patches_pi: Tensor<B, 2>) -> Tensor<B, 2> {
        self.images.run(&ParamScope::<B>::frozen(trainables), patches_pi)
    }

    fn connector(&self) -> &LoraLinear<B> {
        &self.images.connector
    }

    fn token_embeddings(&self, trainables: &Trainables<B>, ids: &[u32]) -> Tensor<B, 2> {
        let table_vd = self.table_vd.on_tape(&ParamScope::<B>::frozen(trainables));
        let ids: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        let count = ids.len();
        let ids: Tensor<B, 1, Int> = Tensor::from_data(TensorData::new(ids, [count]), &table_vd.device());
        let rows_nd = table_vd.select(0, ids);
        if rows_nd.dtype() == DType::F32 { rows_nd } else { rows_nd.cast(DType::F32) }
    }

    fn trained_table(&self) -> Option<ParamId> {
        self.table_vd.trained()
    }

    fn layers(&self) -> &[StreamLayer<B>] {
        &self.layers
    }
}
