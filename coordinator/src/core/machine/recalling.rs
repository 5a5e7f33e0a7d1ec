//! After a restart of the coordinator: everyone it knew is expected to open their lines again, and training has gone on meanwhile.
//!
//! ```text
//! newest generation   phase
//! over, or none       Gathering: survivors say again that they are ready
//! formed              Connecting: ranks say again where they start
//! started             Training: ranks report again what is not committed, and hold leases of a whole window from there
//! ```

use coxswain_proto::{
    ids::{Generation, Step},
    plan::Plan,
};

use super::{Machine, Timestamp};
use crate::core::{
    action::{Assignment, Member},
    failure::Incident,
    leases::LeaseWindow,
    ledger::StepLedger,
    past::{Past, PastGeneration},
    phase::{Connecting, Course, Gathering, LastCall, Over, Phase, Running, Stage, Training},
    reason::Reason,
    roster::{Gone, Worker},
    status::Rhythm,
};

impl Machine {
    /// Takes over nodes, seats and the phase of an earlier life.
    pub(super) fn recall(&mut self, now: Timestamp, past: &Past) {
        let reunion = self.config.patience.reunion;
        self.motion.begin(now.after(reunion));
        self.motion.look_at = now.after(reunion);
        for (place, node) in &past.nodes {
            self.nodes.recall(now, *place, node.clone(), reunion);
        }
        let assigned = |worker| {
            let places = [past.newest(), past.started()].into_iter().flatten();
            let places = places.filter(|(_, of)| of.members.iter().any(|(_, member)| *member == worker));
            places.map(|(generation, _)| generation).max().unwrap_or_default()
        };
        let size = self.roster.size();
        for (seat, kept) in past.seats.iter().filter(|(seat, _)| seat.0 < size) {
            if let Some(respawn) = kept.respawn.clone() {
                self.roster.recall_respawn(respawn);
            }
            if let Some((id, claim)) = kept.worker.clone().filter(|(_, claim)| claim.seat == *seat) {
                let mut worker = Worker::new(now, id, claim, reunion);
                worker.lines = 1;
                worker.asked_before = 0;
                worker.generation = assigned(id);
                worker.gone = kept.left.map(Gone::Left);
                // Whoever has the seat is what was asked for; only the count goes on.
                self.roster.put(worker);
            }
        }
        match (&past.end, self.plan) {
            (Some(end), _) => {
                self.reason = Reason::of_end(end);
                let deadline = now.after(self.config.patience.farewell);
                self.phase = Phase::Over(Over { end: end.clone(), deadline, expired: false });
            }
            (None, Some(plan)) if !self.roster.all_gone() => self.recall_phase(now, past, plan),
            (None, _) => {}
        }
        self.next_loss = self.next_possible_loss();
        if self.waits_for_drift() == Some(self.progress.committed) {
            self.drift_by = Some(now.after(reunion + self.config.patience.drift));
        }
    }

    fn recall_phase(&mut self, now: Timestamp, past: &Past, plan: Plan) {
        let Some((generation, newest)) = past.newest() else { return };
        let earlier = past.started().map(|(started, of)| self.course(started, of, plan));
        let members = self.members(newest).filter(|_| !newest.over);
        let Some(members) = members else { return self.recall_gathering(now, generation, earlier) };
        let checkpoint = self.checkpoints.newest_complete();
        let assignment = Assignment::new(generation, checkpoint, members, &self.quarantine);
        let (stage, reason) = match (newest.started, earlier) {
            (Some((first_step, _)), Some(course)) => {
                let done = course.ledger.done();
                let reason = match &self.orders.stop {
                    _ if done => Reason::StepsDone,
                    Some(reason) => Reason::StopAsked(reason.clone()),
                    None if self.orders.pause => Reason::Pausing,
                    None => Reason::Recalled { generation, committed: self.progress.committed },
                };
                (Stage::Training(Training { course, first_step, rhythm: Rhythm::default() }), reason)
            }
            (_, earlier) => {
                let workers = assignment.world();
                let connecting = Connecting { earlier, recalled: true, ..Connecting::default() };
                (Stage::Connecting(connecting), Reason::Formed { generation, workers })
            }
        };
        // Those who were to go still are.
        let leaving = assignment.members.iter().any(|member| self.drained(member.seat));
        self.phase = Phase::Running(Box::new(Running {
            assignment: assignment.into(),
            regroup: leaving,
            hand_over: leaving,
            stage,
        }));
        self.reason = reason;
    }

    fn recall_gathering(&mut self, now: Timestamp, generation: Generation, earlier: Option<Course>) {
        let patience = self.config.patience;
        self.phase = Phase::Gathering(Box::new(Gathering {
            settle_by: Some(now.after(patience.reunion + patience.standstill)),
            respawn_by: Some(now.after(patience.reunion.max(patience.respawn))),
            last_call: LastCall::Over,
            earlier,
            ..Gathering::new(now.after(patience.rendezvous))
        }));
        let because = "the coordinator was restarted while its workers were getting ready".to_owned();
        self.reason = Reason::Regathering { generation, because };
        let mut incident = Incident::new(now);
        // A fault of an earlier generation has been paid for, and is not what ended this one.
        incident.cause = self.survived.clone().filter(|fault| fault.generation == generation);
        incident.lost.extend(incident.cause.as_ref().and_then(|cause| cause.seat));
        self.incident = Some(incident);
    }

    /// The members of a generation as they were told; nothing if one of them has lost its seat since.
    fn members(&self, past: &PastGeneration) -> Option<Vec<Member>> {
        let members = past.members.iter().map(|(seat, id)| {
            let worker = self.roster.at(*seat).filter(|worker| worker.id == *id)?;
            Some(Member {
                worker: *id,
                seat: *seat,
                data_address: worker.claim.data_address.clone(),
                host: worker.claim.host.clone(),
            })
        });
        members.collect()
    }

    /// The steps of a generation that has started. Reports in flight are said again; what is leased reaches no further than a window.
    fn course(&self, generation: Generation, past: &PastGeneration, plan: Plan) -> Course {
        let members: Vec<_> = past.members.iter().map(|(_, worker)| *worker).collect();
        let (committed, total) = (self.progress.committed, Step(plan.total_steps()));
        let mut leases = LeaseWindow::new(generation, members.len() as u32, committed, total);
        leases.extend(self.cache.leased_at_most(committed, total));
        leases.assume_all_held();
        let ledger = StepLedger::new(plan, generation, &members, committed).without(self.left_out());
        Course { ledger, leases }
    }
}
