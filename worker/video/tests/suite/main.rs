//! The crate held against FFmpeg on clips that FFmpeg's encoders wrote, and against files that lie.
//! `make_fixtures.py` makes the clips and says what FFmpeg decodes them to.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod fixtures;
mod golden;
mod hostile;
mod pooling;
mod refused;
