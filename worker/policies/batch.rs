//! What a policy is given of a micro-batch.

use coxswain_models::pretrained::prompts::{DropoutKeys, Prompts};
use coxswain_proto::run_spec::Recompute;

use crate::kept_tokens::KeptFeatures;

/// What a policy sees of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct PolicyObservation<'b> {
    /// Images and prompts.
    pub prompts: Prompts<'b>,
    /// The id that stands for a token of an image.
    pub image: u32,
    /// Normalised states, `[b, padded]`.
    pub state: &'b [f32],
    /// What was kept of them, in the place of pixels.
    pub features: Option<KeptFeatures<'b>>,
}

/// What a training pass is besides its inputs.
#[derive(Clone, Copy, Debug)]
pub struct Training<'b> {
    /// What it keeps for its backward pass.
    pub recompute: Recompute,
    /// What keys the draws of adapters' dropout; none where they drop nothing.
    pub dropout: Option<DropoutKeys<'b>>,
}

/// Actions on their way along the flow.
#[derive(Clone, Copy, Debug)]
pub struct Draws<'d> {
    /// Each sample's time, `[b]`.
    pub times: &'d [f32],
    /// `[b, chunk, padded]`.
    pub noisy: &'d [f32],
}
