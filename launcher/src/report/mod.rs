//! `cox report`: what a run's directory tells, as one page that opens anywhere.
//!
//! ```text
//! run_dir (run file, summary, ledger) ─┐
//! TensorBoard's scalars ───────────────┼─▶ read (a run as data) ─▶ sections ─▶ page (one HTML file)
//! coordinator.log ─▶ story (events) ───┘        chart (SVG) ────────┘
//! ```
//!
//! Nothing here asks a worker for anything. What of a run cannot be read keeps nothing else of it from being
//! shown: what is cut, missing or of another version is a line at the page's top.

mod chart;
mod compare;
mod html;
mod page;
mod read;
mod sections;
mod story;
#[cfg(test)]
mod tests;

pub use self::{page::page, read::ReportedRun, story::Story};
