//! What joins a vision-language model to actions, a folder for each way of it that others have trained:
//! expert, how it is coupled, masks, positions, sampling, pictures. Each is named by the `type` of a
//! policy's `config.json`, as LeRobot writes it.
//!
//! ```text
//! directory   LeRobot's policy directory: what its files say, with the file and the field in every error
//! features    what config.json says of samples; processors: which of their steps are read
//! normalizer  values of features, normalised and back
//! export      the directory, written with what was trained
//! backbone    where configuration and tokenizer of the model are that a policy names by its hub name
//! groups      what trains, by name; tuning: what a run asks for, resolved
//! kind        the kinds of policies, and what each answers of its own
//! policy      a policy on a device; batch: what it is given; source: where its own weights come from
//! names       where the vision-language model is in its file; prompts: images and a text as ids
//! images      pictures to patches: letterbox
//! prefix      images and prompt through the language model: keys and values of each layer
//! suffix      what stands behind it; network: both, loaded, forward, back, and sampled from
//! state_suffix, state_layer, masks, projections: a suffix that begins with the state's token
//! rotary      positions and masks; sinusoids: the time
//! kept        what a forward pass keeps for its backward pass; dropped: what adapters drop
//! pass        one pass from file to file; pass_files: these files
//! smolvla     SmolVLA
//! pi          pi0 and pi0.5
//! gr00t       GR00T N1.7
//! golden      what tests hold beside LeRobot's files
//! ```
//!
//! A policy knows models by the traits of `coxswain_models::joint` and `vision_language`, no family, no task
//! and no data set.

pub mod backbone;
mod batch;
pub mod directory;
mod dropped;
pub mod export;
mod features;
#[cfg(test)]
mod golden;
pub mod gr00t;
mod groups;
pub mod images;
mod kept;
mod kept_tokens;
mod kind;
mod masks;
mod names;
mod network;
mod normalizer;
mod pass;
mod pass_files;
pub mod pi;
mod policy;
mod prefix;
mod processors;
mod projections;
mod prompts;
mod rotary;
mod sinusoids;
pub mod smolvla;
mod source;
mod state_layer;
mod state_suffix;
mod suffix;
mod tuning;

pub use self::{
    batch::{Draws, PolicyObservation, Training},
    groups::EXPERT,
    kept_tokens::{KeptFeatures, KeptTokens},
    kind::PolicyKind,
    pass::{PassJob, run as run_pass},
    policy::{BackwardPass, NoiseEnd, Policy, PolicyFiles, PolicySizes, Velocity},
    tuning::TuningSettings,
};
