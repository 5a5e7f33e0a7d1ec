//! What a step of the optimizer did, or why it was not taken.

use std::time::Duration;

use coxswain_nn::params::Group;
use coxswain_proto::ids::Rank;

use crate::collective::CollectiveError;

/// Norm of one group's part of the scaled global gradient, before clipping.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupNorm {
    /// Which group.
    pub group: Group,
    /// Norm.
    pub norm: f64,
}

/// What one step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// Norm of the scaled global gradient, before clipping.
    pub grad_norm: f64,
    /// Norms of the groups that move, in the order of the flat parameter buffer.
    pub group_norms: Vec<GroupNorm>,
    /// Whether it was scaled down to `clip_norm`.
    pub clipped: bool,
    /// Time in collectives, waiting for other ranks included.
    pub communication: Duration,
    /// Time in norm and AdamW.
    pub compute: Duration,
}

/// Why a step was not taken.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// A gradient is NaN or infinite. Weights and moments are as before, on all ranks.
    #[error(
        "the gradient's norm is {norm}{}; weights are unchanged. Check the data of this step, lower the \
         learning rate, or clip gradients (optimizer.clip_norm)",
        place(.rank, .parameter)
    )]
    NonFinite {
        /// What the norm came to.
        norm: f64,
        /// This rank.
        rank: Rank,
        /// The first parameter in this rank's shard with such a gradient; `None` if that is in another rank's
        /// shard.
        parameter: Option<String>,
    },
    /// A rank or the network failed. If it was in the last collective, this rank has taken the step already,
    /// and others may not have: which version goes on is agreed on from what each holds
    /// ([`replica`](super::replica)), or read from a checkpoint.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A buffer or communicator does not belong to this optimizer.
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        /// Which.
        what: &'static str,
        /// What the optimizer was made for.
        expected: usize,
        /// What it was given.
        found: usize,
    },
}

fn place(rank: &Rank, parameter: &Option<String>) -> String {
    match parameter {
        Some(name) => format!(" (first non-finite gradient in rank {rank}'s shard: {name})"),
        None => format!(" (rank {rank}'s shard is sound: the log of another rank names the parameter)"),
    }
}
