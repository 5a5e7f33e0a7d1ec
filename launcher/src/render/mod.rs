//! Answers of the coordinator as text for people and as JSON for programs.

pub mod events;
pub mod json;
pub mod names;
pub mod status;
pub mod summary;
pub mod table;
pub mod units;
