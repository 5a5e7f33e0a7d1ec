//! What may be kept of a policy: features of images, which tower and connector make of pixels alone; keys
//! and values of whole prompts in every layer; or their hidden states, where a policy reads those.

use coxswain_models::pretrained::frozen::frozen_tensors;
use coxswain_nn::{
    kernels::Tape,
    params::{Group, Trainables},
};
use coxswain_policies::KeptTokens;
use coxswain_task::{Batch, CachedFeatures, Extractor, FeatureShape, FrozenWeights, TaskError};

use super::PolicyObjective;
use crate::{
    frozen::FrozenTensors,
    vla_flow::{base::PolicyBase, data::MicroBatch},
};

/// Which tokens of a sample have features.
pub fn shape(base: &PolicyBase, kept: KeptTokens) -> FeatureShape {
    let width = kept.width(&base.outline);
    match kept {
        KeptTokens::Images(tokens) => FeatureShape::new(width, move |_, images| images.len() * tokens),
        KeptTokens::Prompt | KeptTokens::KeysValues => FeatureShape::every_token(width),
    }
}

impl<B: Tape<Base = B>> Extractor<B> for PolicyObjective<B> {
    fn tap(&self) -> String {
        match self.passes.kept {
            KeptTokens::Images(_) => "the features of the images (tower and connector)".into(),
            KeptTokens::Prompt => "the hidden states of the prompts".into(),
            KeptTokens::KeysValues => "keys and values of the prompts in every layer".into(),
        }
    }

    fn describe(&self) -> Vec<String> {
        vec![
            format!("features: {}", self.tap()),
            format!("skipped for cached samples: reading and scaling images, {}", self.skipped()),
            "all steps train the same parameters as without a cache".into(),
        ]
    }

    fn shape(&self) -> FeatureShape {
        shape(&self.base, self.passes.kept)
    }

    fn resting(&self) -> Group {
        Group::LORA
    }

    fn row_values(&self, batch: &dyn Batch) -> Vec<usize> {
        let batch: &MicroBatch = batch.content();
        let width = self.passes.kept.width(&self.base.outline);
        match self.passes.kept {
            KeptTokens::Images(tokens) => {
                batch.images_per_row.iter().map(|&images| images as usize * tokens * width).collect()
            }
            KeptTokens::Prompt | KeptTokens::KeysValues => {
                batch.valid.iter().map(|row| row.len() * width).collect()
            }
        }
    }

    fn compute(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<CachedFeatures, TaskError> {
        Ok(self.passes.features(trainables, batch.content())?)
    }

    fn frozen(&self) -> Result<Box<dyn FrozenWeights>, TaskError> {
        let (PolicyBase { directory, outline, kind, .. }, kept) = (&self.base, self.passes.kept);
        let rules = kind.rules();
        let below = frozen_tensors(rules, &self.base.modules()).into_iter().map(|tensor| tensor.name);
        let below = below.filter(|name| kind.is_kept_above(kept, name));
        let sizes = (outline.image_side, outline.patches, outline.layer);
        let dtype = self.settings.model.weights_dtype;
        let about = format!("{}\n{}\n{dtype:?}\n{sizes:?}", directory.kind(), B::name(&self.passes.device));
        let tensors = FrozenTensors::from_checkpoint(&directory.dir, rules, below, &about);
        Ok(Box::new(tensors.map_err(TaskError::bad_input)?))
    }
}

impl<B: Tape<Base = B>> PolicyObjective<B> {
    /// What need not run.
    fn skipped(&self) -> &'static str {
        match self.passes.kept {
            KeptTokens::Images(_) => "the vision tower and the connector",
            KeptTokens::Prompt | KeptTokens::KeysValues => "and the vision-language model",
        }
    }
}
