//! pi0 (arXiv 2410.24164) and pi0.5 (arXiv 2504.16054), as LeRobot and openpi have their flow: PaliGemma,
//! beside each of whose decoder layers runs a layer of an action expert, a smaller Gemma.
//!
//! ```text
//! prefix    [images | text], every token sees every other; knows nothing of what follows
//!           text: pi0 "t\n"; pi0.5 "Task: t, State: bins;\nAction: "
//! pi0       state_proj(state): one token, sees the prefix and itself; then the actions,
//!           W_out silu(W_in [action_in_proj(x_t) | sinusoids(t)]), which see the prefix, the state and each
//!           other; layers and norms are Gemma's own
//! pi0.5     actions alone, action_in_proj(x_t), see the prefix and each other;
//!           time  c = silu(time_mlp_out(silu(time_mlp_in(sinusoids(t)))))
//!           norm  (scale, shift, gate) = dense(c):  rms_norm(x) (1 + scale) + shift, and a gate
//! velocity  action_out_proj(norm(actions))
//! ```
//!
//! Positions go on behind the prefix. `t x noise + (1 - t) x actions`, target `noise - actions`, sampled from
//! `t = 1` to 0 in Euler steps. The loss is of the real dimensions of actions, and counts steps that an
//! episode does not have.
//!
//! ```text
//! config         config.json, checked; the table of published sizes; every tensor's name and shape
//! names          what these names mean
//! prompt         pi0.5's text with the state in it
//! tuning         what of it trains
//! adaptive_norm  norms that are told the time
//! timed_suffix   pi0.5's actions through the layers; pi0 has a suffix with a state's token
//!                (crate::state_suffix)
//! network        either, on a device
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

pub(crate) use self::network::load;
pub use self::{
    config::{PALIGEMMA, PiConfig},
    names::PiKind,
    prompt::{bins, told_tokens},
};
