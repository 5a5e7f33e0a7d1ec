//! What a task can do without a run: `cox init`, `cox model`, `cox data sample`, `cox data make-checkpoint`.

use std::path::Path;

use coxswain_nn::dtypes::FrozenDtype;

/// One forward pass from file to file: what to read, and where to write.
#[derive(Clone, Copy, Debug)]
pub struct ForwardJob<'a> {
    /// Directory of the model.
    pub model: &'a Path,
    /// PEFT directory of an adapter.
    pub adapter: Option<&'a Path>,
    /// Directory of the model that a policy names, if it is given.
    pub backbone: Option<&'a Path>,
    /// File of the inputs.
    pub inputs: &'a Path,
    /// File of the results.
    pub out: &'a Path,
    /// How the model's matrices are kept.
    pub dtype: FrozenDtype,
    /// Whether gradients of what would train of a policy are wanted. An adapter's always are.
    pub gradients: bool,
}

/// A checkpoint with random weights and the shapes of another one.
#[derive(Clone, Copy, Debug)]
pub struct RandomJob<'a> {
    /// Directory whose configuration gives the shapes.
    pub like: &'a Path,
    /// Directory of the tokenizer, if it is not there.
    pub tokenizer: Option<&'a Path>,
    /// Directory to make.
    pub out: &'a Path,
    /// Whether weights are bfloat16, not float32.
    pub bfloat16: bool,
    /// Keys every draw.
    pub seed: u64,
}

/// What was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointSummary {
    /// Elements.
    pub parameters: u64,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// Files of weights.
    pub shards: usize,
}

/// A run file that a user begins with.
#[derive(Clone, Copy, Debug)]
pub struct StarterJob<'a> {
    /// The data: a directory or a file.
    pub data: &'a Path,
    /// The pretrained model, if it is known.
    pub model: Option<&'a Path>,
    /// Directory of the model that a policy names, if it is given.
    pub backbone: Option<&'a Path>,
    /// Samples of a forward pass that fit, if that is known.
    pub micro_batch: Option<u64>,
    /// Whether the user asks for this task: what another would rather take is then its own.
    pub asked: bool,
}

/// A run file for the data that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StarterFile {
    /// What the data is, in a few words.
    pub saw: String,
    /// The file, with comments.
    pub text: String,
}
