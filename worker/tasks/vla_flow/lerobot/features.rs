//! What may be kept of a policy: features of images, which tower and connector make of pixels alone.

use coxswain_models::pretrained::rules::Place;
use coxswain_nn::{
    kernels::Tape,
    params::{Group, Trainables},
};
use coxswain_task::{Batch, CachedFeatures, Extractor, FeatureShape, FrozenWeights, TaskError};

use super::PolicyObjective;
use crate::{
    frozen::FrozenTensors,
    vla_flow::{base::PolicyBase, data::MicroBatch},
};

/// Where they are taken.
const TAP: &str = "the features of the images (tower and connector)";

/// Which tokens of a sample have features.
pub fn shape(base: &PolicyBase) -> FeatureShape {
    let tokens = base.outline.image_tokens();
    FeatureShape::new(base.outline.layer.width, move |_, images| images.len() * tokens)
}

impl<B: Tape<Base = B>> Extractor<B> for PolicyObjective<B> {
    fn tap(&self) -> String {
        TAP.into()
    }

    fn describe(&self) -> Vec<String> {
        vec![
            format!("features: {TAP}"),
            "skipped for cached samples: reading and scaling images, the vision tower and the connector"
                .into(),
            "every step: the same parameters as without a cache".into(),
        ]
    }

    fn shape(&self) -> FeatureShape {
        shape(&self.base)
    }

    fn resting(&self) -> Group {
        Group::LORA
    }

    fn row_values(&self, batch: &dyn Batch) -> Vec<usize> {
        let batch: &MicroBatch = batch.content();
        let values = self.base.outline.image_tokens() * self.base.outline.layer.width;
        batch.images_per_row.iter().map(|&images| images as usize * values).collect()
    }

    fn compute(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<CachedFeatures, TaskError> {
        Ok(self.passes.features(trainables, batch.content())?)
    }

    fn frozen(&self) -> Result<Box<dyn FrozenWeights>, TaskError> {
        let PolicyBase { directory, outline, kind, .. } = &self.base;
        let rules = kind.rules();
        let below = outline.tensors.iter().map(|(name, _)| name.clone());
        let below = below.filter(|name| matches!((rules.place)(name), Place::Vision(_)));
        let sizes = (outline.image_side, outline.patches, outline.layer);
        let dtype = self.settings.model.weights_dtype;
        let about = format!("{}\n{}\n{dtype:?}\n{sizes:?}", directory.kind(), B::name(&self.passes.device));
        let tensors = FrozenTensors::from_checkpoint(&directory.dir, rules, below, &about);
        Ok(Box::new(tensors.map_err(TaskError::bad_input)?))
    }
}
