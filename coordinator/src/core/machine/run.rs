//! One run: the values that own its state, and the questions that concern several of them.
//!
//! ```text
//! fleet      who is there                       faults     what was lost, and what it has cost
//! progress   steps, leases, cache, checkpoints  orders     what people want
//! phase      where the run is                   voice      what people were told
//! health     whose hardware is not sound        memory     what ranks have reported of theirs
//! ```

use coxswain_proto::ids::{Generation, Rank, Slot, WorkerId};

use crate::core::{
    action::{Action, Assignment, Directive, Orders, Record, Reply},
    config::Config,
    event::Ticket,
    failure::{End, Failure},
    faults::Faults,
    fleet::Fleet,
    health::Health,
    news::{MemberChange, News},
    past::Past,
    phase::{GatheringPhase, Phase},
    progress::Progress,
    reason::{Reason, RunPhase},
    refreshes::Memory,
    refusal::Refusal,
    time::Timestamp,
    voice::Voice,
};
use crate::options::CauseKind;

/// One run.
#[derive(Clone, Debug)]
pub struct Run {
    pub(in crate::core) config: Config,
    pub(in crate::core) fleet: Fleet,
    pub(in crate::core) progress: Progress,
    pub(in crate::core) faults: Faults,
    pub(in crate::core) health: Health,
    pub(in crate::core) orders: Orders,
    pub(in crate::core) voice: Voice,
    pub(in crate::core) memory: Memory,
    pub(in crate::core) phase: Phase,
    /// The newest one that was formed.
    pub(in crate::core) generation: Generation,
    /// The moment of the event that is being handled.
    pub(super) now: Timestamp,
    /// What follows from it, so far.
    pub(super) out: Vec<Action>,
}

impl Run {
    /// A run that waits for its workers from `now` on.
    pub(super) fn new(now: Timestamp, config: Config, past: &Past) -> Self {
        let (world, patience) = (config.world, config.patience);
        let fleet = Fleet::new(world, patience, config.life, !config.restarted);
        Self {
            faults: Faults::new(config.budgets, past, now.after(patience.rendezvous)),
            health: Health::new(config.faults.cordon_after, past.health.clone()),
            orders: past.orders.clone(),
            voice: Voice::new(fleet.incomplete()),
            memory: Memory::default(),
            phase: Phase::Gathering(Box::new(GatheringPhase::new(now.after(patience.rendezvous)))),
            generation: past.newest().map_or(Generation(0), |(generation, _)| generation),
            progress: Progress::new(&config, past),
            fleet,
            config,
            now,
            out: Vec::new(),
        }
    }

    /// Nothing can be asked of a run that is over.
    pub(super) fn must_go_on(&self) -> Result<(), Refusal> {
        if self.phase.is_over() { Err(Refusal::Over(self.voice.reason.clone())) } else { Ok(()) }
    }

    /// Whether a caller means this run.
    pub(super) fn is_this(&self, run_id: &str) -> Result<(), Refusal> {
        if run_id != self.config.run_id {
            let (theirs, ours) = (run_id.to_owned(), self.config.run_id.clone());
            return Err(Refusal::OtherRun { theirs, ours });
        }
        Ok(())
    }

    /// The phase as people see it.
    pub(super) fn phase_for(&self, reason: &Reason) -> RunPhase {
        match (&self.phase, reason) {
            (Phase::Gathering(_), _) => RunPhase::WaitingForWorkers,
            (Phase::Over(over), _) => match over.end {
                End::Failed(_) => RunPhase::Failed,
                End::Finished(_) | End::Stopped(..) => RunPhase::Finished,
            },
            (Phase::Running(_), Reason::AllWait) => RunPhase::Paused,
            (Phase::Running(_), Reason::StopAsked(_) | Reason::StepsDone | Reason::Closing) => {
                RunPhase::Stopping
            }
            (Phase::Running(_), _) => match self.progress.training() {
                Some(course) if course.ledger.committed() > course.first_step => RunPhase::Training,
                _ => RunPhase::Starting,
            },
        }
    }

    /// The membership as news tell it: 0 while the first one is forming.
    pub(super) fn generation_now(&self) -> Generation {
        match &self.phase {
            Phase::Gathering(gathering) if gathering.is_first() => Generation(0),
            _ => self.generation,
        }
    }

    /// A generation is formed: with whom, and whether a node could be lost with shards and replicas.
    pub(super) fn formed(&self, assignment: &Assignment) -> Reason {
        let (generation, workers) = (assignment.generation, assignment.world());
        // On a single node all of them are at home, which is nothing to tell.
        let at_home =
            Some(assignment.replicas.at_home).filter(|count| self.config.faults.replica && *count < workers);
        Reason::Formed { generation, workers, at_home: at_home.unwrap_or(0) }
    }

    /// Whether a slot's worker is in the generation that runs.
    pub(super) fn is_member(&self, slot: Slot) -> bool {
        let Some(running) = self.phase.running() else { return false };
        self.fleet.roster.at(slot).is_some_and(|worker| running.rank_of(worker.id).is_some())
    }

    /// Whether the generation that runs has nothing to do but to say good-bye.
    pub(super) fn steps_done(&self) -> bool {
        self.progress.training().is_some() && self.progress.done()
    }

    /// Remembers it if the worker at a slot, which has left in order, proves that the results are there. The
    /// roster forgets its good-bye as soon as another process has the slot. One whose node is to go may have
    /// left because it was told to, which proves nothing.
    pub(super) fn trust_good_bye(&mut self, slot: Slot) {
        if self.is_member(slot) && !self.drained(slot) {
            self.progress.safe_since.get_or_insert(self.now);
        }
    }

    /// Whether those who leave in order do so because the run is at its end.
    pub(super) fn at_the_end(&self) -> bool {
        self.progress.done() || self.orders.stop.is_some()
    }

    /// The end of a run whose results are there.
    pub(super) fn end_in_order(&self) -> End {
        let steps = self.progress.committed;
        match &self.orders.stop {
            Some(reason) if !self.progress.done() => End::Stopped(steps, reason.clone()),
            _ => End::Finished(steps),
        }
    }

    /// Whether a slot's node is to go.
    pub(in crate::core) fn drained(&self, slot: Slot) -> bool {
        self.orders.draining.contains(&self.config.world.node_of(slot))
    }

    /// One more fault of a slot's hardware; true if the slot is not used any more for that.
    pub(super) fn count_fault(&mut self, slot: Slot, what: &str, noted: Option<(WorkerId, u64)>) -> bool {
        let cordoned = !self.phase.is_over() && self.health.count(slot, what, noted, &mut self.out);
        if cordoned {
            self.fleet.withdraw(slot, &mut self.out);
        }
        cordoned
    }

    /// Whether a slot's worker is to go and holds nothing that the run needs: it is no member of the
    /// generation that runs; between two, it was in none yet, or the last one has left a checkpoint behind.
    pub(super) fn may_go(&self, slot: Slot) -> bool {
        let worker = self.fleet.roster.living_at(slot).filter(|_| self.drained(slot));
        worker.is_some_and(|worker| match &self.phase {
            Phase::Running(running) => running.rank_of(worker.id).is_none(),
            Phase::Gathering(gathering) => worker.generation.0 == 0 || (gathering.relieved && worker.ready),
            Phase::Over(_) => false,
        })
    }

    /// What is known of a worker, as a failure.
    pub(super) fn failure_of(&self, slot: Slot, kind: CauseKind, message: String) -> Failure {
        self.fleet.failure_of(slot, kind, message, self.generation_now())
    }

    /// Answers a call.
    pub(super) fn reply(&mut self, ticket: Ticket, reply: Result<Reply, Refusal>) {
        self.out.push(Action::Reply(ticket, reply));
    }

    /// Publishes the phase and its reason if either has changed.
    pub(super) fn say(&mut self, reason: Reason) {
        let phase = self.phase_for(&reason);
        self.voice.say(reason, phase, &mut self.out);
    }

    pub(super) fn publish(&mut self, news: News) {
        self.out.push(Action::Publish(news));
    }

    /// A launcher or worker came or went.
    pub(super) fn announce(&mut self, change: MemberChange) {
        let (present, world) = (self.fleet.roster.present(), self.config.world.size());
        self.publish(News::Member { generation: self.generation_now(), present, world, change });
    }

    /// Sends a directive down every open line.
    pub(super) fn tell_all(&mut self, directive: &Directive) {
        let lines = self.fleet.roster.workers().filter_map(|worker| worker.line.stream);
        self.out.extend(lines.map(|stream| Action::Tell(stream, directive.clone())));
    }

    /// Sends a directive to those of these members that are there.
    pub(super) fn tell_members(&mut self, assignment: &Assignment, directive: &Directive, unready: bool) {
        let living = assignment.members.iter().filter_map(|member| self.fleet.there(member));
        let lines = living.filter(|worker| !(unready && worker.ready)).filter_map(|it| it.line.stream);
        self.out.extend(lines.map(|line| Action::Tell(line, directive.clone())));
    }

    /// Remembers and makes durable what people want.
    pub(super) fn order(&mut self, change: impl FnOnce(&mut Orders)) {
        change(&mut self.orders);
        self.out.push(Action::Record(Record::Orders(self.orders.clone())));
    }

    /// Grants these ranks what there is, once the window is prolonged.
    pub(super) fn grant(&mut self, ranks: &[Rank]) {
        if ranks.is_empty() {
            return;
        }
        self.progress.prolong(self.now, &mut self.out);
        let Phase::Running(running) = &self.phase else { return };
        for rank in ranks {
            let leases = self.progress.grant(*rank);
            let member = running.assignment.members.get(rank.0 as usize);
            let worker = member.and_then(|member| self.fleet.there(member));
            if let Some(stream) = worker.and_then(|worker| worker.line.stream) {
                let leases = leases.into_iter().map(Directive::Lease);
                self.out.extend(leases.map(|lease| Action::Tell(stream, lease)));
            }
        }
    }

    /// Tells a worker to leave if it may go.
    pub(super) fn dismiss(&mut self, id: WorkerId) {
        if self.orders.draining.is_empty() {
            return;
        }
        let Ok(slot) = self.fleet.roster.slot_of(id) else { return };
        if let Some(line) = self.fleet.roster.line(slot).filter(|_| self.may_go(slot)) {
            let reason = format!("node {} is drained", self.config.world.node_of(slot));
            self.out.push(Action::Tell(line, Directive::Dismiss(reason)));
        }
    }

    /// The launcher that has this place from now on is to stay.
    pub(super) fn forget_drain(&mut self, place: u32) {
        if self.orders.draining.contains(&place) {
            self.order(|orders| orders.draining.retain(|other| *other != place));
        }
    }
}
