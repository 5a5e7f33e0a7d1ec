//! What an adapter can be put on, and what not.

/// A named module of the model, as `named_modules()` lists it in Transformers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Path in the spelling of Transformers 5.
    pub name: String,
    /// Path before Transformers 4.52, which older adapters use.
    pub old_name: String,
    /// What it is.
    pub kind: ModuleKind,
}

/// What a module is, as far as adapters care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleKind {
    /// A linear layer.
    Linear {
        /// Input features.
        inputs: usize,
        /// Output features.
        outputs: usize,
        /// Whether it has a bias.
        bias: bool,
        /// Whether it is the LM head, which `"all-linear"` leaves out.
        head: bool,
    },
    /// The patch embedding.
    Convolution {
        /// Weight's shape: outputs, channels, frames, height, width.
        shape: [usize; 5],
        /// Whether it has a bias.
        bias: bool,
    },
    /// A table whose rows are looked up: that of token embeddings, and those of positions.
    Embedding {
        /// Rows of the table.
        rows: usize,
        /// Values of a row.
        width: usize,
        /// Whether its table is the LM head's weight as well.
        tied: bool,
    },
    /// A norm: its gain, and the bias of a layer norm.
    Norm {
        /// Length of the gain.
        width: usize,
        /// Whether it has a bias.
        bias: bool,
    },
    /// A container or an activation.
    Other,
}

impl ModuleKind {
    /// Elements of its weight; none where there is none.
    pub fn weight(self) -> usize {
        match self {
            Self::Linear { inputs, outputs, .. } => inputs * outputs,
            Self::Convolution { shape, .. } => shape.iter().product(),
            Self::Embedding { rows, width, .. } => rows * width,
            Self::Norm { width, .. } => width,
            Self::Other => 0,
        }
    }

    /// The length of its bias, if it has one.
    pub fn bias(self) -> Option<usize> {
        let (len, bias) = match self {
            Self::Linear { outputs, bias, .. } => (outputs, bias),
            Self::Convolution { shape: [outputs, ..], bias } => (outputs, bias),
            Self::Norm { width, bias } => (width, bias),
            Self::Embedding { .. } | Self::Other => return None,
        };
        bias.then_some(len)
    }
}
