//! What a run leaves on disk.
//!
//! ```text
//! checkpoint  the files of checkpoints: staged, complete, read, removed
//! save        checkpoints written and read by all ranks together
//! best        the best checkpoint so far, and its artifacts
//! keep        all ranks write them
//! average     the average of the weights in their place, for what follows
//! export      what a user takes away: the task's artifacts, statistics, summary
//! export_run  the same of any checkpoint, for `cox export`
//! ```

mod average;
mod best;
pub mod checkpoint;
mod export;
mod export_run;
mod keep;
mod save;

pub use self::{
    best::Best,
    export_run::{ExportJob, ExportSummary, WhichCheckpoint, export_run},
};
pub(super) use self::{
    export::{Export, write_spec},
    save::{Results, read_average_of, read_trainables},
};
