//! Tower, projector, table and decoder layers.

use burn::tensor::{DType, Int, Tensor, TensorData};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
    params::{ParamId, ParamScope, Trainables},
};

use super::{config::PaliGemmaConfig, vision::ProjectedTower};
use crate::{
    joint::{JointModel, JointOutline, LayerKind, StreamLayer},
    pretrained::{error::ModelError, loader::Loader},
};

/// A PaliGemma model, without its LM head.
pub(super) struct PaliGemmaModel<B: ModelBackend> {
    outline: JointOutline,
    images: ProjectedTower<B>,
    table_vd: Tensor<B, 2>,
    layers: Vec<StreamLayer<B>>,
}

impl<B: ModelBackend> PaliGemmaModel<B> {
    /// Loads what lies behind `prefix`.
    pub fn load(
        config: &PaliGemmaConfig,
        outline: JointOutline,
        prefix: &str,
        loader: &mut Loader<'_, B>,
    ) -> Result<Self, ModelError> {
        let at = format!("{prefix}model");
        let images = ProjectedTower::load(config, &at, loader)?;
        // Table and head are one tensor, which files have under either name; LeRobot's have it twice, and
        // read the table's.
        let names = [format!("{at}.language_model.embed_tokens.weight"), format!("{prefix}lm_head.weight")];
        let stored = names.iter().find(|name| loader.checkpoint.contains(name)).unwrap_or(&names[0]);
        let table_vd = loader.matrix(stored, [config.vocab_size, config.layer.width])?;
        let layer = |number| {
            let at = format!("{at}.language_model.layers.{number}");
            StreamLayer::load(loader, &at, config.layer, LayerKind::Gemma)
        };
        let layers = (0..outline.layers).map(layer).collect::<Result<_, _>>()?;
        Ok(Self { outline, images, table_vd, layers })
    }
}

impl<B: Tape<Base = B>> JointModel<B> for PaliGemmaModel<B> {
    fn outline(&self) -> &JointOutline {
        &self.outline
    }

    fn tower(&self, trainables: &Trainables<B>, patches_pi: Tensor<B, 2>) -> Tensor<B, 2> {
        self.images.tower.run(&ParamScope::<B>::frozen(trainables), patches_pi)
    }

    fn connector(&self) -> &LoraLinear<B> {
        &self.images.projector
    }

    fn token_embeddings(&self, _trainables: &Trainables<B>, ids: &[u32]) -> Tensor<B, 2> {
        let (ids, count): (Vec<i32>, _) = (ids.iter().map(|&id| id as i32).collect(), ids.len());
        let ids: Tensor<B, 1, Int> =
            Tensor::from_data(TensorData::new(ids, [count]), &self.table_vd.device());
        let rows_nd = self.table_vd.clone().select(0, ids);
        let rows_nd = if rows_nd.dtype() == DType::F32 { rows_nd } else { rows_nd.cast(DType::F32) };
        rows_nd * (self.outline.layer.width as f32).sqrt()
    }

    fn trained_table(&self) -> Option<ParamId> {
        None
    }

    fn layers(&self) -> &[StreamLayer<B>] {
        &self.layers
    }
}
