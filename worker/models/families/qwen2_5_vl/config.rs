//! `config.json` of a Qwen2.5-VL checkpoint, as checked sizes.
//!
//! Two layouts are read. *Flat*, as published: text fields at the top level, `rope_scaling`, `in_chans`,
//! `torch_dtype`. *Nested*, as Transformers 5 writes: `text_config`, `rope_parameters`, `in_channels`,
//! `dtype`. Files that carry both must agree with themselves. Sizes have no defaults; the rest takes
//! Transformers' own. What the model code cannot honour (sliding windows, scaled rotary embeddings, other
//! activations) is refused here, by field, rather than computed wrongly later.

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

/// Sizes of the language model.
#[derive(Clone, Debug, PartialEq)]
pub struct TextConfig {
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
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Rotary frequencies per axis (time, height, width); sums to `head_dim / 2`.
    pub mrope_section: [usize; 3],
}

/// Sizes of the vision tower.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
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
    /// Side of an attention window in pixels.
    pub window_size: usize,
    /// Width of the features handed to the language model.
    pub out_hidden_size: usize,
    /// Blocks that attend over a whole frame instead of windows.
    pub full_attention_blocks: Vec<usize>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
}

impl VisionConfig {
    /// Values of one patch: `channels * frames * side * side`.
    pub fn patch_values(&self) -> usize {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// Patches of one token.
    pub fn merge_unit(&self) -> usize {
        self.spatial_merge_size * self.spatial_merge_size
    }

    /// Side of an attention window in tokens.
    pub fn window_tokens(&self) -> usize {
        self.window_size / self.spatial_merge_size / self.patch_size
    }
}

/// `config.json`, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct QwenConfig {
    /// The language model.
    pub text: TextConfig,
    /// The vision tower.
    pub vision: VisionConfig,
    /// Token ids.
    pub tokens: SpecialTokens,
    /// Whether the LM head is the embedding table.
    pub tie_word_embeddings: bool,
}

impl QwenConfig {
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
        root.expect_pretrained("a Qwen2.5-VL checkpoint")?;
        root.expect_str("model_type", "qwen2_5_vl")?;
        let text_fields = match root.object("text_config")? {
            Some(nested) => {
                root.agree(
                    &nested,
                    &["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"],
                )?;
                root.agree(&nested, &["num_attention_heads", "num_key_value_heads", "rms_norm_eps"])?;
                nested
            }
            None => root.clone(),
        };
        let text = read_text(&text_fields)?;
        let vision_fields = root
            .object("vision_config")?
            .ok_or_else(|| root.error("vision_config", "missing; text-only checkpoints are not supported"))?;
        let vision = read_vision(&vision_fields)?;
        check_widths(&vision_fields, vision.out_hidden_size, text.hidden_size)?;
        root.same_if_both("torch_dtype", "dtype")?;
        let tie_word_embeddings = root.bool("tie_word_embeddings")?.unwrap_or(false)
            || text_fields.bool("tie_word_embeddings")?.unwrap_or(false);
        let tokens = SpecialTokens::from_fields(&root, text.vocab_size)?;
        Ok(Self { text, vision, tokens, tie_word_embeddings })
    }
}

impl TextConfig {
    /// As the shared parts have them: each axis turns a run of frequencies.
    pub(super) fn sizes(&self) -> TextSizes {
        TextSizes {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_layers: self.num_layers,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            rms_norm_eps: self.rms_norm_eps,
            qkv_bias: true,
            head_norms: false,
            rope_theta: self.rope_theta,
            rotary_axes: (0..3).flat_map(|axis| vec![axis; self.mrope_section[axis]]).collect(),
        }
    }
}

fn read_text(f: &Fields<'_>) -> Result<TextConfig, ModelError> {
    f.expect_str("hidden_act", "silu")?;
    let num_layers = f.size("num_hidden_layers")?;
    refuse_sliding_window(f, num_layers)?;
    let hidden_size = f.size("hidden_size")?;
    let num_heads = f.size("num_attention_heads")?;
    let num_kv_heads = f.uint("num_key_value_heads")?.unwrap_or(num_heads);
    f.divides("num_attention_heads", num_heads, "hidden_size", hidden_size)?;
    f.divides("num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)?;
    let head_dim = hidden_size / num_heads;
    if let Some(found) = f.uint("head_dim")?
        && found != head_dim
    {
        return Err(
            f.error("head_dim", format!("{found}, but hidden_size / num_attention_heads is {head_dim}"))
        );
    }
    if !head_dim.is_multiple_of(2) {
        let problem = format!("gives heads a width of {head_dim}; RoPE needs an even width");
        return Err(f.error("num_attention_heads", problem));
    }
    let (theta, mrope_section) = text_rope(f, head_dim / 2, [16, 24, 24], "\"default\" or \"mrope\"")?;
    Ok(TextConfig {
        vocab_size: f.size("vocab_size")?,
        hidden_size,
        intermediate_size: f.size("intermediate_size")?,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        rms_norm_eps: f.positive("rms_norm_eps")?.unwrap_or(1e-5),
        rope_theta: theta.unwrap_or(1e6),
        mrope_section,
    })
}

/// Transformers 5 applies a sliding window only to layers at or above `max_window_layers`, and only when
/// asked to.
fn refuse_sliding_window(f: &Fields<'_>, num_layers: usize) -> Result<(), ModelError> {
    const REMEDY: &str =
        "sliding-window attention is not supported; published Qwen2.5-VL checkpoints do not use it";
    if f.bool("use_sliding_window")?.unwrap_or(false)
        && f.uint("max_window_layers")?.unwrap_or(80) < num_layers
    {
        return Err(f.error("use_sliding_window", REMEDY));
    }
    if let Some(Value::Array(kinds)) = f.get("layer_types") {
        if kinds.len() != num_layers {
            let problem = format!("{} entries, but num_hidden_layers is {num_layers}", kinds.len());
            return Err(f.error("layer_types", problem));
        }
        if kinds.iter().any(|kind| kind != "full_attention") {
            return Err(f.error("layer_types", REMEDY));
        }
    }
    Ok(())
}

fn read_vision(f: &Fields<'_>) -> Result<VisionConfig, ModelError> {
    f.expect_str("hidden_act", "silu")?;
    f.same_if_both("in_channels", "in_chans")?;
    f.same_if_both("patch_size", "spatial_patch_size")?;
    let [hidden_size, num_heads, head_dim] = vision_heads(f)?;
    let depth = f.size("depth")?;
    let full_attention_blocks = f.uints("fullatt_block_indexes")?.unwrap_or_else(|| vec![7, 15, 23, 31]);
    if let Some(beyond) = full_attention_blocks.iter().find(|&&block| block >= depth) {
        return Err(f.error("fullatt_block_indexes", format!("block {beyond} does not exist: depth {depth}")));
    }
    let config = VisionConfig {
        depth,
        hidden_size,
        intermediate_size: f.size("intermediate_size")?,
        num_heads,
        head_dim,
        in_channels: f.uint("in_channels")?.or(f.uint("in_chans")?).unwrap_or(3),
        patch_size: f.side("patch_size")?.unwrap_or(14),
        temporal_patch_size: f.side("temporal_patch_size")?.unwrap_or(2),
        spatial_merge_size: f.uint("spatial_merge_size")?.unwrap_or(2),
        window_size: f.uint("window_size")?.unwrap_or(112),
        out_hidden_size: f.size("out_hidden_size")?,
        full_attention_blocks,
        rope_theta: vision_rope(f)?,
    };
    if config.patch_values() == 0 || config.spatial_merge_size == 0 {
        let problem = "patch_size, temporal_patch_size, in_channels or spatial_merge_size is 0";
        return Err(f.error("patch_size", problem));
    }
    let token = config.patch_size * config.spatial_merge_size;
    if config.window_size < token {
        let problem = format!("{} pixels; expected at least {token} (one token)", config.window_size);
        return Err(f.error("window_size", problem));
    }
    Ok(config)
}
