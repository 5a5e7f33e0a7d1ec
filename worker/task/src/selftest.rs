//! A few steps of a small instance of a task, for `cox selftest`: a device must come to the CPU's numbers,
//! and the CPU to stored ones.

/// Type of the frozen weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// Everything in float32.
    Float32,
    /// Frozen weights in bfloat16.
    Bfloat16,
}

impl Width {
    /// As run files have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
        }
    }

    /// How far losses may be from the CPU's in float32, relatively.
    pub fn tolerance(self) -> f64 {
        match self {
            Self::Float32 => 1e-3,
            Self::Bfloat16 => 2e-2,
        }
    }
}

/// A loss for every step, or why there is none.
pub type Losses = Result<Vec<f64>, String>;
