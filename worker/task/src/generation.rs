//! A trained model writing, text or files: `cox generate`.

use std::path::{Path, PathBuf};

use coxswain_proto::run_spec::RunSpec;

/// What to go on from, and how.
#[derive(Clone, Copy, Debug)]
pub struct GenerateJob<'a> {
    /// The run whose model writes.
    pub spec: &'a RunSpec,
    /// What that run has left; the model as training found it if absent.
    pub results: Option<&'a Path>,
    /// What is answered, each by itself.
    pub prompts: &'a [Prompt],
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Prompts that are answered side by side.
    pub batch: usize,
}

/// What one answer is written to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// The user's text, without a chat template or a source prefix.
    pub text: String,
    /// Files of images, in the order of their places in the text.
    pub images: Vec<PathBuf>,
}

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Tokens at most.
    pub max_new_tokens: usize,
    /// Logits are divided by it; 0 takes the likeliest token always.
    pub temperature: f64,
    /// The likeliest tokens with so much probability between them are drawn from; 1: all.
    pub top_p: f64,
    /// So many of the likeliest tokens are drawn from; 0: all.
    pub top_k: usize,
    /// Keys every draw, together with the prompt's number and the token's.
    pub seed: u64,
}

/// Files to make others of, with a trained model.
#[derive(Clone, Copy, Debug)]
pub struct ConvertJob<'a> {
    /// The run whose model is used.
    pub spec: &'a RunSpec,
    /// What that run has left.
    pub results: &'a Path,
    /// What is read, each by itself.
    pub files: &'a [PathBuf],
    /// The folder that gets a folder for each, of its name.
    pub out: &'a Path,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Tokens that were written, the one that ends the answer included.
    pub ids: Vec<u32>,
    /// Text, without special tokens.
    pub text: String,
    /// Whether it ended by itself, not at [`Sampling::max_new_tokens`].
    pub ended: bool,
}
