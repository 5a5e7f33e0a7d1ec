//! What joins a vision-language model to actions, a folder for each way of it that others have trained:
//! expert, how it is coupled, masks, positions, sampling, pictures. Each is named by the `type` of a
//! policy's `config.json`, as LeRobot writes it.
//!
//! ```text
//! directory   LeRobot's policy directory: what its files say, with the file and the field in every error
//! export      the same, written with what was trained
//! pass_files  what one pass reads from a file, and what it writes
//! groups      what trains, by name
//! backbone    where configuration and tokenizer of the model are that a policy names by its hub name
//! smolvla     SmolVLA
//! ```
//!
//! A policy knows models by the traits of `coxswain_models::joint`, no family, no task and no data set.

pub mod backbone;
pub mod directory;
pub mod export;
mod groups;
mod pass_files;
pub mod smolvla;

pub use self::groups::EXPERT;
