//! What a policy is measured by, of one data set or several.

use super::batch::SampleDims;

/// Data that a policy is trained and measured on.
pub trait RunData {
    /// Sizes that all samples share.
    fn dims(&self) -> SampleDims;

    /// The place in `data.sets` of the set that this sample is of; none where there is one data set.
    fn set_of(&self, index: u64) -> Option<usize>;

    /// Model actions of this sample, `[.., action]`, normalised, back to its data set's units, in place.
    fn denormalize_actions(&self, index: u64, actions: &mut [f32]);
}
