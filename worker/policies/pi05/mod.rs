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
//! config    config.json, checked; the table of published sizes; every tensor's name and shape
//! names     what these names mean
//! inputs    pictures, and the prompt with the state in it, as the data pipeline asks for them
//! tuning    what of it trains
//! ends      projections, the time, and the norms that are told it
//! layer     actions through one layer
//! network   all of it: load, forward, backward, sampling
//! ```

mod config;
mod ends;
mod inputs;
mod layer;
mod names;
mod network;
#[cfg(test)]
mod tests;
pub mod tuning;

pub use self::{
    config::{PALIGEMMA, Pi05Config},
    inputs::{Pi05Prompts, bins, images, told_tokens},
    names::{RULES, connector},
    network::Pi05,
};
