//! GR00T N1.7 (NVIDIA; `type: groot` of LeRobot): the first layers of a Qwen3-VL, whose hidden states a
//! diffusion transformer reads block by block.
//!
//! ```text
//! hidden    h = the last layer that is there, before the final norm; then a layer norm and layers of
//!           self-attention over a sample's own tokens
//! tokens    state | actions            encoders with weights for each embodiment; positions on actions
//! blocks    even ones read h, by turns that of text and that of images; odd ones their own tokens
//! velocity  a decoder by embodiment of the last tokens
//! flow      x_t = (1 - t) noise + t actions, target actions - noise, sampled from t = 0 to 1
//! ```
//!
//! Embeddings know the time in whole thousandths, cut. LeRobot pads prompts of a batch on the left, and its
//! self-attention reads the padding; here no sample sees what another one is padded to.
//!
//! ```text
//! config    config.json and the model's own, checked; steps: the processors'
//! names     what names in the file mean; tuning: what there is, and what of it trains
//! nvidia    NVIDIA's own directory as that of a policy
//! prompt    a task as ids; images: pictures to patches
//! block     a transformer block; ends: tokens of a state and of actions, and velocities of tokens
//! head      all that stands behind the vision-language model; network: both, as a policy
//! ```

mod block;
mod config;
mod ends;
mod head;
mod images;
mod names;
mod network;
pub mod nvidia;
mod prompt;
mod steps;
#[cfg(test)]
mod tests;
pub mod tuning;

pub use self::config::{BACKBONE, Gr00tConfig};
pub(crate) use self::names::{RULES, written};
pub(crate) use self::network::load;
