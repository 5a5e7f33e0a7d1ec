//! What tests of several crates share: the fixtures, and runs that are small enough to repeat.
//!
//! ```text
//! golden       fixtures of the vision-language model, on any device
//! expert       fixtures of the action expert and the sensor encoder, on any backend
//! sft          fixtures of supervised fine-tuning, on any backend
//! generation   what is written to prompts, on any backend
//! trajectory   fixtures of streaming training, on any backend
//! solo         a run in this process, without a coordinator
//! at_rest      the same, for peaks that do not depend on how far data is read ahead
//! ```
//!
//! Everything here fails by panicking, as a test does. What it does not do: name a GPU's backend; the crate
//! that does calls this one.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::path::{Path, PathBuf};

pub mod at_rest;
pub mod expert;
pub mod generation;
pub mod golden;
pub mod sft;
pub mod solo;
pub mod trajectory;

/// The repository: where it was when this was built, or `COX_REPOSITORY` for test binaries that were carried
/// to another machine.
pub fn repository() -> PathBuf {
    let built_in = || Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace's root").into();
    std::env::var_os("COX_REPOSITORY").map_or_else(built_in, PathBuf::from)
}

/// A file or directory of the fixtures.
pub fn fixture(path: &str) -> PathBuf {
    repository().join("integration-tests/fixtures").join(path)
}

/// Norm of the difference over the norm of the reference; the former alone where that is zero. NaN where
/// either has one.
pub fn relative_error(ours: &[f64], reference: &[f64]) -> f64 {
    assert_eq!(ours.len(), reference.len(), "as many values as in the reference");
    let difference: f64 = ours.iter().zip(reference).map(|(a, b)| (a - b).powi(2)).sum();
    let norm: f64 = reference.iter().map(|b| b.powi(2)).sum();
    if norm == 0.0 { difference.sqrt() } else { (difference / norm).sqrt() }
}
