//! A data set looked at before anything is trained on it: what is wrong with it, its statistics, its
//! pictures.
//!
//! ```text
//! check     everything that can be wrong, from metadata to decoded frames
//! samples   samples of any run, one by one
//! stats     statistics that a data set lacks, written beside it
//! episode   one of its episodes, as recorded               sheet     an episode as one picture
//! scan      an episode's rows, once through                moments   numbers of one dimension
//! frames    pictures of an episode, decoded                findings  what was found, by place
//! judge     the whole data set's numbers: constant, outlying, unlike its statistics
//! ```
//!
//! Episodes are read by all cores, a few hundred at a time; what is kept of them does not grow with their
//! number. Nothing here knows what is trained.

mod check;
mod episode;
mod findings;
mod frames;
mod judge;
mod moments;
mod samples;
mod scan;
mod sheet;
mod stats;

pub use check::{Progress, Report, check};
pub use episode::episode;
pub use findings::{Finding, Findings, Severity};
pub use frames::Frames;
pub use samples::{Doubts, SampleReport};
pub use sheet::sheet;
pub use stats::{Job, MissingStats, StatsOutcome, fill, missing};
