//! What `status` shows: a snapshot of the run.

use std::{sync::Arc, time::Duration};

use coxswain_proto::{
    cache_plan::CacheDecision,
    ids::{Bytes, Generation, Slot, Step, WorkerId},
    order::Order,
    plan::Plan,
    run_spec::{CacheMode, Tap},
};

use super::{
    cache::{DriftEntry, GenerationEntry, GenerationState},
    checkpoints::CheckpointEntry,
    failure::{Failure, SpentBudgets},
    reason::{Reason, RunPhase},
    report::{CommittedStep, Metric, StepTimes, WorkerPhase},
    slot_health::SlotHealth,
    stragglers::Slowness,
};

/// A run at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// Where it is.
    pub phase: RunPhase,
    /// Why.
    pub reason: Reason,
    /// The membership; 0 before there is one.
    pub generation: Generation,
    /// How many are there, of how many.
    pub workers: Workers,
    /// Steps below this one are committed.
    pub committed: Step,
    /// What there is to do; absent before a worker has told the size of the data set.
    pub plan: Option<Plan>,
    /// The step committed last of those that were learned from.
    pub last: Option<Arc<CommittedStep>>,
    /// Committed steps that were left out.
    pub skipped: u64,
    /// The newest error on held-out samples.
    pub held_out: Vec<Metric>,
    /// To the end at the present speed.
    pub eta: Option<Duration>,
    /// In slot order.
    pub ranks: Vec<RankStatus>,
    /// The newest, in step order.
    pub checkpoints: Vec<CheckpointEntry>,
    /// What ended the run, or else the newest fault that it survived.
    pub failure: Option<Arc<Failure>>,
    /// What is used of the budgets.
    pub spent: SpentBudgets,
    /// Faults that may be survived.
    pub max_restarts: u32,
    /// The feature cache, if there is one.
    pub cache: Option<CacheStatus>,
    /// Nodes that are to go, by place.
    pub leaving: Vec<LeavingNode>,
    /// Slots whose hardware has shown faults, in order.
    pub hardware: Vec<HardwareFaults>,
    /// The order of its samples, once a worker has told it.
    pub order: Option<Order>,
}

impl Status {
    /// The epoch of the next step; 0 before there is a plan.
    pub fn epoch(&self) -> u64 {
        self.plan.map_or(0, |plan| plan.epoch(self.committed))
    }
}

/// How many workers are there, of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workers {
    /// Workers that are wanted.
    pub wanted: u32,
    /// Workers that are there.
    pub present: u32,
    /// Present workers that wait while others have ranks.
    pub spare: u32,
}

/// A node that was asked to leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeavingNode {
    /// Place.
    pub place: u32,
    /// Launcher.
    pub node_id: String,
    /// Machine.
    pub host: String,
    /// Workers that are still there.
    pub workers: u32,
}

/// A slot whose hardware has shown faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HardwareFaults {
    /// Place.
    pub slot: Slot,
    /// Machine.
    pub host: String,
    /// What is known.
    pub health: SlotHealth,
}

/// The feature cache at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheStatus {
    /// As configured.
    pub mode: CacheMode,
    /// As configured.
    pub tap: Tap,
    /// The generation that serves the next step; 0 in a live phase.
    pub serving: u64,
    /// Where the cache phase of the next step ends, if it does.
    pub cache_phase_ends: Option<Step>,
    /// The step whose lease waits for a measurement of drift.
    pub waits_at: Option<Step>,
    /// The newest generations, oldest first.
    pub generations: Vec<(GenerationEntry, GenerationState)>,
    /// The newest measurements of drift, and what was decided there.
    pub drifts: Vec<(DriftEntry, Option<CacheDecision>)>,
}

/// One slot at one moment: the worker that has it, or is on the way to it.
#[derive(Clone, Debug, PartialEq)]
pub struct RankStatus {
    /// Place.
    pub slot: Slot,
    /// Machine.
    pub host: String,
    /// Node.
    pub node_rank: u32,
    /// Place on its node.
    pub local_rank: u32,
    /// Since it was last heard of; since its process was started, if it never was.
    pub silent: Duration,
    /// What is known of it.
    pub occupant: Occupant,
}

/// Who has a slot.
#[derive(Clone, Debug, PartialEq)]
pub enum Occupant {
    /// A process that its launcher starts, and that has not made itself known.
    Starting,
    /// A worker.
    Worker(WorkerStatus),
}

/// What is known of a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerStatus {
    /// Name in every call.
    pub worker: WorkerId,
    /// It is lost, or has left, and no process is on the way to its slot: all else is as of then.
    pub gone: bool,
    /// Process.
    pub pid: u32,
    /// Device.
    pub device: String,
    /// What it was doing when last heard of.
    pub phase: WorkerPhase,
    /// In which step.
    pub step: Step,
    /// Steps it may run: from here...
    pub lease_first: Step,
    /// ...up to here.
    pub lease_end: Step,
    /// Where the time of its last reported step went.
    pub times: StepTimes,
    /// Figures of that step.
    pub metrics: Arc<[Metric]>,
    /// Largest peak it has reported.
    pub memory_peak: Bytes,
    /// How slow it is beside the other ranks, if it is.
    pub slow: Option<Slowness>,
    /// It waits, with its model loaded, while others have ranks.
    pub spare: bool,
}

impl RankStatus {
    /// The worker, if there is or was one.
    pub fn worker(&self) -> Option<&WorkerStatus> {
        match &self.occupant {
            Occupant::Worker(worker) => Some(worker),
            Occupant::Starting => None,
        }
    }
}

/// How fast a run goes: a running mean of step times, for the time to the end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    mean: Option<Duration>,
    seen: u32,
}

impl Pace {
    /// Weight of the newest step: about the last ten count.
    const WEIGHT: f64 = 0.1;
    /// The first steps of a process are slower than the rest.
    const ENOUGH: u32 = 3;

    /// Takes a committed step's time.
    pub fn add_step(&mut self, step: &CommittedStep) {
        let time = step.times.total;
        self.seen = self.seen.saturating_add(1);
        self.mean = Some(match self.mean {
            None => time,
            Some(mean) => mean.mul_f64(1.0 - Self::WEIGHT) + time.mul_f64(Self::WEIGHT),
        });
    }

    /// The mean, once some have been seen.
    fn expected(&self) -> Option<Duration> {
        self.mean.filter(|_| self.seen >= Self::ENOUGH)
    }

    /// The time that `steps` more take.
    pub fn time_for(&self, steps: u64) -> Option<Duration> {
        let seconds = self.mean?.as_secs_f64() * steps as f64;
        Duration::try_from_secs_f64(seconds).ok()
    }
}

/// How long the steps of one generation take: a cached step is many times as fast as a live one, and says
/// nothing about it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rhythm {
    live: Pace,
    cached: Pace,
}

impl Rhythm {
    /// Takes a committed step's time.
    pub fn add_step(&mut self, step: &CommittedStep) {
        let pace = if step.cache_generation > 0 { &mut self.cached } else { &mut self.live };
        pace.add_step(step);
    }

    /// The time that a step of this kind is expected to take, once some have been seen.
    pub fn expected(&self, cached: bool) -> Option<Duration> {
        if cached { self.cached.expected() } else { self.live.expected() }
    }
}
