//! `config.json` of a Qwen3-VL checkpoint, as checked sizes.
//!
//! Two spellings are read: the published one (`rope_theta` and `rope_scaling` in `text_config`,
//! `vision_config.model_type` "qwen3_vl"), and the one that Transformers 5 writes (`rope_parameters`). Files
//! that carry both must agree with themselves. Sizes have no defaults; the rest takes Transformers' own. What
//! the model code cannot honour (experts, scaled rotary embeddings, other activations) is refused here, by
//! field.

use std::path::Path;

use serde_json::Value;

use super::rules::RULES;
use crate::{
    pretrained::{config_file, error::ModelError, fields::Fields},
    two_towers::{
        embed::has_own_head,
        reading::{check_widths, text_rope, vision_heads, vision_rope},
        sizes::{SpecialTokens, TextSizes},
    },
};

/// Rotary frequencies per axis (time, height, width) where the configuration does not say.
const MROPE_SECTION: [usize; 3] = [24, 20, 20];

/// Sizes of the vision tower.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepStackConfig {
    /// Blocks.
    pub depth: usize,
    /// Model width.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Colour channels.
    pub in_channels: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Frames of a patch; a single image is repeated.
    pub temporal_patch_size: usize,
    /// Side of the square of patches that becomes one token.
    pub spatial_merge_size: usize,
    /// Side of the square table of learned positions.
    pub position_side: usize,
    /// Width of the features handed to the language model.
    pub out_hidden_size: usize,
    /// Blocks behind which a stream leaves the tower, ascending.
    pub deepstack_blocks: Vec<usize>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
}

impl DeepStackConfig {
    /// Values of one patch: `channels * frames * side * side`.
    pub fn patch_values(&self) -> usize {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// Width of the patches of one token side by side.
    pub fn merged_size(&self) -> usize {
        self.hidden_size * self.spatial_merge_size * self.spatial_merge_size
    }
}

/// `config.json`, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3VlConfig {
    /// The language model.
    pub text: TextSizes,
    /// The vision tower.
    pub vision: DeepStackConfig,
    /// Token ids.
    pub tokens: SpecialTokens,
    /// Whether the LM head is the embedding table.
    pub tie_word_embeddings: bool,
}

impl Qwen3VlConfig {
    /// Reads `config.json` of a model directory.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let (path, json) = config_file::read(dir)?;
        let config = Self::from_json(&path, &json)?;
        let tie_word_embeddings = config.tie_word_embeddings && !has_own_head(dir, RULES);
        Ok(Self { tie_word_embeddings, ..config })
    }

    /// Checks a parsed `config.json`; `path` appears in errors.
    pub fn from_json(path: &Path, json: &Value) -> Result<Self, ModelError> {
        let root = Fields::new(path, json)?;
        root.expect_pretrained("a Qwen3-VL checkpoint")?;
        root.expect_str("model_type", "qwen3_vl")?;
        let part = |field: &str| {
            let missing = || root.error(field, "missing; use the checkpoint's own config.json");
            root.object(field)?.ok_or_else(missing)
        };
        let (text_fields, vision_fields) = (part("text_config")?, part("vision_config")?);
        let (text, vision) = (read_text(&text_fields)?, read_vision(&vision_fields)?);
        check_widths(&vision_fields, vision.out_hidden_size, text.hidden_size)?;
        if vision.deepstack_blocks.len() > text.num_layers {
            let problem = format!(
                "{} blocks, more than the text model's {} layers",
                vision.deepstack_blocks.len(),
                text.num_layers
            );
            return Err(vision_fields.error("deepstack_visual_indexes", problem));
        }
        root.same_if_both("torch_dtype", "dtype")?;
        // Transformers takes the outer one; where that is absent files of older versions have the inner.
        let tie_word_embeddings = match root.bool("tie_word_embeddings")? {
            Some(tied) => tied,
            None => text_fields.bool("tie_word_embeddings")?.unwrap_or(false),
        };
        let tokens = SpecialTokens::from_fields(&root, text.vocab_size)?;
        Ok(Self { text, vision, tokens, tie_word_embeddings })
    }
}

fn read_text(f: &Fields<'_>) -> Result<TextSizes, ModelError> {
    f.expect_str("model_type", "qwen3_vl_text")?;
    if f.uint("num_experts")?.is_some_and(|experts| experts > 0) {
        return Err(f.error("num_experts", "mixtures of experts are not supported; use a dense Qwen3-VL"));
    }
    f.expect_str("hidden_act", "silu")?;
    if f.bool("attention_bias")?.unwrap_or(false) {
        return Err(f.error("attention_bias", "true; attention with biases is not supported"));
    }
    let num_heads = f.size("num_attention_heads")?;
    let num_kv_heads = f.uint("num_key_value_heads")?.unwrap_or(num_heads);
    f.divides("num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)?;
    let head_dim = f.uint("head_dim")?.unwrap_or(128);
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(f.error("head_dim", format!("{head_dim}; RoPE needs an even width above 0")));
    }
    let (theta, section) = text_rope(f, head_dim / 2, MROPE_SECTION, "\"default\"")?;
    for rope in [f.object("rope_parameters")?, f.object("rope_scaling")?].into_iter().flatten() {
        if rope.bool("mrope_interleaved")? == Some(false) {
            return Err(rope.error("mrope_interleaved", "false; Qwen3-VL always interleaves the axes"));
        }
    }
    Ok(TextSizes {
        vocab_size: f.size("vocab_size")?,
        hidden_size: f.size("hidden_size")?,
        intermediate_size: f.size("intermediate_size")?,
        num_layers: f.size("num_hidden_layers")?,
        num_heads,
        num_kv_heads,
        head_dim,
        rms_norm_eps: f.positive("rms_norm_eps")?.unwrap_or(1e-6),
        qkv_bias: false,
        head_norms: true,
        rope_theta: theta.unwrap_or(5e5),
        rotary_axes: interleaved(section),
    })
}

/// The axis of each frequency: time, height and width in turn while height and width last, then time.
fn interleaved(section: [usize; 3]) -> Vec<usize> {
    let [_, height, width] = section;
    let axis = |frequency: usize| match frequency % 3 {
        1 if frequency < 3 * height => 1,
        2 if frequency < 3 * width => 2,
        _ => 0,
    };
    (0..section.iter().sum()).map(axis).collect()
}

fn read_vision(f: &Fields<'_>) -> Result<DeepStackConfig, ModelError> {
    f.expect_str("hidden_act", "gelu_pytorch_tanh")?;
    f.same_if_both("in_channels", "in_chans")?;
    let [hidden_size, num_heads, head_dim] = vision_heads(f)?;
    let depth = f.size("depth")?;
    let deepstack_blocks = f.uints("deepstack_visual_indexes")?.ok_or_else(|| {
        f.error("deepstack_visual_indexes", "missing; use the checkpoint's own config.json")
    })?;
    let ascends = deepstack_blocks.windows(2).all(|pair| pair[0] < pair[1]);
    if !ascends || deepstack_blocks.last().is_some_and(|&last| last >= depth) {
        let problem = format!("{deepstack_blocks:?}; expected ascending block numbers below depth ({depth})");
        return Err(f.error("deepstack_visual_indexes", problem));
    }
    let positions = f.size("num_position_embeddings")?;
    let position_side = positions.isqrt();
    if position_side * position_side != positions {
        return Err(f.error("num_position_embeddings", format!("{positions} is not a square number")));
    }
    let config = DeepStackConfig {
        depth,
        hidden_size,
        intermediate_size: f.size("intermediate_size")?,
        num_heads,
        head_dim,
        in_channels: f.uint("in_channels")?.or(f.uint("in_chans")?).unwrap_or(3),
        patch_size: f.side("patch_size")?.unwrap_or(16),
        temporal_patch_size: f.side("temporal_patch_size")?.unwrap_or(2),
        spatial_merge_size: f.uint("spatial_merge_size")?.unwrap_or(2),
        position_side,
        out_hidden_size: f.size("out_hidden_size")?,
        deepstack_blocks,
        rope_theta: vision_rope(f)?,
    };
    if config.patch_values() == 0 || config.spatial_merge_size == 0 {
        let problem = "patch_size, temporal_patch_size, in_channels or spatial_merge_size is 0";
        return Err(f.error("patch_size", problem));
    }
    Ok(config)
}
