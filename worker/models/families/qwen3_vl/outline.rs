//! A configuration, as tasks and the shared parts see it.

use std::path::Path;

use super::{
    config::{DeepStackConfig, Qwen3VlConfig},
    modules::modules,
    rules::RULES,
};
use crate::{
    pretrained::{error::ModelError, pictures::PatchShape, rules::Rules},
    two_towers::sizes::{TowersConfig, TowersSizes},
    vision_language::{ModelOutline, PromptTokens, outline::VisionOutline},
};

/// The class of Transformers that reads it.
const CLASS: &str = "Qwen3VLForConditionalGeneration";

/// A configuration, as tasks see it.
pub(super) fn outline(config: &Qwen3VlConfig) -> ModelOutline {
    let Qwen3VlConfig { text, vision, tokens, .. } = config;
    let special = [tokens.image, tokens.video, tokens.vision_start, tokens.vision_end];
    ModelOutline {
        rules: RULES,
        class: CLASS,
        modules: modules(config),
        hidden_size: text.hidden_size,
        layers: text.num_layers,
        streams: vision.deepstack_blocks.len(),
        vocab_size: text.vocab_size,
        patches: PatchShape {
            patch: vision.patch_size,
            merge: vision.spatial_merge_size,
            frames: vision.temporal_patch_size,
        },
        tokens: PromptTokens {
            image: tokens.image,
            around: [tokens.vision_start, tokens.vision_end],
            word: (0..).find(|id| !special.contains(id)).unwrap_or_default(),
        },
        sizes: format!("{config:?}"),
        vision: VisionOutline {
            depth: vision.depth,
            width: vision.hidden_size,
            sizes: format!("{vision:?}"),
        },
    }
}

impl TowersConfig for Qwen3VlConfig {
    type Vision = DeepStackConfig;

    const RULES: Rules = RULES;

    fn read(dir: &Path) -> Result<Self, ModelError> {
        Self::read(dir)
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

    fn vision(&self) -> &DeepStackConfig {
        &self.vision
    }

    fn outline(&self) -> ModelOutline {
        outline(self)
    }
}
