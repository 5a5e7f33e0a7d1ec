//! One worker process: what it said of itself, its line, and its last sign of life; and how many there are of
//! each kind.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
};

use coxswain_proto::ids::{Bytes, Generation, Slot, Step, WorkerId};

use super::{
    event::{StreamId, WorkerClaim},
    line::Line,
    motion::{self, MemberMotion, Pulse},
    report::{Metric, StepTimes, WorkerPhase},
    time::Timestamp,
};
use crate::options::Patience;

/// One worker process.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Name in every call.
    pub id: WorkerId,
    /// What it said of itself.
    pub claim: WorkerClaim,
    /// What it was doing when last heard of.
    pub doing: WorkerActivity,
    /// Where the time of its last reported step went.
    pub times: StepTimes,
    /// Figures of that step.
    pub metrics: Arc<[Metric]>,
    /// Last sign of life.
    pub last_seen: Timestamp,
    /// Whether its trainer moved, as of its last heartbeat.
    pub pulse: Pulse,
    /// For so many ranks it was named for standing still, and has not moved since; 0 if it was not.
    pub named_for: usize,
    /// Line.
    pub line: Line,
    /// Checkpoints that had been asked for when it came: not its affair.
    pub asked_before: u32,
    /// Sequence number of its last line for people.
    pub notes: u64,
    /// The membership it was assigned to last; 0 for none.
    pub generation: Generation,
    /// It can take a place in the next generation.
    pub ready: bool,
    /// Whether it waits without one, and why.
    pub without: WithoutRank,
    /// How it went, once it is gone.
    pub gone: Option<Exit>,
}

/// Why a worker that is there may have no rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct WithoutRank {
    /// It could have one, and waits while others have theirs.
    pub spare: bool,
    /// It was slow, and has one only where there is no other for it.
    pub aside: bool,
}

/// What a worker was doing when last heard of.
#[derive(Clone, Debug)]
pub struct WorkerActivity {
    /// What.
    pub phase: WorkerPhase,
    /// In which step.
    pub step: Step,
    /// Last collective entered, last one finished.
    pub collective: (u64, u64),
    /// Bytes in use.
    pub memory_in_use: Bytes,
}

/// How a worker went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It said good-bye, with this exit code to come.
    Left(i32),
    /// It fell silent, failed, or its process ended without a word.
    Lost,
}

impl Worker {
    /// A process that has just made itself known, or did in an earlier life of the coordinator.
    pub fn new(now: Timestamp, id: WorkerId, claim: WorkerClaim, line: Line) -> Self {
        let (phase, step) = (WorkerPhase::Joining, Step(0));
        Self {
            id,
            claim,
            doing: WorkerActivity { phase, step, collective: (0, 0), memory_in_use: Bytes(0) },
            times: StepTimes::default(),
            metrics: Arc::default(),
            last_seen: now,
            pulse: Pulse::moving(now),
            named_for: 0,
            line,
            asked_before: 0,
            notes: 0,
            generation: Generation(0),
            ready: false,
            without: WithoutRank::default(),
            gone: None,
        }
    }

    /// Place.
    pub fn slot(&self) -> Slot {
        self.claim.slot
    }

    /// True when it can be assigned: ready, and within reach.
    pub fn assignable(&self) -> bool {
        self.gone.is_none() && self.ready && self.line.stream.is_some()
    }

    /// Whether it has a part in a generation that is over, and has not left it.
    pub fn is_leaving(&self) -> bool {
        self.generation.0 > 0 && !self.ready
    }

    /// Whether it waits for other ranks: in a collective, or for its neighbours while the ring is formed.
    pub fn waits_for_ranks(&self) -> bool {
        self.doing.phase == WorkerPhase::Communication || self.in_collective()
    }

    /// Whether it has entered a collective that it has not finished.
    pub fn in_collective(&self) -> bool {
        self.doing.collective.0 > self.doing.collective.1
    }

    /// Whether it may be waiting for a disk: a worker that waits for other ranks does not, in whatever phase.
    pub fn may_wait_for_disk(&self) -> bool {
        motion::may_wait_for_disk(self.doing.phase) && !self.waits_for_ranks()
    }

    /// As far as its motion goes.
    pub fn motion(&self) -> MemberMotion {
        let phase = self.doing.phase;
        let waits = phase == WorkerPhase::Done || self.pulse.waits || self.waits_for_ranks();
        MemberMotion { slot: self.slot(), phase, waits, pulse: self.pulse }
    }

    /// When it counts as lost unless it is heard of again.
    pub fn lost_at(&self, patience: &Patience) -> Timestamp {
        self.line.missed_at().unwrap_or_else(|| self.last_seen.after(patience.hang))
    }

    /// It is gone; the line that it had, which is to be closed.
    pub fn go(&mut self, how: Exit) -> Option<StreamId> {
        (self.gone, self.ready, self.without.spare) = (Some(how), false, false);
        self.line.stream.take()
    }
}

/// Workers of each kind; of one worker, 1 of each kind that it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// There and not gone.
    pub present: u32,
    /// Ready, and within reach.
    pub assignable: u32,
    /// Still in a generation that is over.
    pub leaving: u32,
}

impl Counts {
    /// Counts of one worker alone.
    pub fn from_worker(worker: &Worker) -> Self {
        let present = worker.gone.is_none();
        Self {
            present: u32::from(present),
            assignable: u32::from(worker.assignable()),
            leaving: u32::from(present && worker.is_leaving()),
        }
    }

    /// One worker is of other kinds than it was.
    pub fn change(&mut self, from: Self, to: Self) {
        self.present = self.present + to.present - from.present;
        self.assignable = self.assignable + to.assignable - from.assignable;
        self.leaving = self.leaving + to.leaving - from.leaving;
    }
}

/// A worker that may be changed; what it is then is counted when this is dropped.
pub struct WorkerMut<'a> {
    worker: &'a mut Worker,
    counts: &'a mut Counts,
    was: Counts,
}

impl<'a> WorkerMut<'a> {
    /// A worker among all that are counted.
    pub fn new(worker: &'a mut Worker, counts: &'a mut Counts) -> Self {
        let was = Counts::from_worker(worker);
        Self { worker, counts, was }
    }
}

impl Deref for WorkerMut<'_> {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        self.worker
    }
}

impl DerefMut for WorkerMut<'_> {
    fn deref_mut(&mut self) -> &mut Worker {
        self.worker
    }
}

impl Drop for WorkerMut<'_> {
    fn drop(&mut self) {
        self.counts.change(self.was, Counts::from_worker(self.worker));
    }
}
