//! Workers: who has which slot, their lines and their last sign of life.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use coxswain_proto::ids::{Slot, WorkerId};
use serde::{Deserialize, Serialize};

pub use super::worker::{Exit, Worker, WorkerActivity, WorkerMut};
use super::{
    event::{Beat, StreamId, WorkerClaim},
    failure::Failure,
    line::Line,
    motion::Pulse,
    refusal::Refusal,
    time::Timestamp,
    worker::Counts,
};
use crate::options::Patience;

/// All workers of a run, by slot.
///
/// Nothing that happens to one worker looks at all of them: how many there are of each kind is counted as
/// they change.
#[derive(Clone, Debug)]
pub struct Roster {
    states: Vec<SlotState>,
    slots: HashMap<WorkerId, Slot>,
    counts: Counts,
    /// The first id of this life of the coordinator.
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

impl Roster {
    /// No worker is there yet. `life` counts the coordinator's starts of this run: worker ids of different
    /// lives differ.
    pub fn new(slots: u32, life: u32) -> Self {
        let first_id = (u64::from(life) << 32) + 1;
        Self {
            states: vec![SlotState::default(); slots as usize],
            slots: HashMap::new(),
            counts: Counts::default(),
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
    pub fn enter(&mut self, now: Timestamp, claim: WorkerClaim, reopen_within: Duration) -> WorkerId {
        let id = WorkerId(self.next_id);
        self.next_id += 1;
        self.put(Worker::new(now, id, claim, Line::closed(now, reopen_within)));
        id
    }

    /// Puts a worker at its slot; the one before it is forgotten. The slot must be one of this world.
    pub fn put(&mut self, worker: Worker) {
        self.clear(worker.slot());
        self.slots.insert(worker.id, worker.slot());
        self.counts.change(Counts::default(), Counts::from_worker(&worker));
        let state = &mut self.states[worker.slot().0 as usize];
        (state.respawn, state.unheard, state.refilled) = (None, None, false);
        state.worker = Some(worker);
    }

    /// Empties a slot.
    pub fn clear(&mut self, slot: Slot) {
        if let Some(state) = self.states.get_mut(slot.0 as usize)
            && let Some(worker) = state.worker.take()
        {
            self.slots.remove(&worker.id);
            self.counts.change(Counts::from_worker(&worker), Counts::default());
        }
    }

    /// As [`Roster::at`].
    pub fn at_mut(&mut self, slot: Slot) -> Option<WorkerMut<'_>> {
        let worker = self.states.get_mut(slot.0 as usize)?.worker.as_mut()?;
        Some(WorkerMut::new(worker, &mut self.counts))
    }

    /// The open line of the worker at a slot, if it is not gone.
    pub fn line(&self, slot: Slot) -> Option<StreamId> {
        self.living_at(slot)?.line.stream
    }

    /// The worker of this id, though it may be gone.
    pub fn get_mut(&mut self, id: WorkerId) -> Result<WorkerMut<'_>, Refusal> {
        let slot = self.slots.get(&id).copied();
        slot.and_then(|slot| self.at_mut(slot)).ok_or(Refusal::UnknownWorker(id))
    }

    /// The slot of the worker of this id, though it may be gone.
    pub fn slot_of(&self, id: WorkerId) -> Result<Slot, Refusal> {
        self.slots.get(&id).copied().ok_or(Refusal::UnknownWorker(id))
    }

    /// The worker of this id, if it is not gone: one that was given up is not heard any more.
    pub fn living_mut(&mut self, id: WorkerId) -> Result<WorkerMut<'_>, Refusal> {
        self.get_mut(id).ok().filter(|worker| worker.gone.is_none()).ok_or(Refusal::UnknownWorker(id))
    }

    /// Takes a sign of life; false when the worker is not known.
    pub fn heard(&mut self, now: Timestamp, beat: &Beat) -> bool {
        let given_at = now.before(beat.age);
        match self.get_mut(beat.worker) {
            Ok(mut worker)
                if *worker.claim.incarnation == *beat.incarnation && worker.gone != Some(Exit::Lost) =>
            {
                worker.last_seen = worker.last_seen.max(given_at);
                if given_at < worker.pulse.at {
                    // A newer one has come already.
                    return true;
                }
                worker.doing.memory_in_use = beat.memory_in_use;
                let Beat { still, in_phase, waits, .. } = *beat;
                worker.pulse = Pulse { at: given_at, still, in_phase, waits };
                // Of a generation that is over it tells nothing of the one that it was assigned to since.
                if beat.generation >= worker.generation {
                    let Beat { phase, step, collective, memory_in_use, .. } = *beat;
                    worker.doing = WorkerActivity { phase, step, collective, memory_in_use };
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

    /// Gives the workers at these slots places; all others that could have had one are spares.
    pub fn choose(&mut self, slots: &[Slot]) {
        let chosen: HashSet<_> = slots.iter().collect();
        for worker in self.states.iter_mut().filter_map(|state| state.worker.as_mut()) {
            worker.without.spare = worker.assignable() && !chosen.contains(&worker.slot());
        }
    }

    /// A worker is named for standing still, alone or for so many; false if it has been before, likewise, and
    /// has not moved since.
    pub fn name(&mut self, slot: Slot, ranks: usize) -> bool {
        let Some(mut worker) = self.at_mut(slot) else { return false };
        let before = std::mem::replace(&mut worker.named_for, ranks);
        before == 0 || (before == 1) != (ranks == 1)
    }

    /// Whether any of these slots has a worker that is not gone.
    pub fn lives_at(&self, mut slots: impl Iterator<Item = Slot>) -> bool {
        slots.any(|slot| self.living_at(slot).is_some())
    }

    /// Workers that are there and not gone.
    pub fn present(&self) -> u32 {
        self.counts.present
    }

    /// Workers that can be assigned.
    pub fn assignable(&self) -> u32 {
        self.counts.assignable
    }

    /// Whether a worker is still leaving a generation that is over.
    pub fn any_leaving(&self) -> bool {
        self.counts.leaving > 0
    }

    /// Whether the counts are right, which is linear in the world.
    pub fn counts_right(&self) -> bool {
        let mut counted = Counts::default();
        self.workers().for_each(|worker| counted.change(Counts::default(), Counts::from_worker(worker)));
        counted == self.counts
    }

    /// True when every worker that came is gone.
    pub fn all_gone(&self) -> bool {
        self.counts.present == 0
    }

    /// Workers that count as lost now, the longest unheard first.
    pub fn lost(&self, now: Timestamp, patience: &Patience) -> Vec<Slot> {
        let lost = self.living().filter(|worker| worker.lost_at(patience) <= now);
        let mut lost: Vec<_> = lost.map(|worker| (worker.last_seen, worker.slot())).collect();
        lost.sort();
        lost.into_iter().map(|(_, slot)| slot).collect()
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
