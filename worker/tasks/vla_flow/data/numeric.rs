//! A numeric feature that the model sees.

use coxswain_data::Normalizer;

/// A numeric feature that the model sees.
pub(super) struct Numeric {
    pub(super) name: String,
    /// Its place among the columns of a numeric block.
    pub(super) column: usize,
    pub(super) width: usize,
    pub(super) normalizer: Normalizer,
}
