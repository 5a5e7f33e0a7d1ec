//! What faults have cost: the one that is being dealt with, the newest one that was survived, and the
//! budgets.
//!
//! It says whether one more fault can be paid for, and who is to blame. What follows for the run is not its
//! affair.

use std::sync::Arc;

use coxswain_proto::{
    ids::{Generation, Slot},
    limits,
};

use super::{
    action::{Action, Record},
    failure::{Failure, Incident, SpentBudgets},
    news::News,
    past::Past,
    time::Timestamp,
};
use crate::options::{Budgets, CauseKind};

/// The faults of a run.
#[derive(Clone, Debug)]
pub struct Faults {
    /// What ended the newest generation, or keeps the next from starting.
    pub incident: Option<Incident>,
    /// What is used of the budgets.
    pub spent: SpentBudgets,
    /// The newest fault that was survived.
    pub survived: Option<Arc<Failure>>,
    /// What there is to spend.
    pub budgets: Budgets,
    /// Until when survivors may write a last checkpoint, where that is under way.
    close_by: Timestamp,
}

impl Faults {
    /// Faults of earlier lives of the coordinator: what was spent, and what was survived. A last checkpoint
    /// may be written until `close_by`.
    pub fn new(budgets: Budgets, past: &Past, close_by: Timestamp) -> Self {
        Self { incident: None, spent: past.spent.clone(), survived: past.fault.clone(), budgets, close_by }
    }

    /// The incident that is being dealt with, which begins now if there is none.
    pub fn incident(&mut self, now: Timestamp) -> &mut Incident {
        self.incident.get_or_insert_with(|| Incident::new(now))
    }

    /// A generation was being broken up when the coordinator was restarted. A fault of an earlier one has
    /// been paid for, and is not what ended this one.
    pub fn recall(&mut self, now: Timestamp, generation: Generation) {
        let cause = self.survived.clone().filter(|fault| fault.generation == generation);
        let lost = cause.as_ref().and_then(|cause| cause.slot).into_iter().collect();
        self.incident = Some(Incident { cause, lost, ..Incident::new(now) });
    }

    /// A worker suffers from a fault that another rank may be to blame for.
    pub fn complained(&mut self, slot: Slot, complaint: Failure) {
        let Some(incident) = &mut self.incident else { return };
        incident.victims.insert(slot);
        incident.complaint.get_or_insert(complaint);
    }

    /// Makes durable what is used up.
    pub fn spend(&mut self, change: impl FnOnce(&mut SpentBudgets), out: &mut Vec<Action>) {
        change(&mut self.spent);
        out.push(Action::Record(Record::Spent(self.spent.clone())));
    }

    /// Pays for one fault; false if that is more than the run may survive.
    pub fn pay(&mut self, out: &mut Vec<Action>) -> bool {
        let affordable = self.spent.restarts < self.budgets.restarts;
        if affordable {
            self.spend(|spent| spent.restarts += 1, out);
        }
        affordable
    }

    /// This ends the run, once its survivors have written a checkpoint, and by then at the latest.
    pub fn close(&mut self, failure: Failure, by: Timestamp, out: &mut Vec<Action>) {
        self.close_by = by;
        self.spend(|spent| spent.closing = Some(Box::new(failure)), out);
    }

    /// The failure that ends the run as soon as its survivors have written a checkpoint.
    pub fn closing(&self) -> Option<&Failure> {
        self.spent.closing.as_deref()
    }

    /// Until when they may.
    pub fn close_by(&self) -> Option<Timestamp> {
        self.closing().map(|_| self.close_by)
    }

    /// A step was committed: generations do get on.
    pub fn got_on(&mut self, out: &mut Vec<Action>) {
        if self.spent.stalled > 0 {
            self.spend(|spent| (spent.stalled, spent.stalled_slots) = Default::default(), out);
        }
    }

    /// This is to blame, unless something else was found before; either way it is told.
    pub fn blame(&mut self, failure: &Arc<Failure>, out: &mut Vec<Action>) {
        if let Some(incident) = &mut self.incident {
            incident.cause.get_or_insert_with(|| failure.clone());
        }
        out.push(Action::Record(Record::Failure(failure.clone())));
        out.push(Action::Publish(News::Failure(failure.clone(), self.spent.clone())));
    }

    /// A worker is lost that the run does not wait for.
    pub fn outside(&self, failure: &Arc<Failure>, out: &mut Vec<Action>) {
        out.push(Action::Record(Record::Failure(failure.clone())));
        out.push(Action::Publish(News::LostOutside(failure.clone(), self.spent.clone())));
    }

    /// The next generation is about to be formed, so it is known what ended the last one; why it was
    /// `fruitless`, if it was. The failure of the run if this is one fault, or one generation without a
    /// committed step, too many.
    pub fn account(&mut self, fruitless: Option<String>, out: &mut Vec<Action>) -> Result<(), Box<Failure>> {
        if let Some(complaint) = self.of_victims().cloned() {
            if !self.pay(out) {
                return Err(complaint.into());
            }
            self.blame(&Arc::new(complaint), out);
        }
        fruitless
            .and_then(|because| self.hopeless(&because, out))
            .map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Victims without a culprit: ranks lost each other, and all are ready again. What the first of them said
    /// is to blame.
    fn of_victims(&self) -> Option<&Failure> {
        let incident = self.incident.as_ref()?;
        let explained = incident.on_purpose || incident.cause.is_some() || incident.sample.is_some();
        incident.complaint.as_ref().filter(|_| !explained)
    }

    /// A generation has ended without a committed step, `because` of something; the failure of the run, if
    /// that is one too many. A change on purpose is expected to cost a generation, and a sample that failed
    /// will be left out, or not fail elsewhere.
    fn hopeless(&mut self, because: &str, out: &mut Vec<Action>) -> Option<Failure> {
        let incident = self.incident.as_ref();
        if incident.is_some_and(|incident| incident.on_purpose || incident.sample.is_some()) {
            return None;
        }
        // Faults that have nothing to do with each other are no loop: one comes back to the same worker, or
        // has none to blame.
        let lost = incident.map(|incident| incident.lost.clone()).unwrap_or_default();
        let again = lost.is_empty() || !lost.is_disjoint(&self.spent.stalled_slots);
        let stalled = if again { self.spent.stalled + 1 } else { 1 };
        self.spend(|spent| (spent.stalled, spent.stalled_slots) = (stalled, lost), out);
        let message = format!(
            "{stalled} generations in a row ended without a committed step; the last one ended because {because}"
        );
        (stalled >= limits::MAX_STALLED_GENERATIONS).then(|| Failure::of_run(CauseKind::NoProgress, message))
    }

    /// Training goes on: the incident, if there was one, is over.
    pub fn survive(&mut self, out: &mut Vec<Action>) -> Option<Incident> {
        let incident = self.incident.take()?;
        self.survived = incident.suffered();
        if let Some(failure) = &self.survived {
            out.push(Action::Record(Record::Failure(failure.clone())));
        }
        Some(incident)
    }

    /// The fault that is being dealt with, or else the newest one that was.
    pub fn newest(&self) -> Option<Arc<Failure>> {
        self.incident.as_ref().and_then(Incident::suffered).or_else(|| self.survived.clone())
    }
}
