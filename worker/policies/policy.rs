//! A policy on a device, whatever its kind: what passes and training ask of it.

use std::path::Path;

use burn::tensor::Tensor;
use coxswain_models::vision_language::PassError;
use coxswain_nn::{
    dtypes::FrozenDtype,
    kernels::Tape,
    params::{GradientSums, Trainables},
};

use crate::{
    batch::{Draws, PolicyObservation, Training},
    directory::PolicyDirectory,
    kept_tokens::KeptTokens,
};

/// The files of a policy, and how they are read.
#[derive(Clone, Copy, Debug)]
pub struct PolicyFiles<'f> {
    /// The policy's own.
    pub directory: &'f PolicyDirectory,
    /// The directory of its vision-language model, for `config.json` alone.
    pub backbone: &'f Path,
    /// How frozen weights are kept.
    pub dtype: FrozenDtype,
}

/// What a policy's configuration says of samples.
#[derive(Clone, Copy, Debug)]
pub struct PolicySizes<'c> {
    /// Cameras, by the names of their features, in the order in which the prefix has them.
    pub cameras: &'c [String],
    /// Values of a state.
    pub state: usize,
    /// Values of an action.
    pub action: usize,
    /// Steps of a chunk.
    pub chunk: usize,
    /// What states and actions are padded to.
    pub padded: [usize; 2],
    /// Euler steps of sampling.
    pub steps: usize,
    /// Whether the loss counts the steps of a chunk that an episode does not have.
    pub counts_padding: bool,
    /// Whether such steps are 0, normalised, and not as they were recorded.
    pub blanks_padding: bool,
    /// At which time actions are noise.
    pub noise: NoiseEnd,
    /// Whether training drops something beside what adapters drop.
    pub drops: bool,
}

/// At which end of the flow's time actions are noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoiseEnd {
    /// At 0: `(1 - t) noise + t actions`, and velocities are towards the actions.
    Zero,
    /// At 1: `t noise + (1 - t) actions`, and velocities are towards the noise.
    One,
}

/// Velocities `[b * chunk, padded]` of actions on their way along the flow, without a tape.
pub type Velocity<'a, B> = Box<dyn Fn(Draws<'_>) -> Tensor<B, 2> + 'a>;

/// Carries the gradient of velocities back, adding those of parameters.
pub type BackwardPass<'a, B> = Box<dyn FnOnce(Tensor<B, 2>, &mut dyn GradientSums<B>) + 'a>;

/// A policy that predicts velocities from images, a prompt, a state, and noisy actions.
pub trait Policy<B: Tape<Base = B>> {
    /// What it takes and gives.
    fn sizes(&self) -> PolicySizes<'_>;

    /// Velocities, `[b * chunk, padded]`, and their backward pass, which keeps what `training` says.
    fn forward_kept<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        training: Training<'a>,
        observed: PolicyObservation<'a>,
        draws: Draws<'_>,
    ) -> Result<(Tensor<B, 2>, BackwardPass<'a, B>), PassError>;

    /// What is to be kept of a micro-batch, `[tokens, width]`, as [`PolicyObservation`] has it.
    fn features(
        &self,
        trainables: &Trainables<B>,
        observed: PolicyObservation<'_>,
        kept: KeptTokens,
    ) -> Result<Tensor<B, 2>, PassError>;

    /// What predicts velocities for sampling: the prefix is run here, once.
    fn sampler<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: PolicyObservation<'_>,
    ) -> Result<Velocity<'a, B>, PassError>;
}
