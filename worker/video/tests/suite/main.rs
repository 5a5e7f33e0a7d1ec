//! The crate held against FFmpeg on clips that FFmpeg's encoders wrote, and against files that lie.
//! `make_fixtures.py` makes the clips and says what FFmpeg decodes them to.

mod fixtures;
mod golden;
mod hostile;
mod pooling;
mod refused;
