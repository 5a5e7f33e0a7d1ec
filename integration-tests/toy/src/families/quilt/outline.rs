//! A configuration, as tasks see it.

use coxswain_models::{
    pretrained::pictures::PatchShape,
    vision_language::{ModelOutline, PromptTokens, outline::VisionOutline},
};

use super::{
    config::Config,
    modules::modules,
    rules::{CLASS, RULES},
};

/// A configuration, as tasks see it.
pub fn outline(config: &Config) -> ModelOutline {
    let special = [config.tokens.image, config.tokens.begin, config.tokens.end];
    let word = (0..).find(|id| !special.contains(id)).unwrap_or_default();
    ModelOutline {
        rules: RULES,
        class: CLASS,
        modules: modules(config),
        hidden_size: config.hidden_size,
        layers: config.layers,
        streams: 0,
        vocab_size: config.vocab_size,
        patches: patch_shape(config),
        // Nothing stands around an image.
        tokens: PromptTokens { image: config.tokens.image, around: [word; 2], word },
        sizes: format!("{config:?}"),
        vision: VisionOutline {
            depth: 0,
            width: config.hidden_size,
            sizes: format!("patches of {}", config.patch_size),
        },
    }
}

/// What images are cut into.
pub fn patch_shape(config: &Config) -> PatchShape {
    PatchShape { patch: config.patch_size, merge: 1, frames: 1 }
}
