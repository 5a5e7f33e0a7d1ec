//! `config.json`, as checked sizes.

use std::path::Path;

use coxswain_models::pretrained::{config_file, error::ModelError, fields::Fields};

use super::rules::MODEL_TYPE;

/// `config.json`, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Rows of the table of token embeddings.
    pub vocab_size: usize,
    /// Width between blocks.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Blocks.
    pub layers: usize,
    /// Heads of attention; they divide the width.
    pub heads: usize,
    /// Added to the mean square in norms.
    pub norm_eps: f64,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Token ids with a meaning to the model.
    pub tokens: SpecialTokens,
}

/// Token ids with a meaning to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Replaced by a patch.
    pub image: u32,
    /// Begins a turn.
    pub begin: u32,
    /// Ends one.
    pub end: u32,
}

impl Config {
    /// Reads `config.json` of a model directory.
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        let (path, json) = config_file::read(dir)?;
        let root = Fields::new(&path, &json)?;
        root.expect_str("model_type", MODEL_TYPE)?;
        let (hidden_size, heads) = (root.size("hidden_size")?, root.size("num_attention_heads")?);
        root.divides("num_attention_heads", heads, "hidden_size", hidden_size)?;
        let vocab_size = root.size("vocab_size")?;
        let token = |field: &str| match root.size(field)? {
            id if id < vocab_size => Ok(id as u32),
            id => Err(root.error(field, format!("{id} lies outside the vocabulary of {vocab_size}"))),
        };
        Ok(Self {
            vocab_size,
            hidden_size,
            intermediate_size: root.size("intermediate_size")?,
            layers: root.size("num_hidden_layers")?,
            heads,
            norm_eps: root.positive("norm_eps")?.unwrap_or(1e-6),
            patch_size: root.size("patch_size")?,
            tokens: SpecialTokens {
                image: token("image_token_id")?,
                begin: token("begin_token_id")?,
                end: token("end_token_id")?,
            },
        })
    }

    /// Values of one patch: three colours of every pixel.
    pub fn patch_values(&self) -> usize {
        3 * self.patch_size * self.patch_size
    }
}
