//! Training on one rank: from a run spec and a place in a generation to an adapter on disk.
//!
//! ```text
//! trainer      opens the data set, loads the model, lays out the workbench, and hands all to ...
//! run          ... the loop: generation after generation, step after step, until the end, a stop, or an
//!              error
//!   init_from  weights of another run as the first values
//!   share_out  this rank's part of the frozen weights, where ranks share them out
//!   recovery   where a generation starts: state kept by living ranks, replicated, or from a checkpoint
//!   step       one step as a transaction: accumulate, vote, then reduce, clip, update and gather, or shrink,
//!              or end
//!   guards     what watches over it: what is not finite, spikes, ranks that differ, what is left out
//!   features   kept features: cache phases, generations, what is missing, drift
//!   results    what is left on disk: checkpoints, the best of them, the average, the export
//!   looking    what is seen and told: held-out samples, memory, speed, the summary
//! workbench    what all of these work with: facts, members, learner, feed, features
//! recompute    what a rank recomputes, where its memory decides that
//! check        everything that can be known before training, for `cox check`
//! ```
//!
//! A room has its own state, and is lent what it needs of the workbench. One OS thread runs all of this. It
//! sees the control plane only as a [`Link`](crate::link::Link), and never sees tonic.

mod advice;
pub mod check;
mod error;
mod facts;
mod features;
mod feed;
mod guards;
pub mod init_from;
mod learner;
mod looking;
mod members;
mod recompute;
pub mod recovery;
mod results;
mod run;
mod share_out;
mod step;
#[cfg(test)]
mod tests;
mod trainer;
mod training;
mod unknown_task;
mod workbench;

// What the rooms and the loop share with each other.
use self::{
    advice::advice,
    facts::Facts,
    features::{Claim, Desk, Features},
    feed::Feed,
    guards::{AttemptOutcome, InjectedFaults, LossHistory, Search, Skips, Suspicions, verify},
    learner::{GenerationState, Learner},
    looking::{
        RankPeak, RunStats, SCOPES, STEPS_OBSERVED, SUMMARY_FILE, ValidationState, Witness, describe,
        examples, warnings,
    },
    members::Members,
    recovery::is_the_generations,
    results::{Export, Results, read_average_of, read_trainables, write_spec},
    step::{Lookout, Share, TimeBreakdown, Transaction, Verdict, Vote},
    training::Training,
    workbench::Workbench,
};
pub use self::{
    check::{CheckReport, check, check_base, check_features, check_writable, lack_of_room},
    error::TrainError,
    features::{CACHE_DIR, CacheSummary, DriftRecord, FeatureVersion, Mark},
    guards::{Comparison, GradientWatch, SilentTrainables},
    init_from::{InitError, check_brought, check_start, content_digest},
    looking::{HeldOutError, MAX_MEASURES, Summary, evaluate_run},
    results::{Best, ExportJob, ExportSummary, WhichCheckpoint, checkpoint, export_run},
    trainer::{TaskTrainer, TrainerOptions},
    unknown_task::UnknownTask,
};
