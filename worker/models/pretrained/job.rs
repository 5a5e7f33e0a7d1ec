//! What is asked of a family: one pass for `cox model forward`, and to be told of stages.

use std::path::Path;

use coxswain_nn::dtypes::FrozenDtype;

/// One forward pass from file to file.
#[derive(Clone, Copy, Debug)]
pub struct ForwardJob<'a> {
    /// Directory of the model.
    pub model: &'a Path,
    /// PEFT directory of an adapter.
    pub adapter: Option<&'a Path>,
    /// File of the inputs.
    pub inputs: &'a Path,
    /// File of the results.
    pub out: &'a Path,
    /// Type in which the model's matrices are kept.
    pub dtype: FrozenDtype,
}

/// Told of a pass's stages: each by its name, when it ends.
pub type Lap<'l> = &'l mut dyn FnMut(&'static str);
