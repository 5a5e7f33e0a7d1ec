//! A configuration, as tasks and the shared parts see it.

use std::path::Path;

use coxswain_nn::lora::Module;

use super::{
    config::{DeepStackConfig, Qwen3VlConfig},
    modules::modules,
    rules::RULES,
};
use crate::{
    pretrained::{error::ModelError, pictures::PatchShape, rules::Rules},
    two_towers::sizes::{TextSizes, TowersConfig, TowersSizes},
};

impl TowersConfig for Qwen3VlConfig {
    type Vision = DeepStackConfig;

    const RULES: Rules = RULES;

    const CLASS: &'static str = "Qwen3VLForConditionalGeneration";

    fn read(dir: &Path) -> Result<Self, ModelError> {
        Self::from_dir(dir)
    }

    fn cut(self, layers: usize) -> Self {
        let text = TextSizes { num_layers: self.text.num_layers.min(layers), ..self.text };
        Self { text, ..self }
    }

    fn sizes(&self) -> TowersSizes {
        TowersSizes {
            text: self.text.clone(),
            tokens: self.tokens,
            merge: self.vision.spatial_merge_size,
            patch_values: self.vision.patch_values(),
            tied: self.tie_word_embeddings,
        }
    }

    fn modules(&self) -> Vec<Module> {
        modules(self)
    }

    fn vision(&self) -> &DeepStackConfig {
        &self.vision
    }

    fn vision_blocks(&self) -> [usize; 2] {
        [self.vision.depth, self.vision.hidden_size]
    }

    fn patches(&self) -> PatchShape {
        PatchShape {
            patch: self.vision.patch_size,
            merge: self.vision.spatial_merge_size,
            frames: self.vision.temporal_patch_size,
        }
    }

    fn streams(&self) -> usize {
        self.vision.deepstack_blocks.len()
    }
}
