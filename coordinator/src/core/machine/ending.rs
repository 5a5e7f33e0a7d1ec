//! The end of a run: good-byes, failures that would come again, a world that is never complete.

use coxswain_proto::ids::{Seat, Step, WorkerId};

use super::{Machine, Refusal, Reply, Timestamp};
use crate::{
    core::{
        action::{Action, Record},
        failure::{Failure, Incident},
        news::MemberChange,
        phase::{End, Phase},
        roster::{Gone, Worker},
    },
    options::CauseKind,
};

impl Machine {
    pub(super) fn leave(
        &mut self,
        now: Timestamp,
        id: WorkerId,
        exit_code: i32,
        reason: String,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let worker = self.roster.get_mut(id)?;
        worker.last_seen = now;
        if worker.gone.is_some() {
            return Ok(Reply::Done);
        }
        worker.gone = Some(Gone::Left(exit_code));
        worker.ready = false;
        out.extend(worker.line.take().map(Action::Close));
        let seat = worker.seat();
        self.watch_for_its_node(seat);
        out.push(Action::Record(Record::Left { seat, exit_code }));
        self.announce(MemberChange::Left { seat, exit_code, reason: reason.clone() }, out);
        if exit_code == 0 && self.orders.stop.is_none() {
            self.settle_all(id, out);
        }
        let at_the_end = self.all_done() || self.orders.stop.is_some();
        let in_order = match &self.phase {
            Phase::Gathering(_) if exit_code == 0 && at_the_end && !self.drained(seat) => {
                // Nobody leaves in order before the results are on disk, whatever ended the generation after that.
                self.end(now, self.end_in_order(), out);
                return Ok(Reply::Done);
            }
            Phase::Gathering(_) => false,
            Phase::Running(_) => exit_code == 0 && at_the_end,
            Phase::Over(_) => true,
        };
        if in_order {
            if self.result_is_safe() {
                self.safe_since.get_or_insert(now);
            }
            self.finish(now, out);
        } else if exit_code == 0 && self.drained(seat) && !self.is_member(seat) {
            // It was to go.
        } else if exit_code == 0 && self.config.world.elastic() {
            self.shrink(now, seat, &reason, out);
        } else {
            let message = format!("left with exit code {exit_code} before the run was over: {reason}");
            self.lose_silently(now, seat, message, out);
        }
        self.try_form(now, out);
        Ok(Reply::Done)
    }

    /// Whoever leaves in order has come to the end, and with it all others: the last step has collectives. What its peers could not
    /// report of the last steps, because they are lost or cut off, is committed from its own reports.
    fn settle_all(&mut self, id: WorkerId, out: &mut Vec<Action>) {
        let (Some(plan), Some(course)) = (self.plan, self.phase.course_mut()) else { return };
        if course.ledger.rank_of(id).is_none_or(|rank| !course.ledger.has_reported_all(rank)) {
            return;
        }
        // Nothing is committed blindly: its reports cover every step that is left.
        let steps = course.ledger.settle(Step(plan.total_steps()), false, |_| 0).unwrap_or_default();
        for step in steps {
            self.committed_step(&step, out);
        }
    }

    /// Every step is committed, of a generation that runs or has just ended.
    pub(super) fn all_done(&self) -> bool {
        self.phase.course().is_some_and(|course| course.ledger.done())
    }

    /// A worker of an elastic world was taken away on purpose: the others go on.
    fn shrink(&mut self, now: Timestamp, seat: Seat, reason: &str, out: &mut Vec<Action>) {
        let incident = self.incident.get_or_insert_with(|| Incident::new(now));
        incident.on_purpose |= incident.lost.is_empty();
        self.spend(|spent| spent.rescales += 1, out);
        if matches!(&self.phase, Phase::Running(_)) {
            self.break_up(now, &format!("rank {seat} left: {reason}"), true, out);
        }
    }

    /// The rendezvous took too long. If a fault began it, that is the cause.
    pub(super) fn rendezvous_failed(&self) -> Failure {
        if let Some(cause) = self.incident.as_ref().and_then(|incident| incident.cause.as_ref()) {
            let mut failure = (**cause).clone();
            failure.message.push_str("; nobody came in its place");
            return failure;
        }
        let (world, enough) = (self.config.world.size(), self.config.world.least());
        let seconds = self.config.patience.rendezvous.as_secs();
        let present = self.roster.present();
        let message = if present >= enough {
            let waiting = self.roster.living().filter(|worker| !worker.assignable());
            let came = if present == world { format!("all {world}") } else { present.to_string() };
            let ranks = some(waiting.map(Worker::seat));
            format!("{came} workers came, but not all were ready within {seconds} s: ranks {ranks}")
        } else if self.config.world.elastic() {
            format!("only {present} of the {enough} workers that are enough came within {seconds} s")
        } else {
            let missing = (0..world).map(Seat).filter(|seat| self.roster.living_at(*seat).is_none());
            let missing = some(missing);
            format!("only {present} of {world} workers came within {seconds} s; missing ranks: {missing}")
        };
        Failure::of_run(CauseKind::Rendezvous, message)
    }

    /// Running to Over, once every worker has left.
    pub(super) fn finish(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let Phase::Running(running) = &self.phase else { return };
        if running.assignment.members.iter().any(|member| self.roster.living_at(member.seat).is_some()) {
            return;
        }
        self.end(now, self.end_in_order(), out);
    }

    /// The end of a run whose results are there.
    pub(super) fn end_in_order(&self) -> End {
        let steps = self.progress.committed;
        match &self.orders.stop {
            Some(reason) if !self.all_done() => End::Stopped(steps, reason.clone()),
            _ => End::Finished(steps),
        }
    }
}

/// The first ranks of a list that may be long.
fn some(seats: impl Iterator<Item = Seat>) -> String {
    const SHOWN: usize = 8;
    let mut seats: Vec<_> = seats.take(SHOWN + 1).map(|seat| seat.to_string()).collect();
    if seats.len() > SHOWN {
        seats[SHOWN] = "...".into();
    }
    seats.join(", ")
}
