//! What is wrong with a saved state.

/// Why a saved state cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Not a safetensors file, or a damaged one.
    #[error("optimizer file {file}: {detail}")]
    Unreadable {
        /// Number in the list given.
        file: usize,
        /// What is wrong.
        detail: String,
    },
    /// A tensor that this run has no place for.
    #[error("optimizer file {file}: tensor {tensor}: {detail}")]
    Tensor {
        /// Number in the list given.
        file: usize,
        /// Name.
        tensor: String,
        /// What does not fit.
        detail: String,
    },
    /// Files of different steps.
    #[error(
        "optimizer file {file} is of step {found}, but earlier files are of step {expected}: they belong \
         to different checkpoints"
    )]
    Steps {
        /// Number in the list given.
        file: usize,
        /// Steps of the first file.
        expected: u64,
        /// Steps of this one.
        found: u64,
    },
    /// Values that no file, or more than one, has.
    #[error(
        "{kind} of {parameter}: values {begin}..{end} are in {copies} of the checkpoint's files instead of one"
    )]
    Coverage {
        /// A buffer of the update rule's state, or `ema`.
        kind: &'static str,
        /// Whose.
        parameter: String,
        /// First such value of the parameter.
        begin: usize,
        /// One past the last.
        end: usize,
        /// 0 or 2.
        copies: usize,
    },
}

impl StateError {
    /// The number, in the list given, of the file that is to blame; none if all are.
    pub fn file(&self) -> Option<usize> {
        match self {
            Self::Unreadable { file, .. } | Self::Tensor { file, .. } | Self::Steps { file, .. } => {
                Some(*file)
            }
            Self::Coverage { .. } => None,
        }
    }
}
