//! SmolVLA (arXiv 2506.01844), as LeRobot has it: SmolVLM2's tower and its first decoder layers, beside
//! each of which runs a layer of an action expert.
//!
//! ```text
//! prefix   [images | prompt] * sqrt(d), every token sees every other; knows nothing of what follows
//! state    state_proj(state): one token of the language model's, sees the prefix and itself
//! actions  W_out silu(W_in [action_in_proj(x_t) | sinusoids(t)]): the expert's tokens
//!
//! layer 0, 2, ..   an action's query attends, under one softmax, to the prefix, the state and the actions up
//!                  to itself, whose keys are the expert's; positions go on behind the prefix
//! layer 1, 3, ..   it attends to the expert's k_proj and v_proj of the keys (rotated) and values of the
//!                  language model's layer; its positions begin at 0
//! velocity         action_out_proj(rms_norm(actions))
//! ```
//!
//! The prefix is run once, without a tape as far as nothing trains in it ([`prefix`](crate::prefix)).
//! `t x noise + (1 - t) x actions`, target `noise - actions`, sampled from `t = 1` to 0 in Euler steps:
//! LeRobot's convention, `noise_at_one` here. Noise is of the padded width, the loss of the real one.
//!
//! ```text
//! config    config.json, checked; sizes from the tensors; every tensor's name and shape
//! names     what these names mean
//! tuning    what of it trains
//! network   it, on a device: a suffix with a state's token (crate::state_suffix)
//! ```

mod config;
mod names;
mod network;
#[cfg(test)]
mod tests;
pub mod tuning;

pub(crate) use self::network::load;
pub use self::{config::SmolVlaConfig, names::RULES};
