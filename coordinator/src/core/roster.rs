//! Workers: who has which slot, their lines and their last sign of life.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use coxswain_proto::ids::{Bytes, Generation, Slot, Step, WorkerId};
use serde::{Deserialize, Serialize};

use super::{
    event::{Beat, StreamId, WorkerClaim},
    failure::Failure,
    line::Line,
    motion::{self, MemberMotion, Pulse},
    refusal::Refusal,
    report::{Metric, StepTimes, WorkerPhase},
    time::Timestamp,
};
use crate::options::Patience;

/// All workers of a run, by slot.
#[derive(Clone, Debug)]
pub struct Roster {
    states: Vec<SlotState>,
    slots: BTreeMap<WorkerId, Slot>,
    /// Of this life of the coordinator.
    first_id: u64,
    next_id: u64,
}

/// One slot.
#[derive(Clone, Debug, Default)]
struct SlotState {
    worker: Option<Worker>,
    /// What its launcher was asked to do, until a new worker takes the slot.
    respawn: Option<Respawn>,
    attempts: u32,
    /// The process whose end its launcher has reported last.
    exited: Option<u32>,
    /// The process that takes the slot next is there already.
    refilled: bool,
    /// A failure of a process that had not registered yet.
    unheard: Option<Failure>,
}

/// End what is left of a worker's process, and start another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Respawn {
    /// Whose.
    #[serde(rename = "seat")]
    pub slot: Slot,
    /// Starts of this worker so far, counted from 1 for the first respawn.
    pub attempt: u32,
    /// For the log.
    pub reason: String,
}

/// One worker process.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Its name in every call.
    pub id: WorkerId,
    /// What it said of itself.
    pub claim: WorkerClaim,
    /// What it was doing when last heard of.
    pub doing: Doing,
    /// Where the time of its last reported step went.
    pub times: StepTimes,
    /// Its figures of that step.
    pub metrics: Arc<[Metric]>,
    /// Last sign of life.
    pub last_seen: Timestamp,
    /// Whether its trainer moved, as of its last heartbeat.
    pub pulse: Pulse,
    /// It was named for standing still, and has not moved since.
    pub named: bool,
    /// Its line.
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
    pub gone: Option<Gone>,
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
pub struct Doing {
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
pub enum Gone {
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
            doing: Doing { phase, step, collective: (0, 0), memory_in_use: Bytes(0) },
            times: StepTimes::default(),
            metrics: Arc::default(),
            last_seen: now,
            pulse: Pulse::moving(now),
            named: false,
            line,
            asked_before: 0,
            notes: 0,
            generation: Generation(0),
            ready: false,
            without: WithoutRank::default(),
            gone: None,
        }
    }

    /// Its place.
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
    pub fn go(&mut self, how: Gone) -> Option<StreamId> {
        (self.gone, self.ready, self.without.spare) = (Some(how), false, false);
        self.line.stream.take()
    }
}

impl Roster {
    /// No worker is there yet. `life` counts the coordinator's starts of this run: worker ids of different
    /// lives differ.
    pub fn new(slots: u32, life: u32) -> Self {
        let first_id = (u64::from(life) << 32) + 1;
        Self {
            states: vec![SlotState::default(); slots as usize],
            slots: BTreeMap::new(),
            first_id,
            next_id: first_id,
        }
    }

    /// Whether a worker was entered in an earlier life of the coordinator.
    pub fn is_recalled(&self, id: WorkerId) -> bool {
        id.0 < self.first_id
    }

    /// Slots in all.
    pub fn size(&self) -> u32 {
        self.states.len() as u32
    }

    /// Enters a worker at a slot that no living worker has.
    pub fn enter(&mut self, now: Timestamp, claim: WorkerClaim, reopen_within: Duration) -> &mut Worker {
        let id = WorkerId(self.next_id);
        self.next_id += 1;
        self.put(Worker::new(now, id, claim, Line::closed(now, reopen_within)))
    }

    /// Puts a worker at its slot; the one before it is forgotten. The slot must be one of this world.
    pub fn put(&mut self, worker: Worker) -> &mut Worker {
        let state = &mut self.states[worker.slot().0 as usize];
        if let Some(old) = &state.worker {
            self.slots.remove(&old.id);
        }
        self.slots.insert(worker.id, worker.slot());
        (state.respawn, state.unheard, state.refilled) = (None, None, false);
        state.worker.insert(worker)
    }

    /// Empties a slot.
    pub fn clear(&mut self, slot: Slot) {
        if let Some(state) = self.states.get_mut(slot.0 as usize)
            && let Some(worker) = state.worker.take()
        {
            self.slots.remove(&worker.id);
        }
    }

    /// As [`Roster::at`].
    pub fn at_mut(&mut self, slot: Slot) -> Option<&mut Worker> {
        self.states.get_mut(slot.0 as usize)?.worker.as_mut()
    }

    /// The open line of the worker at a slot, if it is not gone.
    pub fn line(&self, slot: Slot) -> Option<StreamId> {
        self.living_at(slot)?.line.stream
    }

    /// The worker of this id, though it may be gone.
    pub fn get_mut(&mut self, id: WorkerId) -> Result<&mut Worker, Refusal> {
        let slot = self.slots.get(&id).ok_or(Refusal::UnknownWorker(id))?;
        self.states[slot.0 as usize].worker.as_mut().ok_or(Refusal::UnknownWorker(id))
    }

    /// The worker of this id, if it is not gone: one that was given up is not heard any more.
    pub fn living_mut(&mut self, id: WorkerId) -> Result<&mut Worker, Refusal> {
        self.get_mut(id).ok().filter(|worker| worker.gone.is_none()).ok_or(Refusal::UnknownWorker(id))
    }

    /// Takes a sign of life; false when the worker is not known.
    pub fn heard(&mut self, now: Timestamp, beat: &Beat) -> bool {
        match self.get_mut(beat.worker) {
            Ok(worker) if worker.claim.incarnation == beat.incarnation && worker.gone != Some(Gone::Lost) => {
                worker.last_seen = now;
                worker.doing.memory_in_use = beat.memory_in_use;
                let Beat { still, in_phase, waits, .. } = *beat;
                worker.pulse = Pulse { at: now, still, in_phase, waits };
                // Of a generation that is over it tells nothing of the one that it was assigned to since.
                if beat.generation >= worker.generation {
                    let Beat { phase, step, collective, memory_in_use, .. } = *beat;
                    worker.doing = Doing { phase, step, collective, memory_in_use };
                }
                true
            }
            _ => false,
        }
    }

    /// Workers in slot order, those that are gone too.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.states.iter().filter_map(|state| state.worker.as_ref())
    }

    /// Workers in slot order that are not gone.
    pub fn living(&self) -> impl Iterator<Item = &Worker> {
        self.workers().filter(|worker| worker.gone.is_none())
    }

    /// The worker at a slot, though it may be gone.
    pub fn at(&self, slot: Slot) -> Option<&Worker> {
        self.states.get(slot.0 as usize)?.worker.as_ref()
    }

    /// The worker at a slot, if it is not gone.
    pub fn living_at(&self, slot: Slot) -> Option<&Worker> {
        self.at(slot).filter(|worker| worker.gone.is_none())
    }

    /// Those at these slots have places; all others that could have had one are spares.
    pub fn choose(&mut self, slots: &[Slot]) {
        for worker in self.states.iter_mut().filter_map(|state| state.worker.as_mut()) {
            worker.without.spare = worker.assignable() && !slots.contains(&worker.slot());
        }
    }

    /// A worker is named for standing still; false if it has been before, and has not moved since.
    pub fn name(&mut self, slot: Slot) -> bool {
        self.at_mut(slot).is_some_and(|worker| !std::mem::replace(&mut worker.named, true))
    }

    /// Whether any of these slots has a worker that is not gone.
    pub fn lives_at(&self, mut slots: impl Iterator<Item = Slot>) -> bool {
        slots.any(|slot| self.living_at(slot).is_some())
    }

    /// Workers that are there and not gone.
    pub fn present(&self) -> u32 {
        self.living().count() as u32
    }

    /// True when every worker that came is gone.
    pub fn all_gone(&self) -> bool {
        self.living().next().is_none()
    }

    /// The first worker that counts as lost now.
    pub fn lost(&self, now: Timestamp, patience: &Patience) -> Option<&Worker> {
        self.living().filter(|worker| worker.lost_at(patience) <= now).min_by_key(|worker| worker.last_seen)
    }

    /// The earliest moment at which a worker could count as lost.
    pub fn next_loss(&self, patience: &Patience) -> Option<Timestamp> {
        self.living().map(|worker| worker.lost_at(patience)).min()
    }

    /// Asks for a new process at a slot.
    pub fn ask_respawn(&mut self, slot: Slot, reason: String) -> Option<&Respawn> {
        let state = self.states.get_mut(slot.0 as usize)?;
        state.attempts = state.attempts.saturating_add(1);
        let attempt = state.attempts;
        Some(state.respawn.insert(Respawn { slot, attempt, reason }))
    }

    /// What the launcher of a slot was asked and has not done.
    pub fn respawn(&self, slot: Slot) -> Option<&Respawn> {
        self.states.get(slot.0 as usize)?.respawn.as_ref()
    }

    /// No process is wanted at a slot any more; whether one was.
    pub fn withdraw(&mut self, slot: Slot) -> bool {
        self.states.get_mut(slot.0 as usize).is_some_and(|state| state.respawn.take().is_some())
    }

    /// Restores what was asked in an earlier life of the coordinator.
    pub fn recall_respawn(&mut self, respawn: Respawn) {
        if let Some(state) = self.states.get_mut(respawn.slot.0 as usize) {
            state.attempts = respawn.attempt;
            state.respawn = Some(respawn);
        }
    }

    /// A new launcher starts all of its workers by itself.
    pub fn forget_respawn(&mut self, slot: Slot) {
        if let Some(state) = self.states.get_mut(slot.0 as usize) {
            (state.respawn, state.exited) = (None, None);
        }
    }

    /// A process ended. False when that is no news: it was reported before, is known to be gone, or another
    /// has the slot by now. A launcher says nothing of a process that it ends because it was asked for
    /// another.
    pub fn exited(&mut self, slot: Slot, pid: Option<u32>) -> bool {
        let Some(state) = self.states.get_mut(slot.0 as usize) else { return false };
        let told = pid.is_some() && std::mem::replace(&mut state.exited, pid) == pid;
        let news = match (&state.worker, pid) {
            (None, _) => true,
            // Without a process: a successor that was asked for could not be started.
            (Some(worker), None) => worker.gone.is_none() || state.respawn.is_some(),
            (Some(worker), Some(pid)) => (worker.claim.pid == pid) == worker.gone.is_none(),
        };
        news && !told
    }

    /// A process came to the slot by itself, and takes it: no other need be asked for.
    pub fn refill(&mut self, slot: Slot) {
        if let Some(state) = self.states.get_mut(slot.0 as usize) {
            state.refilled = true;
        }
    }

    /// Whether the slot has been refilled; asked once.
    pub fn refilled(&mut self, slot: Slot) -> bool {
        self.states.get_mut(slot.0 as usize).is_some_and(|state| std::mem::take(&mut state.refilled))
    }

    /// Keeps the failure of a process that had not registered, for when its end is reported.
    pub fn note_unheard(&mut self, slot: Slot, failure: Failure) {
        if let Some(state) = self.states.get_mut(slot.0 as usize) {
            state.unheard = Some(failure);
        }
    }

    /// What a process that had not registered said of its failure.
    pub fn take_unheard(&mut self, slot: Slot) -> Option<Failure> {
        self.states.get_mut(slot.0 as usize)?.unheard.take()
    }
}
