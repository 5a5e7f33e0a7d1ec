//! What can be wrong with a checkpoint, an adapter or an input file, said so that its owner can mend it.
//!
//! Every variant names the file, the field or tensor in it, what was found, and what to do.

use std::{io, path::PathBuf};

use coxswain_nn::lora::LoraError;

/// What is wrong with a weight that float16 cannot hold, and what to do.
pub const BEYOND_FLOAT16: &str = "holds values that are NaN, infinite or beyond float16's maximum of 65504: \
                                  set `model.weights_dtype` to bfloat16 or float32";

/// A model directory, or tensors for it, that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be opened, read or written.
    #[error("{}: {source}; {remedy}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// The directory lies elsewhere, and could not be brought.
    #[error("{0}")]
    Away(#[from] coxswain_data::DataError),
    /// A device did not take weights.
    #[error("the weights cannot be copied to the device: {0}; `cox selftest --device cuda` shows what fails")]
    Device(String),
    /// Products in float16 were asked for on a CPU.
    #[error("float16 works only on GPUs; on a CPU use bfloat16 (same memory) or float32 (no rounding)")]
    Float16OnHost,
    /// A table was to stay in host memory, and is needed where the model is.
    #[error(
        "`memory.offload` is `embedding`, but the table of token embeddings {0}, so it must be on the \
         model's device; set `memory.offload: none`"
    )]
    OffloadedTable(&'static str),
    /// Frozen weights were to be shared out among GPUs.
    #[error(
        "`memory.shard: frozen` works only on CPUs: gathering blocks into a GPU's memory is not implemented; \
         remove `memory.shard`, or train on a CPU (`--device cpu`)"
    )]
    ShardedOnDevice,
    /// A JSON file is not JSON.
    #[error("{}: not valid JSON: {source}; download the file again", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line, column and reason.
        source: serde_json::Error,
    },
    /// A field of `config.json` is missing, of the wrong type, contradicts another, or asks for what is not
    /// supported.
    #[error("{}: `{field}`: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Dotted path of the field.
        field: String,
        /// What was found, what was expected, and what to do.
        problem: String,
    },
    /// A safetensors file is truncated, garbled, or not safetensors at all.
    #[error("{}: {problem}; download or copy the file again", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What was found.
        problem: String,
    },
    /// The checkpoint lacks a tensor that `config.json` asks for.
    #[error(
        "{}: no tensor `{tensor}` of shape {expected:?}, which config.json asks for; the directory holds another model, or a shard is missing",
        path.display()
    )]
    MissingTensor {
        /// The model directory, or the file that its index names.
        path: PathBuf,
        /// The tensor, in the spelling of Transformers 5.
        tensor: String,
        /// Shape according to `config.json`.
        expected: Vec<usize>,
    },
    /// A weight is larger than float16 can say.
    #[error("{}: tensor `{tensor}` {BEYOND_FLOAT16}", path.display())]
    BeyondFloat16 {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A weight is no number.
    #[error(
        "{}: tensor `{tensor}` holds values that are not finite (NaN or infinity): the file is damaged; download or copy it again",
        path.display()
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor's shape contradicts `config.json`.
    #[error(
        "{}: tensor `{tensor}` has shape {found:?}, but config.json asks for {expected:?}; the two files are not of the same model",
        path.display()
    )]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor as the file spells it.
        tensor: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape according to `config.json`.
        expected: Vec<usize>,
    },
    /// A tensor is stored in a type that is not read.
    #[error(
        "{}: tensor `{tensor}` is stored as {found}; expected F32, BF16 or F16: save the checkpoint in one of these (quantised checkpoints are not supported)",
        path.display()
    )]
    UnsupportedDtype {
        /// The file.
        path: PathBuf,
        /// The tensor as the file spells it.
        tensor: String,
        /// Type in the file.
        found: String,
    },
    /// An input tensor of `model forward` is missing or does not fit the model.
    #[error("{}: `{tensor}`: {problem}", path.display())]
    Input {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: &'static str,
        /// What was found, what was expected, and what to do.
        problem: String,
    },
    /// Token ids or image grids that do not fit the model or each other.
    #[error("{0}")]
    Tokens(#[from] TokenError),
    /// An adapter that does not fit.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// Weights that cannot be read again.
    #[error(transparent)]
    Unreadable(#[from] UnreadableWeights),
}

/// Frozen weights that are read while training runs (`memory.offload: layers`, `memory.shard: frozen`), and
/// cannot be read any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: tensor `{tensor}` cannot be read again: {problem}; with memory.offload `layers` or memory.shard \
     `frozen` the file must not change during the run: restore it and start again, or copy the model to a \
     reliable disk",
    path.display()
)]
pub struct UnreadableWeights {
    /// The file.
    pub path: PathBuf,
    /// The tensor as the file spells it.
    pub tensor: String,
    /// The system's reason, or how the file differs from what was opened.
    pub problem: String,
}

/// Token ids and image grids that do not fit the model or each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The prompt's image tokens and the images disagree.
    #[error(
        "row {row}: {tokens} image tokens (id {id}), but the row's images need {features}; expand each image placeholder to t * h * w / merge^2 tokens"
    )]
    ImageTokens {
        /// Batch row.
        row: usize,
        /// Image token id.
        id: u32,
        /// Image tokens in the row.
        tokens: usize,
        /// Features of the images that fall to the row.
        features: usize,
    },
    /// More or fewer images than the image tokens of all rows call for.
    #[error("images: {given} given, {used} used by the image tokens of all rows")]
    ImageCount {
        /// Images given.
        given: usize,
        /// Images used.
        used: usize,
    },
    /// An image grid that the vision tower cannot take.
    #[error(
        "image {image}: grid {grid:?} (t, h, w in patches); all must be positive, h and w divisible by {merge}"
    )]
    Grid {
        /// Number of the image.
        image: usize,
        /// Grid.
        grid: [u32; 3],
        /// `spatial_merge_size`.
        merge: usize,
    },
    /// Patches that do not fit the grids.
    #[error("{found} pixel values, but the image grids call for {patches} patches of {width} values")]
    Pixels {
        /// Values found.
        found: usize,
        /// Patches that the grids call for.
        patches: usize,
        /// Values of a patch.
        width: usize,
    },
    /// A token id outside the vocabulary.
    #[error(
        "row {row}, position {position}: token id {id} is outside the vocabulary of {vocab} entries; is the tokenizer from another model?"
    )]
    Vocabulary {
        /// Batch row.
        row: usize,
        /// Position in the row.
        position: usize,
        /// The id.
        id: i64,
        /// `vocab_size`.
        vocab: usize,
    },
    /// A video token: only images are supported.
    #[error("row {row}: video token (id {id}); only text and images are supported")]
    Video {
        /// Batch row.
        row: usize,
        /// Video token id.
        id: u32,
    },
}
