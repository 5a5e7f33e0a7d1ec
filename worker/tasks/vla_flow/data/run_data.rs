//! What a policy is measured by, of one data set or several.

use coxswain_models::pretrained::pictures::Rgb;

use super::batch::SampleDims;

/// Data that a policy is trained and measured on.
pub trait RunData {
    /// Sizes that all samples share.
    fn dims(&self) -> SampleDims;

    /// The place in `data.sets` of the set that this sample is of; none where there is one data set.
    fn set_of(&self, index: u64) -> Option<usize>;

    /// Model actions of this sample, `[.., action]`, normalised, back to its data set's units, in place.
    fn denormalize_actions(&self, index: u64, actions: &mut [f32]);

    /// Names of its action's dimensions; none where its data set has none.
    fn action_names(&self, index: u64) -> Vec<String>;

    /// What this sample is to do, in words, and what each camera shows; empty where that cannot be read.
    fn scene(&self, index: u64) -> (String, Vec<(String, Rgb)>);
}
