//! Training on one rank: from a run spec and a place in a generation to an adapter on disk.
//!
//! ```text
//! trainer      opens the data set, loads the model, and hands both to ...
//! run          ... the loop: generation after generation, step after step, until the end, a stop, or an
//!              error
//!   init_from  weights of another run as the first values
//!   share_out  this rank's part of the frozen weights, where ranks share them out
//!   recovery   where a generation starts: state kept by living ranks, replicated, or from a checkpoint
//!   autobatch  the largest micro-batch that fits, found by trying
//!   ahead      what the next steps consume, leased and asked of the data threads
//!   step       one step as a transaction: accumulate, vote, then reduce, clip, AdamW and gather, or shrink,
//!              or end
//!     vote     the one small all-gather in which all ranks decide
//!     tally    what a step has come to, and its report
//!     verify   ranks compare what they hold
//!     replay   ranks compare what they compute, each from another one's samples
//!     skip     what follows when numbers are not finite: once more, then without the step
//!     spike    what follows when a loss is far above those before
//!     fit      what follows when memory runs out: half as much at a time, or what to change
//!   divergence how a run ends whose weights are not finite, or of which step after step is left out
//!   learned    when a run ends because too little of its data can be learned from (`left_out` counts it)
//!   warm_up    what the first step took beyond the others
//!   features   kept features: cache phases, generations, what is missing, drift
//!   save       checkpoints written and read by all ranks together (`checkpoint` knows the files)
//!   average    the average of the weights in their place, for what follows
//!   evaluate   held-out action error, every rank a part
//!   validation the same while training goes on, and the best checkpoint
//!   export     what a user takes away: the task's artifacts, statistics, summary
//! export_run   the same of any checkpoint, for `cox export`
//! check        everything that can be known before training, for `cox check`
//! ```
//!
//! One OS thread runs all of this. It sees the control plane only as a [`Link`](crate::link::Link), and never
//! sees tonic.

mod advice;
mod ahead;
mod announce;
mod autobatch;
mod average;
mod best;
pub mod check;
pub mod checkpoint;
mod compare;
mod divergence;
mod doubts;
mod error;
mod evaluate;
mod export;
mod export_run;
mod facts;
mod fault;
mod features;
mod feed;
mod finding;
mod fit;
mod gradient_watch;
mod held_out;
pub mod init_from;
mod learned;
mod learner;
mod left_out;
mod loss_history;
mod members;
pub mod recovery;
mod replay;
mod run;
mod save;
mod share_out;
mod skip;
mod skips;
mod spike;
mod stats;
mod step;
mod summary;
mod suspicions;
mod tally;
#[cfg(test)]
mod tests;
mod trainer;
mod training;
mod unknown_task;
mod validation;
mod verify;
mod vote;
mod warm_up;

pub use self::check::{CheckReport, check, check_base, check_features, check_writable};
pub use best::Best;
pub use error::TrainError;
pub use evaluate::evaluate_run;
pub use export_run::{ExportJob, Exported, WhichCheckpoint, export_run};
pub use features::{CACHE_DIR, CacheSummary, DriftRecord, FeatureVersion, Mark};
pub use finding::Comparison;
pub use gradient_watch::{GradientWatch, SilentTrainables};
pub use held_out::{HeldOutError, MAX_MEASURES};
pub use init_from::{InitError, check_brought, content_digest};
pub use summary::Summary;
pub use trainer::{TaskTrainer, TrainerOptions};
pub use unknown_task::UnknownTask;
