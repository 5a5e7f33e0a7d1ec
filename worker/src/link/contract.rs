//! What the trainer sees of the control plane, and what it tells it.

use std::{sync::Arc, time::Duration};

use coxswain_proto::{
    cache_plan::{CacheDecision, CacheReport},
    ids::{Bytes, Generation, Rank, Step},
    memory::Comparison,
    order::DamagedRow,
};

use super::{Phase, PhaseMemory, StateSource, StepReport, StepShare};
use crate::collective::{AbortHandle, Progress};

/// A rank's place in one generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The membership.
    pub generation: Generation,
    /// This worker's position.
    pub rank: Rank,
    /// Ranks in the generation.
    pub world: u32,
    /// Where the next rank's listener accepts this one; empty in a world of one.
    pub next: String,
    /// Rows of the data set that are left out: their samples failed again and again.
    pub quarantined: Vec<DamagedRow>,
    /// The step of the newest complete checkpoint, 0 without one: where to start if no rank still has the
    /// training state.
    pub checkpoint_step: Step,
    /// The run has failed: this generation writes a checkpoint and trains no step.
    pub closing: bool,
    /// This rank keeps the replica of the shard of the rank so many before it on the ring: at least 1, and
    /// less than the world where that is more than one.
    pub replica_distance: u32,
}

/// A sample that cannot be used, on a rank that is well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadSample {
    /// The step it belongs to.
    pub step: Step,
    /// The epoch in which it was asked for.
    pub epoch: u64,
    /// Position there.
    pub position: u64,
    /// The row of the data set that is to blame, and the samples that need it.
    pub row: DamagedRow,
    /// What is wrong with it.
    pub message: String,
}

/// Where a generation starts, as its ranks have agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// The first step it will run.
    pub first_step: Step,
    /// Where the state is from.
    pub source: StateSource,
    /// Bytes this rank received, or read from disk, to get there.
    pub bytes: Bytes,
    /// How long that took.
    pub took: Duration,
}

/// What people asked for, as of now. All ranks agree on it in the step's vote, so it takes effect at the same
/// boundary everywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Commands {
    /// Wait at the next boundary until resumed.
    pub pause: bool,
    /// Checkpoints asked for so far; a rise asks for one more.
    pub checkpoints: u32,
    /// Finish: checkpoint, export, leave.
    pub stop: bool,
    /// Memory reports asked for so far.
    pub memory_reports: u32,
    /// The number of the last of them after which peaks are to begin anew; 0: none.
    pub memory_reset: u32,
    /// Leave this generation together, to form another one.
    pub regroup: bool,
    /// With `regroup`: write a checkpoint first, for some will not be in the next one.
    pub hand_over: bool,
}

/// How a checkpoint is getting on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointNews {
    /// Rank 0 has published the manifest.
    Complete,
    /// It was given up; training goes on.
    Failed(String),
}

/// One thing the trainer says.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// The generation can begin.
    Started(Start),
    /// A finished step.
    Step(StepReport),
    /// Peaks by phase, and predicted beside measured where there is something to compare.
    Memory(Vec<PhaseMemory>, Option<Comparison>),
    /// A checkpoint.
    Checkpoint {
        /// At which step.
        step: Step,
        /// Directory, relative to the output directory.
        path: String,
        /// Bytes of the whole.
        bytes: Bytes,
        /// What happened.
        news: CheckpointNews,
    },
    /// A sample cannot be used. This rank is ready for a generation in which another rank tries it, or in
    /// which it is left out.
    BadSample(BadSample),
    /// What rank 0 knows of a generation of the feature cache, for all ranks.
    Cache(CacheReport),
    /// One line for people, shown in the coordinator's log.
    Note(String),
    /// A line for people about a fault of this worker's machine, which counts against it.
    HardwareFault(String),
}

/// The line is cut: the trainer should return.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The generation is over; [`Link::assignment`] waits for the next one.
    #[error("generation ended: {0}")]
    Aborted(String),
    /// The run is over for everyone.
    #[error("the run has ended: {0}")]
    Over(String),
    /// The run goes on without this worker, which ends in good order.
    #[error("this worker is no longer needed: {0}")]
    Dismissed(String),
    /// The coordinator is not coming back, or refused us.
    #[error("control plane lost: {0}")]
    Lost(String),
}

/// The trainer's view of the control plane.
pub trait Link {
    /// Says that this worker can take a place in the next generation, and blocks until it has one. `why`
    /// tells what ended the last generation if this worker found out by itself.
    fn assignment(&mut self, why: Option<&str>) -> Result<Assignment, LinkError>;

    /// The run's id, which the coordinator gave it: tells it from other launches of the same file. Empty
    /// where there are no other members.
    fn run_id(&self) -> &str {
        ""
    }

    /// Whether there can be another generation after this one; without, whatever ends it ends the run.
    fn has_generations(&self) -> bool {
        true
    }

    /// Blocks until this rank may consume its slice of `step`, whose global batch has `samples` samples;
    /// returns the slice as positions within that batch, and the step's cache phase. Leases are granted well
    /// ahead, so this normally returns at once.
    ///
    /// Where the lease depends on a measurement of drift (`cache.rebuild_above`, at the end of a live phase),
    /// rank 0 must have reported it before: nothing beyond that step is leased until then. So only the step
    /// that runs next is waited for; those ahead of it are asked for with [`Link::lease_ahead`].
    fn lease(&mut self, step: Step, samples: u64) -> Result<StepShare, LinkError>;

    /// As [`Link::lease`], but nothing if the step is not leased yet. Never blocks.
    fn lease_ahead(&mut self, step: Step, samples: u64) -> Result<Option<StepShare>, LinkError>;

    /// The newest decision about the features of steps before `step`, where only this link keeps it: it goes
    /// into checkpoints.
    fn decided(&self, _step: Step) -> Option<CacheDecision> {
        None
    }

    /// Shows the generation's communicator to the control plane as soon as there is one: an abort from the
    /// coordinator ends the collective in flight through `abort`, and heartbeats carry `progress`.
    fn connected(&mut self, _abort: Arc<dyn AbortHandle>, _progress: Arc<Progress>) {}

    /// What people want, now. Never blocks.
    fn commands(&mut self) -> Commands;

    /// Blocks until `commands().pause` is false or `commands().stop` is true. A generation that regroups is
    /// over for a rank that waits here.
    fn wait_while_paused(&mut self) -> Result<(), LinkError>;

    /// Says where the trainer is. Never blocks; kept for the next heartbeat.
    fn at(&mut self, phase: Phase, step: Step);

    /// Hands over a report. Blocks only when thousands are waiting.
    fn report(&mut self, report: Report) -> Result<(), LinkError>;
}
