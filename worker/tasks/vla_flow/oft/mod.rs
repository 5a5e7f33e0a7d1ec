//! The head of StarVLA-alpha (QwenOFT; arXiv 2604.11757), after OpenVLA-OFT (arXiv 2502.19645): a whole chunk
//! at once, by regression, without a flow.
//!
//! ```text
//! prompts   the prompt ends with one action token for each action of a chunk
//! network   their hidden states, one by one, through an MLP -> actions
//! ```
//!
//! The loss is the sum of `|predicted - recorded|` over valid elements of normalised actions; steps past an
//! episode's end and padding to a mixture's widest action do not count.
//!
//! An action token is a token of the vocabulary, so that all of the prompt goes through the language model as
//! it is, and features are kept at any tap as for any prompt. Its embedding trains where `model.train` names
//! the table. What this module does not do: see a state or a sensor, draw noise, or run the language model.

mod network;
mod prompts;
#[cfg(test)]
mod tests;

pub use self::{
    network::{OftHead, OftShape, OftTrace},
    prompts::{OftPrompts, estimated_tokens},
};
use super::flow::{CleanActions, FlowLoss, error_of_valid};

/// Absolute error over valid elements, and its derivative by `predicted`, `[b, horizon, action]`: the sign,
/// and 0 where nothing differs, as PyTorch's `L1Loss` has it.
pub fn absolute_error(predicted: &[f32], clean: CleanActions<'_>) -> FlowLoss {
    let sign = |error: f64| if error == 0.0 { 0.0 } else { error.signum() };
    error_of_valid(predicted, clean.actions, clean, |error| (error.abs(), sign(error)))
}
