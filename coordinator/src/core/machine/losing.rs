//! Faults: who was lost, what that costs, and who is asked to come back.

use coxswain_proto::ids::{Seat, WorkerId};

use super::{Machine, Refusal, Reply, Timestamp};
use crate::{
    core::{
        action::{Action, Record, Spent},
        event::Ended,
        failure::{Failure, Incident},
        news::{MemberChange, News},
        phase::Phase,
        report::WorkerPhase,
        roster::{Gone, Worker},
    },
    options::CauseKind,
};

impl Machine {
    /// A worker is gone for a reason that may pass: its seat is called back, and its generation ends.
    pub(super) fn lose(&mut self, now: Timestamp, seat: Seat, failure: Failure, out: &mut Vec<Action>) {
        self.mark_lost(seat, out);
        if matches!(self.phase, Phase::Over(_)) || self.result_is_safe() {
            out.push(Action::Publish(News::Consequence(failure.into())));
            return self.finish(now, out);
        }
        if self.is_final(failure.kind, self.is_member(seat)) {
            return self.fatal(now, failure, out);
        }
        if self.drained(seat) {
            return self.lose_drained(now, seat, failure, out);
        }
        if failure.kind.is_final() && self.is_dispensable(seat) {
            // The next process on its machine would fail alike.
            return self.lost_outside(failure, out);
        }
        if matches!(self.phase, Phase::Running(_)) && !self.is_member(seat) {
            // The generation goes on without it.
            if self.afford(now, &failure, out) {
                let because = failure.message.clone();
                self.lost_outside(failure, out);
                self.call_back(now, seat, because, out);
            }
            return;
        }
        let incident = self.incident.get_or_insert_with(|| Incident::new(now));
        if incident.lose(seat) && !self.afford(now, &failure, out) {
            return;
        }
        let failure = std::sync::Arc::new(failure);
        if let Some(incident) = &mut self.incident {
            incident.cause.get_or_insert_with(|| failure.clone());
        }
        out.push(Action::Record(Record::Failure(failure.clone())));
        out.push(Action::Publish(News::Failure(failure.clone(), self.spent.clone())));
        self.call_back(now, seat, failure.message.clone(), out);
        let because = format!("rank {seat} is lost: {}", failure.message);
        self.break_up(now, &because, true, out);
    }

    /// Whether the same would happen again, whoever tries. Once steps have been committed the run file, the model and the data are known to
    /// be good: what a process cannot use is then a matter of its machine, unless it is a member of the generation that runs. Members that
    /// refuse each other all do, and none of them is the one to replace.
    fn is_final(&self, kind: CauseKind, is_member: bool) -> bool {
        let local = kind == CauseKind::BadInput && self.proven && !is_member;
        kind.is_final() && !local
    }

    /// Whether an elastic world has enough workers without a seat that has no part in what trains now.
    fn is_dispensable(&self, seat: Seat) -> bool {
        let world = self.config.world;
        let others =
            self.roster.living().filter(|worker| worker.seat() != seat && !self.drained(worker.seat()));
        world.elastic() && !self.is_member(seat) && others.count() >= world.least() as usize
    }

    /// Somebody is lost whom nobody waits for.
    fn lost_outside(&self, failure: Failure, out: &mut Vec<Action>) {
        let failure = std::sync::Arc::new(failure);
        out.push(Action::Record(Record::Failure(failure.clone())));
        out.push(Action::Publish(News::LostOutside(failure, self.spent.clone())));
    }

    /// As [`Machine::lose`], for a worker that said nothing.
    pub(super) fn lose_silently(
        &mut self,
        now: Timestamp,
        seat: Seat,
        message: String,
        out: &mut Vec<Action>,
    ) {
        let failure = self.failure_of(seat, CauseKind::WorkerLost, message);
        self.lose(now, seat, failure, out);
    }

    /// A launcher saw a process end. News only if its worker has not said why.
    pub(super) fn exited(
        &mut self,
        now: Timestamp,
        place: u32,
        (seat, pid): (Seat, Option<u32>),
        ended: Ended,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let world = self.config.world;
        if seat.0 >= world.size() {
            return Err(Refusal::RankOutside { seat, world: world.size() });
        }
        if world.node_of(seat) != place {
            return Err(Refusal::RankElsewhere { seat, place });
        }
        if !self.roster.exited(seat, pid) {
            return Ok(Reply::Done);
        }
        self.start_ended(now, seat, pid);
        // The exit codes of this program: the same configuration or data would end the next process, too.
        let kind = match ended {
            Ended::Code(2 | 3) => CauseKind::BadInput,
            Ended::Code(5) => CauseKind::OutOfMemory,
            _ => CauseKind::WorkerLost,
        };
        let told = self.roster.take_unheard(seat);
        let failure = told.unwrap_or_else(|| self.failure_of(seat, kind, ended.to_string()));
        self.lose(now, seat, failure, out);
        self.try_form(now, out);
        Ok(Reply::Done)
    }

    /// Every worker and node that has been missed for too long is lost.
    pub(super) fn look_for_losses(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        self.look_for_an_earlier_launch(now, out);
        while let Some(lost) = self.roster.lost(now, &self.config.patience) {
            let (seat, message) = (lost.seat(), loss(lost, now));
            self.lose_silently(now, seat, message, out);
        }
        let (world, roster) = (self.config.world, &self.roster);
        let lives = |place| roster.lives_at(world.seats_of(place));
        let missed: Vec<_> = std::iter::from_fn(|| self.nodes.lose_one(now, lives)).collect();
        for place in missed {
            self.lose_node(now, place, out);
        }
        self.next_loss = self.next_possible_loss();
        self.try_form(now, out);
    }

    /// When a worker could count as lost next, or a node.
    pub(in crate::core) fn next_possible_loss(&self) -> Option<Timestamp> {
        let lives = |place| self.roster.lives_at(self.config.world.seats_of(place));
        let losses = [self.roster.next_loss(&self.config.patience), self.nodes.next_loss(lives)];
        losses.into_iter().flatten().min()
    }

    /// A worker is gone: if it was the last of a launcher that is missed, so may that be.
    pub(super) fn watch_for_its_node(&mut self, seat: Seat) {
        if let Some(at) = self.nodes.gone_at(self.config.world.node_of(seat)) {
            self.watch_for_loss(at);
        }
    }

    /// A launcher is missed, and nobody of it lives: another one may have its place. If it comes back it is told whom to start.
    fn lose_node(&mut self, now: Timestamp, place: u32, out: &mut Vec<Action>) {
        let host = self.nodes.at(place).map_or_else(String::new, |node| node.host.clone());
        out.push(Action::Record(Record::NodeGone { place }));
        if !matches!(self.phase, Phase::Over(_)) {
            self.announce(MemberChange::NodeGone { node_rank: place, host }, out);
        }
        for seat in self.config.world.seats_of(place) {
            self.starts.end(now, seat);
        }
        self.forget_drain(place, out);
    }

    /// Members of the old generation that have not left it in time are lost, unless they move, or may be waiting for a disk: those are lost
    /// once they stand still.
    pub(super) fn look_for_stragglers(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let patience = self.config.patience.standstill;
        let stays = |worker: &&Worker| worker.generation.0 > 0 && !worker.ready;
        let stuck = |worker: &Worker| worker.pulse.still > patience && !worker.may_wait_for_disk();
        let late: Vec<_> =
            self.roster.living().filter(stays).map(|worker| (worker.seat(), stuck(worker))).collect();
        let Phase::Gathering(gathering) = &mut self.phase else { return };
        gathering.settle_by = late.iter().any(|(_, stuck)| !stuck).then_some(now.after(patience));
        for (seat, _) in late.into_iter().filter(|(_, stuck)| *stuck) {
            let message = format!("it did not leave generation {} in time: it stands still", self.generation);
            self.lose_silently(now, seat, message, out);
        }
    }

    /// Victims without a culprit: ranks lost each other, and all are ready again. One restart; false if it is one too many.
    pub(super) fn blame_victims(&mut self, now: Timestamp, out: &mut Vec<Action>) -> bool {
        let Some(incident) = &self.incident else { return true };
        if incident.on_purpose || incident.cause.is_some() || incident.sample.is_some() {
            return true;
        }
        let Some(complaint) = incident.complaint.clone() else { return true };
        if !self.afford(now, &complaint, out) {
            return false;
        }
        let failure = std::sync::Arc::new(complaint);
        if let Some(incident) = &mut self.incident {
            incident.cause = Some(failure.clone());
        }
        out.push(Action::Record(Record::Failure(failure.clone())));
        out.push(Action::Publish(News::Failure(failure, self.spent.clone())));
        true
    }

    /// Pays for one fault; false if that is more than the run may survive, which ends it.
    fn afford(&mut self, now: Timestamp, failure: &Failure, out: &mut Vec<Action>) -> bool {
        if self.spent.restarts >= self.config.budgets.restarts {
            self.fatal(now, failure.clone(), out);
            return false;
        }
        self.spend(|spent| spent.restarts += 1, out);
        true
    }

    pub(super) fn spend(&mut self, change: impl FnOnce(&mut Spent), out: &mut Vec<Action>) {
        change(&mut self.spent);
        out.push(Action::Record(Record::Spent(self.spent.clone())));
    }

    /// Asks the launcher of a seat for a new process, if there ever was a launcher: one that is missed hears it when it is back, and one
    /// that has taken its place by then starts all of its processes by itself.
    pub(super) fn call_back(&mut self, now: Timestamp, seat: Seat, reason: String, out: &mut Vec<Action>) {
        let place = self.config.world.node_of(seat);
        let respawn = match self.nodes.at(place) {
            // A process is on its way, of another launcher perhaps, or has come by itself: to ask for one would end that.
            Some(_) if self.starts.at(seat) || self.roster.refilled(seat) => None,
            Some(_) => self.roster.ask_respawn(seat, reason).cloned(),
            None => None,
        };
        out.push(Action::Record(Record::Lost { seat, respawn: respawn.clone() }));
        if let (Some(stream), Some(respawn)) = (self.nodes.line(place), respawn) {
            self.starts.begin(now, seat);
            out.push(Action::TellNode(stream, respawn));
        }
    }

    /// What is known of a worker, as a failure.
    pub(super) fn failure_of(&self, seat: Seat, kind: CauseKind, message: String) -> Failure {
        let mut failure = Failure::of_run(kind, message);
        failure.seat = Some(seat);
        failure.generation = self.generation_now();
        if self.starts.at(seat) && self.roster.living_at(seat).is_none() {
            let node = self.nodes.at(self.config.world.node_of(seat));
            failure.host = node.map_or_else(String::new, |node| node.host.clone());
            failure.phase = WorkerPhase::Starting;
        } else if let Some(worker) = self.roster.at(seat) {
            failure.host.clone_from(&worker.claim.host);
            failure.phase = worker.phase;
            failure.step = worker.step;
            failure.collective = worker.collective.0;
            failure.memory_in_use = worker.memory_in_use;
        }
        failure
    }

    fn mark_lost(&mut self, seat: Seat, out: &mut Vec<Action>) {
        let Some(id) = self.roster.at(seat).map(|worker| worker.id) else { return };
        let Ok(worker) = self.roster.get_mut(id) else { return };
        worker.gone = Some(Gone::Lost);
        worker.ready = false;
        out.extend(worker.line.take().map(Action::Close));
        out.push(Action::Record(Record::Lost { seat, respawn: None }));
        self.watch_for_its_node(seat);
    }

    pub(super) fn is_member(&self, seat: Seat) -> bool {
        let Phase::Running(running) = &self.phase else { return false };
        self.roster.at(seat).is_some_and(|worker| running.rank_of(worker.id).is_some())
    }

    /// A member has left in order: nobody does before the results are on disk, so a loss changes nothing any more.
    pub(in crate::core) fn result_is_safe(&self) -> bool {
        let Phase::Running(running) = &self.phase else { return false };
        if self.safe_since.is_some() {
            // Another process may have the seat of whoever has left by now.
            return true;
        }
        let at_the_end = running.done() || self.orders.stop.is_some();
        let left = |seat| self.roster.at(seat).is_some_and(|worker| worker.gone == Some(Gone::Left(0)));
        at_the_end
            && running.assignment.members.iter().any(|member| left(member.seat) && !self.drained(member.seat))
    }

    /// A failure that a worker reports of itself.
    pub(super) fn reported_failure(
        &mut self,
        now: Timestamp,
        id: Option<WorkerId>,
        mut failure: Failure,
        out: &mut Vec<Action>,
    ) -> Result<Reply, Refusal> {
        let Some(id) = id else {
            return Ok(self.failed_unregistered(now, failure, out));
        };
        let worker = self.roster.get_mut(id)?;
        worker.last_seen = now;
        if worker.gone.is_some() {
            return Ok(Reply::Done);
        }
        let seat = worker.seat();
        failure.seat = Some(seat);
        failure.host.clone_from(&worker.claim.host);
        if self.is_final(failure.kind, self.is_member(seat)) {
            // It has its good-byes to say.
            self.fatal(now, failure, out);
        } else {
            self.lose(now, seat, failure, out);
            self.try_form(now, out);
        }
        Ok(Reply::Done)
    }

    fn failed_unregistered(&mut self, now: Timestamp, failure: Failure, out: &mut Vec<Action>) -> Reply {
        match failure.seat {
            _ if self.is_final(failure.kind, false) => self.fatal(now, failure, out),
            Some(seat) => {
                // Its launcher will say that the process has ended.
                out.push(Action::Publish(News::Consequence(failure.clone().into())));
                self.roster.note_unheard(seat, failure);
            }
            None => out.push(Action::Publish(News::Consequence(failure.into()))),
        }
        Reply::Done
    }
}

fn loss(worker: &Worker, now: Timestamp) -> String {
    let silent = now.since(worker.last_seen).as_secs_f64();
    match worker.line {
        Some(_) => format!("no sign of life for {silent:.1} s, though its line is open: it is frozen"),
        None => format!("its line closed without a word, and no sign of life for {silent:.1} s"),
    }
}
