//! What a policy is measured by, of one data set or several.

use super::batch::SampleDims;

/// Data that a policy is trained and measured on.
pub trait RunData {
    /// Sizes that all samples share.
    fn dims(&self) -> SampleDims;

    /// Model actions of this sample, `[.., action]`, normalised, back to its data set's units, in place.
    fn denormalize_actions(&self, index: u64, actions: &mut [f32]);
}
