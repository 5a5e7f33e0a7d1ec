//! Why a run is in its phase: a value that comes with every decision, logged when it changes and shown by
//! `status`.

use std::fmt;

use coxswain_proto::ids::{Generation, Step};

use super::{failure::End, report::StateSource};
use crate::options::FirstCause;

/// The phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum RunPhase {
    /// The world is not complete.
    #[strum(to_string = "waiting for workers")]
    WaitingForWorkers,
    /// The world is complete; no step is committed yet.
    Starting,
    /// Steps are being committed.
    Training,
    /// Every rank waits for `resume`.
    Paused,
    /// The last steps, checkpoint and export.
    #[strum(to_string = "ending")]
    Stopping,
    /// Every worker left in order.
    Finished,
    /// A worker failed or was lost.
    Failed,
}

/// Why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Some ranks are missing.
    Incomplete {
        /// Workers there.
        present: u32,
        /// Workers at most.
        world: u32,
        /// Workers to begin with at least: as many in a fixed world.
        enough: u32,
    },
    /// A generation was formed, and its ranks connect.
    Formed {
        /// The membership.
        generation: Generation,
        /// Workers.
        workers: u32,
        /// Workers whose shard has its replica on their own node, though there are others.
        at_home: u32,
    },
    /// A generation's ranks agreed where to start.
    Started {
        /// The membership.
        generation: Generation,
        /// Where it starts.
        first_step: Step,
        /// Where its state came from.
        source: StateSource,
    },
    /// The coordinator was restarted; training goes on.
    Recalled {
        /// The membership.
        generation: Generation,
        /// Steps below this one are committed.
        committed: Step,
    },
    /// A generation ended; its workers get ready for the next.
    Regathering {
        /// The membership that ended.
        generation: Generation,
        /// Why.
        because: String,
    },
    /// A step was committed.
    Committing,
    /// Asked to pause; some ranks are still in a step.
    Pausing,
    /// Every rank waits.
    AllWait,
    /// Asked to go on.
    Resumed,
    /// Asked to stop.
    StopAsked(String),
    /// Every step is committed; checkpoint and export remain.
    StepsDone,
    /// The run has failed; its survivors write a last checkpoint.
    Closing,
    /// Every worker has left in order.
    AllLeft {
        /// Committed steps.
        steps: Step,
    },
    /// A failure.
    Failed(FirstCause),
}

impl Reason {
    /// Why a run is over.
    pub fn of_end(end: &End) -> Self {
        match end {
            End::Finished(steps) => Self::AllLeft { steps: *steps },
            End::Stopped(_, reason) => Self::StopAsked(reason.clone()),
            End::Failed(failure) => Self::Failed(failure.first_cause()),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Incomplete { present, world, enough } => {
                write!(f, "{present} of {world} workers have joined")?;
                if enough < world { write!(f, "; at least {enough} are needed") } else { Ok(()) }
            }
            Self::Formed { generation, workers, at_home } => {
                write!(f, "generation {generation} is connecting (world size {workers})")?;
                match at_home {
                    0 => Ok(()),
                    _ => write!(
                        f,
                        "; most workers are on one node, which also holds the replicas of {at_home} of its \
                         own shards: losing that node costs the steps since the last checkpoint"
                    ),
                }
            }
            Self::Started { generation, first_step, source } => {
                write!(f, "generation {generation} starts at step {first_step} (state: {source})")
            }
            Self::Recalled { generation, committed } => {
                write!(
                    f,
                    "the coordinator was restarted; generation {generation} continues from step {committed}"
                )
            }
            Self::Regathering { generation, because } => {
                write!(f, "generation {generation} ended: {because}")
            }
            Self::Committing => f.write_str("steps are being committed"),
            Self::Pausing => f.write_str("pause requested; ranks finish their step"),
            Self::AllWait => f.write_str("all ranks wait until the run is resumed"),
            Self::Resumed => f.write_str("resume requested"),
            Self::StopAsked(reason) if reason.is_empty() => f.write_str("stop requested"),
            Self::StopAsked(reason) => write!(f, "stop requested: {reason}"),
            Self::StepsDone => {
                f.write_str("all steps are done; the last checkpoint and the results are being written")
            }
            Self::Closing => f.write_str("the run has failed; the last checkpoint is still to be written"),
            Self::AllLeft { steps } => write!(f, "every worker has left after {steps} steps"),
            Self::Failed(cause) => cause.fmt(f),
        }
    }
}
