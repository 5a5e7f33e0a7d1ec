//! What is due because time has passed: losses, hangs, measurements that do not come, phases that last too
//! long.

use coxswain_proto::{ids::Slot, limits::LOOK_INTERVAL};

use super::{
    forming, losing,
    run::Run,
    standstill::{self, LateStep},
    transitions,
};
use crate::{
    core::{
        action::{Action, Record},
        failure::Failure,
        motion::{MemberMotion, StillRank, Verdict},
        news::{MemberChange, News},
        phase::{LastCall, Phase},
        report::WorkerPhase,
        time::Timestamp,
    },
    options::CauseKind,
};

/// A run that is looked at as time passes.
pub(super) struct Watch<'a> {
    pub(super) run: &'a mut Run,
}

/// When something is due next.
pub(super) fn next_deadline(run: &Run) -> Option<Timestamp> {
    let phase = match &run.phase {
        Phase::Gathering(gathering) => Some(gathering.next()),
        Phase::Running(_) => run.faults.close_by(),
        Phase::Over(over) => (!over.expired).then_some(over.deadline),
    };
    let look_at = (!run.phase.is_over()).then_some(run.fleet.motion.look_at);
    let (loss, drift) = (run.fleet.watched_from(), run.progress.drift_deadline());
    [phase, look_at, loss, run.memory.deadline(), drift].into_iter().flatten().min()
}

impl Watch<'_> {
    /// Does all that is due now.
    pub(super) fn tick(&mut self) {
        self.run.memory.answer(self.run.now, &self.run.fleet.roster, true, &mut self.run.out);
        if self.run.fleet.watched_from().is_some_and(|at| at <= self.run.now) {
            self.look_for_losses();
        }
        self.look_for_drift();
        if !self.run.phase.is_over() && self.run.fleet.motion.look_at <= self.run.now {
            self.look_for_standstill();
        }
        self.phase_deadline();
    }

    /// Every worker and node that has been missed for too long is lost.
    fn look_for_losses(&mut self) {
        let lost = self.run.fleet.lost(self.run.now);
        if self.run.fleet.is_deserted(&lost) {
            // No worker of an earlier launch has come by the end of the reunion: all of it is over.
            let places: Vec<_> = (0..self.run.config.world.max_nodes).collect();
            self.run.replace_launch(&places);
        }
        for slot in lost {
            // It may be gone with that, or by what followed from the loss of another one.
            if self.run.fleet.is_lost(self.run.now, slot) {
                self.lose_unheard(slot);
            }
        }
        for place in self.run.fleet.lose_nodes(self.run.now) {
            let host = self.run.fleet.nodes.host(place).to_owned();
            self.run.out.push(Action::Record(Record::NodeGone { place }));
            if !self.run.phase.is_over() {
                self.run.announce(MemberChange::NodeGone { node_rank: place, host });
            }
            self.run.forget_drain(place);
        }
        self.run.fleet.looked();
        self.run.try_form();
    }

    /// A worker has not been heard of for too long.
    fn lose_unheard(&mut self, slot: Slot) {
        let Some(lost) = self.run.fleet.roster.living_at(slot) else { return };
        let silent = self.run.now.since(lost.last_seen).as_secs_f64();
        let message = match lost.line.stream {
            Some(_) => {
                format!(
                    "no sign of life for {silent:.1} s, although its connection is open: its process is frozen"
                )
            }
            None => {
                format!("its connection closed unexpectedly, and there was no sign of life for {silent:.1} s")
            }
        };
        self.run.lose_silently(slot, message);
    }

    /// A measurement of drift is overdue: no rank is measuring, and it has not come.
    fn look_for_drift(&mut self) {
        if self.run.progress.drift_deadline().is_none_or(|by| by > self.run.now) {
            return;
        }
        let measuring = self.run.fleet.roster.living().any(|worker| may_measure(worker.doing.phase));
        if measuring || self.run.orders.pause {
            self.run.progress.cache.wait_longer(self.run.now);
        } else {
            self.run.grant(&self.run.progress.dry_ranks());
        }
    }

    /// A worker that stands still is named, or lost.
    fn look_for_standstill(&mut self) {
        let now = self.run.now;
        self.run.fleet.motion.look_at = now.after(LOOK_INTERVAL);
        if let Some(since) = self.run.progress.safe_since {
            // A worker that has not left some time after the first good-bye is no longer waited for.
            if since.after(self.run.config.patience.farewell) <= now {
                self.run.end(self.run.end_in_order());
            }
            return;
        }
        let quiet = standstill::quiet(self.run);
        if let Some((member, still)) = quiet.iter().find(|(_, still)| still.verdict == Verdict::GiveUp) {
            return self.give_up(member, still);
        }
        for (member, still) in quiet {
            if let Some(follows) = standstill::follows(&still)
                && self.run.fleet.name(&member, still.ranks())
            {
                let text = standstill::in_words(self.run, &member, &still);
                let text = format!("{}; {follows}", text.trim_start_matches("it "));
                self.run.publish(News::Standstill(member.slot, text));
            }
        }
        match standstill::late_step(self.run) {
            Some(LateStep::Culprit(member, still)) => self.give_up(&member, &still),
            Some(LateStep::Nobody(collective, message)) => self.try_again(collective, message),
            None => {}
        }
    }

    /// A rank that stands still is lost, or a process that has never made itself known: another one is asked
    /// for.
    fn give_up(&mut self, member: &MemberMotion, still: &StillRank) {
        let message = standstill::in_words(self.run, member, still);
        let failure = self.run.failure_of(member.slot, CauseKind::WorkerLost, message);
        if member.phase == WorkerPhase::Starting {
            self.run.fleet.give_up_start(self.run.now, member.slot);
        }
        self.run.lose(member.slot, failure);
    }

    /// Ranks do not come out of a collective: the network may have lost something. All try again.
    fn try_again(&mut self, collective: u64, message: String) {
        let complaint = Failure {
            generation: self.run.generation,
            phase: WorkerPhase::Communication,
            collective,
            ..Failure::of_run(CauseKind::PeerLost, message.clone())
        };
        self.run.faults.incident(self.run.now).complaint.get_or_insert(complaint);
        self.run.break_up(&message, true);
    }

    /// What is due because the phase has lasted long enough.
    fn phase_deadline(&mut self) {
        let now = self.run.now;
        match &mut self.run.phase {
            Phase::Gathering(_) | Phase::Running(_)
                if self.run.faults.close_by().is_some_and(|by| by <= now) =>
            {
                transitions::conclude(self.run, "it took too long");
            }
            Phase::Gathering(gathering) if gathering.deadline <= now => {
                transitions::close(self.run, forming::failed(self.run))
            }
            Phase::Gathering(gathering) => {
                let due = |at: Option<Timestamp>| at.is_some_and(|at| at <= now);
                if due(gathering.respawn_by) {
                    gathering.respawn_by = None;
                }
                if matches!(gathering.last_call, LastCall::Open(until) if until <= now) {
                    gathering.last_call = LastCall::Over;
                }
                if due(gathering.settle_by) {
                    self.look_for_stragglers();
                }
                self.run.try_form();
            }
            Phase::Over(over) if over.deadline <= now => over.expired = true,
            Phase::Running(_) | Phase::Over(_) => {}
        }
    }

    /// Members of the old generation that have not left it in time are lost, unless they move, or may be
    /// waiting for a disk: those are lost once they stand still.
    fn look_for_stragglers(&mut self) {
        let late = losing::stragglers(self.run);
        let Phase::Gathering(gathering) = &mut self.run.phase else { return };
        let again = self.run.now.after(self.run.config.patience.standstill);
        gathering.settle_by = late.iter().any(|(_, stuck)| !stuck).then_some(again);
        for (slot, _) in late.into_iter().filter(|(_, stuck)| *stuck) {
            let message = format!("it did not leave generation {} in time: it is stuck", self.run.generation);
            self.run.lose_silently(slot, message);
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
