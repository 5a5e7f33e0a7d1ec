//! One step, from its samples to its end on all ranks.
//!
//! ```text
//! ahead        what the next steps consume, leased and asked of the data threads
//! transaction  accumulate, vote, then take the step, try it again, or leave it out
//! vote         the one small all-gather in which all ranks decide
//! compute      one micro-batch forward and backward; reduce, clip, update and gather; or nothing of it
//! tally        what a step has come to
//! testify      the same, written apart from what is reported, if it was asked for
//! skip         what follows when numbers are not finite: once more, then without the step
//! fit          what follows when memory runs out: half as much at a time, or what to change
//! ```

mod ahead;
mod compute;
mod fit;
mod skip;
mod tally;
mod testify;
mod transaction;
mod vote;

pub(super) use self::{
    tally::{Share, TimeBreakdown},
    transaction::Transaction,
    vote::{Lookout, Verdict, Vote},
};
