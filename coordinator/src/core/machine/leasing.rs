//! How far ranks may go: leases are granted ahead of the commits, and no further than it is decided where features come from.

use coxswain_proto::ids::{Rank, Step};

use super::{Machine, Timestamp};
use crate::core::{
    action::{Action, Directive, Lease},
    phase::{Phase, Stage, Training},
    report::WorkerPhase,
};

impl Machine {
    /// Grants a rank that has reported what it is due.
    pub(super) fn grant_to(&mut self, now: Timestamp, rank: Rank, out: &mut Vec<Action>) {
        let committed = self.progress.committed;
        if self.training_now().is_some_and(|training| training.course.leases.due(rank, committed)) {
            self.grant(now, &[rank], out);
        }
    }

    /// Grants those that have nothing left to run, and nothing to report that would remind us of them.
    pub(super) fn grant_dry(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let Some(training) = self.training_now() else { return };
        let dry = training.course.leases.dry(training.course.ledger.all_owed());
        if !dry.is_empty() {
            self.grant(now, &dry, out);
        }
    }

    /// Grants every rank of a generation that has just started.
    pub(super) fn grant_all(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let Some(training) = self.training_now() else { return };
        let ranks: Vec<_> = (0..training.course.ledger.all_owed().count() as u32).map(Rank).collect();
        self.grant(now, &ranks, out);
    }

    /// What a rank holds, for a line that was opened again.
    pub(super) fn held_by(&mut self, rank: Rank) -> Vec<Lease> {
        let (cache, committed) = (&self.cache, self.progress.committed);
        match self.phase.training_mut() {
            Some(training) => training.course.leases.replay(rank, committed, |step| cache.lease_turn(step)),
            None => Vec::new(),
        }
    }

    /// The step that no lease reaches because nobody knows yet where its features come from.
    pub(in crate::core) fn waits_for_drift(&self) -> Option<Step> {
        let training = self.training_now()?;
        let (end, total) = (training.course.leases.end(), self.plan?.total_steps());
        (end.0 < total && self.cache.turns().turn(end).is_none()).then_some(end)
    }

    /// When the measurement is given up that everybody waits for: while there are steps to do before it, nobody does.
    pub(super) fn drift_deadline(&self) -> Option<Timestamp> {
        self.drift_by.filter(|_| self.waits_for_drift() == Some(self.progress.committed))
    }

    /// A measurement of drift is overdue: nobody is measuring, and it has not come.
    pub(super) fn look_for_drift(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let Some(by) = self.drift_deadline().filter(|by| *by <= now) else { return };
        let measuring = self.roster.living().any(|worker| may_measure(worker.phase));
        if measuring || self.orders.pause {
            self.drift_by = Some(now.after(self.config.patience.drift));
        } else {
            self.drift_by = Some(by);
            self.grant_dry(now, out);
        }
    }

    fn grant(&mut self, now: Timestamp, ranks: &[Rank], out: &mut Vec<Action>) {
        self.extend_window(now, out);
        let cache = &self.cache;
        let Phase::Running(running) = &mut self.phase else { return };
        let Stage::Training(training) = &mut running.stage else { return };
        for rank in ranks {
            let leases = training.course.leases.grant(*rank, |step| cache.lease_turn(step));
            let member = running.assignment.members.get(rank.0 as usize);
            let line = member.and_then(|member| self.roster.living_at(member.seat)?.line);
            if let Some(stream) = line {
                out.extend(leases.into_iter().map(|lease| Action::Tell(stream, Directive::Lease(lease))));
            }
        }
    }

    /// Moves the end of the window to where it should be, and decides about turns on the way.
    fn extend_window(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let committed = self.progress.committed;
        let Some(window) = self.training_now().map(|training| &training.course.leases) else { return };
        let (end, mut target) = (window.end(), window.target(committed));
        let overdue = self.drift_by.is_some_and(|by| by <= now);
        while let Some(at) = self.cache.turns().undecided(end, target) {
            let Some(decided) = self.cache.decide(at, overdue && at == end) else {
                if committed == at && self.drift_by.is_none() {
                    self.drift_by = Some(now.after(self.config.patience.drift));
                }
                target = at;
                break;
            };
            self.record_turn(&decided, out);
            if end == at {
                // Everybody has waited for this, and not stood still.
                self.drift_by = None;
            }
        }
        if let Some(training) = self.phase.training_mut() {
            training.course.leases.extend(target);
        }
    }

    fn training_now(&self) -> Option<&Training> {
        match &self.phase {
            Phase::Running(running) => running.training(),
            Phase::Gathering(_) | Phase::Over(_) => None,
        }
    }
}

/// Phases in which drift is measured, or that may come before it.
fn may_measure(phase: WorkerPhase) -> bool {
    matches!(
        phase,
        WorkerPhase::Loading | WorkerPhase::Checkpoint | WorkerPhase::CacheBuild | WorkerPhase::Evaluation
    )
}
