//! What of a configuration the shared parts need to know.

use std::{fmt, path::Path};

use coxswain_nn::lora::Module;

use crate::{
    pretrained::{error::ModelError, fields::Fields, pictures::PatchShape, rules::Rules},
    vision_language::{ModelOutline, PromptTokens, outline::VisionOutline},
};

/// Sizes of a language model of decoder layers.
#[derive(Clone, Debug, PartialEq)]
pub struct TextSizes {
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Model width.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether each head's query and key is normed before it is turned.
    pub head_norms: bool,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// The axis (time, height, width) that each rotary frequency turns with, `[head_dim / 2]`.
    pub rotary_axes: Vec<usize>,
}

/// Token ids with a meaning to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Replaced by image features.
    pub image: u32,
    /// Would be replaced by video features; refused in prompts.
    pub video: u32,
    /// Precedes an image.
    pub vision_start: u32,
    /// Follows an image.
    pub vision_end: u32,
}

impl SpecialTokens {
    /// The special tokens in the outermost object of `config.json`, within a vocabulary of so many.
    pub(crate) fn from_fields(root: &Fields<'_>, vocab: usize) -> Result<Self, ModelError> {
        let id = |field: &str, default: usize| -> Result<u32, ModelError> {
            let id = root.uint(field)?.unwrap_or(default);
            if id >= vocab {
                return Err(root.error(field, format!("{id} is outside the vocabulary (vocab_size {vocab})")));
            }
            Ok(id as u32)
        };
        let tokens = Self {
            image: id("image_token_id", 151_655)?,
            video: id("video_token_id", 151_656)?,
            vision_start: id("vision_start_token_id", 151_652)?,
            vision_end: id("vision_end_token_id", 151_653)?,
        };
        if tokens.image == tokens.video {
            return Err(root.error("video_token_id", format!("{} is also the image token", tokens.video)));
        }
        Ok(tokens)
    }
}

/// Sizes of both towers, as far as the shared parts need them.
#[derive(Clone, Debug, PartialEq)]
pub struct TowersSizes {
    /// The language model.
    pub text: TextSizes,
    /// Token ids.
    pub tokens: SpecialTokens,
    /// Side of the square of patches that becomes one token.
    pub merge: usize,
    /// Values of one patch.
    pub patch_values: usize,
    /// Whether the LM head is the embedding table.
    pub tied: bool,
}

/// A family's `config.json`, as the shared parts read it.
pub trait TowersConfig: fmt::Debug + Sized {
    /// Sizes of the vision tower.
    type Vision: fmt::Debug;

    /// What names mean.
    const RULES: Rules;

    /// The class of Transformers that reads it.
    const CLASS: &'static str;

    /// Reads `config.json` of a model directory.
    fn read(dir: &Path) -> Result<Self, ModelError>;

    /// A model with only the first so many decoder layers; with all if there are not more.
    fn cut(self, layers: usize) -> Self;

    /// Sizes of both towers.
    fn sizes(&self) -> TowersSizes;

    /// All named modules, in the order of Transformers' class.
    fn modules(&self) -> Vec<Module>;

    /// All sizes of the vision tower.
    fn vision(&self) -> &Self::Vision;

    /// Blocks of the vision tower, and their width.
    fn vision_blocks(&self) -> [usize; 2];

    /// Sizes of patches.
    fn patches(&self) -> PatchShape;

    /// Streams that leave the vision tower before its last block.
    fn streams(&self) -> usize {
        0
    }

    /// The sizes as tasks see them.
    fn outline(&self) -> ModelOutline {
        let (TowersSizes { text, tokens, .. }, [depth, width]) = (self.sizes(), self.vision_blocks());
        let special = [tokens.image, tokens.video, tokens.vision_start, tokens.vision_end];
        ModelOutline {
            rules: Self::RULES,
            class: Self::CLASS,
            modules: self.modules(),
            hidden_size: text.hidden_size,
            layers: text.num_layers,
            streams: self.streams(),
            vocab_size: text.vocab_size,
            patches: self.patches(),
            tokens: PromptTokens {
                image: tokens.image,
                around: [tokens.vision_start, tokens.vision_end],
                word: (0..).find(|id| !special.contains(id)).unwrap_or_default(),
            },
            sizes: format!("{self:?}"),
            vision: VisionOutline { depth, width, sizes: format!("{:?}", self.vision()) },
        }
    }
}
