//! pi0.5 (arXiv 2504.16054), as LeRobot and openpi have its flow: PaliGemma, beside each of whose decoder
//! layers runs a layer of an action expert, a smaller Gemma whose norms are told the time.
//!
//! ```text
//! prefix    [images | "Task: t, State: bins;\nAction: "], every token sees every other; knows nothing of
//!           what follows
//! time      c = silu(time_mlp_out(silu(time_mlp_in(sinusoids(t)))))
//! actions   action_in_proj(x_t): one token each, positions go on behind the prefix
//! norm      (scale, shift, gate) = dense(c):  rms_norm(x) (1 + scale) + shift, and the gate for what follows
//! layer     x = x + gate W_o attention;  x = x + gate' mlp(norm'(x))
//!           under one softmax an action attends to the prefix and to every action
//! velocity  action_out_proj(norm(actions))
//! ```
//!
//! `t x noise + (1 - t) x actions`, target `noise - actions`, sampled from `t = 1` to 0 in Euler steps. The
//! state is normalised, cut into 256 bins from -1 to 1, and read as text. The loss is of the real dimensions
//! of actions, and counts steps that an episode does not have.
//!
//! ```text
//! config         config.json, checked; the table of published sizes; every tensor's name and shape
//! names          what these names mean
//! prompt         the text with the state in it
//! tuning         what of it trains
//! adaptive_norm  norms that are told the time
//! timed_suffix   actions through the layers
//! network        it, on a device
//! ```

mod adaptive_norm;
mod config;
mod names;
mod network;
mod prompt;
#[cfg(test)]
mod tests;
mod timed_suffix;
pub mod tuning;

pub use self::{
    config::{PALIGEMMA, PiConfig},
    names::RULES,
};
pub(crate) use self::{names::VLM, network::load};
