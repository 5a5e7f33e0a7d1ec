//! The only file that moves from one phase to another: it carries out what `losing` and `forming` have
//! decided.
//!
//! ```text
//! a worker is lost        lose ─▶ losing::judge ─▶ break_up, or the end, or nothing
//! a world is complete     try_form ─▶ forming::decide ─▶ form ─▶ Connecting
//! ranks agree             try_start ─▶ start ─▶ Training
//! nothing is left to do   finish ─▶ end ─▶ Over
//! the run has failed      close ─▶ break_up, try_form, form ─▶ conclude ─▶ end ─▶ Over; or fatal ─▶ end
//! ```
//!
//! Where a generation starts, at step t, while c is the first step that is not committed:
//!
//! ```text
//! t = c      nothing is lost
//! t > c      steps c..t were done by all ranks of the generation before, though a lost rank could not say
//!            so, or no rank could, since it was lost in the last collective of a step: they are committed
//!            now, with what has been reported of them
//! t < c      steps t..c are lost with the state that held them; they are repeated, and people are told
//! ```

use std::sync::Arc;

use coxswain_proto::ids::{Generation, Slot, Step};

use super::{
    closing,
    forming::{self, Formation},
    losing::{self, Loss, Payment},
    run::Run,
};
use crate::{
    core::{
        action::{Action, Assignment, Directive, Record},
        failure::{End, Failure},
        news::{MemberChange, News, Recovery},
        phase::{GatheringPhase, LastCall, OverPhase, Phase, RunningPhase, Stage},
        quarantine::BadSample,
        reason::Reason,
        report::StateSource,
    },
    options::CauseKind,
};

impl Run {
    /// A worker is gone for a reason that may pass: unless nothing follows, its slot is called back, and its
    /// generation ends.
    pub(super) fn lose(&mut self, slot: Slot, failure: Failure) {
        self.lose_to(slot, failure, None);
    }

    /// A worker is gone as in [`lose`](Self::lose), its process ended by a sample if there is one: the
    /// quarantine bounds how often that may be, so that it costs no restart.
    pub(super) fn lose_to(&mut self, slot: Slot, failure: Failure, sample: Option<BadSample>) {
        self.fleet.lose(slot, &mut self.out);
        if failure.kind == CauseKind::Hardware && !self.health.is_cordoned(slot) {
            self.count_fault(slot, &failure.message, None);
        }
        let loss = losing::judge(self, slot, failure.kind);
        if loss == Loss::Fatal {
            return end_for(self, failure);
        }
        if loss == Loss::Irreplaceable {
            return close(self, losing::irreplaceable(self, slot, failure));
        }
        let failure = Arc::new(failure);
        match loss {
            Loss::Farewell => {
                self.publish(News::Consequence(failure));
                self.finish();
            }
            Loss::Closing => {
                self.publish(News::Consequence(failure.clone()));
                match self.is_member(slot) {
                    true => conclude(self, &format!("rank {slot} is lost: {}", failure.message)),
                    false => self.try_form(),
                }
            }
            Loss::ExpectedOutside => self.publish(News::Consequence(failure)),
            Loss::Dispensable => self.faults.outside(&failure, &mut self.out),
            Loss::Outside => {
                let paid = match losing::pay_for(self, slot, &failure) {
                    Ok(paid) => paid,
                    Err(end) => return close(self, *end),
                };
                self.faults.outside(&failure, &mut self.out);
                if paid == Payment::Restart {
                    self.fleet.call_back(self.now, slot, failure.message.clone(), &mut self.out);
                }
            }
            Loss::Expected => {
                self.faults.incident(self.now).lose(slot);
                self.faults.blame(&failure, &mut self.out);
                let of = "of a node that was leaving ";
                self.break_up(&format!("rank {slot} {of}is lost: {}", failure.message), true);
            }
            Loss::Breaks | Loss::Cordoned | Loss::Irreplaceable | Loss::Fatal => {
                let incident = self.faults.incident(self.now);
                incident.sample = sample.or(incident.sample);
                let costs = incident.lose(slot) && sample.is_none() && loss != Loss::Cordoned;
                let paid = if costs { losing::pay_for(self, slot, &failure) } else { Ok(Payment::Restart) };
                let paid = match paid {
                    Ok(paid) => paid,
                    Err(end) => return close(self, *end),
                };
                self.faults.blame(&failure, &mut self.out);
                if loss == Loss::Breaks && paid == Payment::Restart {
                    self.fleet.call_back(self.now, slot, failure.message.clone(), &mut self.out);
                }
                self.break_up(&format!("rank {slot} is lost: {}", failure.message), true);
            }
        }
    }

    /// A worker whose slot is not used any more, and that others can do without, is taken out.
    pub(super) fn expel(&mut self, slot: Slot) {
        let message = "its slot is no longer used".to_owned();
        let failure = self.failure_of(slot, CauseKind::Hardware, message);
        self.lose(slot, failure);
        self.try_form();
    }

    /// As [`Run::lose`], for a worker that said nothing.
    pub(super) fn lose_silently(&mut self, slot: Slot, message: String) {
        let failure = self.failure_of(slot, CauseKind::WorkerLost, message);
        self.lose(slot, failure);
    }

    /// Running to Gathering: the generation is over, its workers get ready for the next.
    pub(super) fn break_up(&mut self, because: &str, abort: bool) {
        let Some(running) = self.phase.running() else { return };
        if self.faults.closing().is_some() {
            return conclude(self, because);
        }
        let (assignment, relieved) = (running.assignment.clone(), running.hand_over && !abort);
        let (generation, because) = (assignment.generation, because.to_owned());
        let course = self.progress.training();
        let fruitless = course.is_none_or(|course| course.ledger.committed() <= course.first_step);
        let patience = self.config.patience;
        let standstill = patience.standstill + self.progress.pace.time_for(3).unwrap_or_default();
        self.gather(GatheringPhase {
            settle_by: Some(self.now.after(standstill)),
            respawn_by: Some(self.now.after(patience.respawn)),
            last_call: LastCall::Over,
            fruitless: fruitless.then(|| because.clone()),
            relieved,
            ..GatheringPhase::new(self.now.after(patience.rendezvous))
        });
        if abort {
            // Workers that are ready have left it already.
            let directive = Directive::Abort { generation, reason: because.clone(), over: false };
            self.tell_members(&assignment, &directive, true);
        }
        self.say(Reason::Regathering { generation, because });
    }

    /// To Gathering. What may still be reported of the newest generation that has started remains.
    fn gather(&mut self, gathering: GatheringPhase) {
        if let Some(running) = self.phase.running() {
            let generation = running.assignment.generation;
            self.out.push(Action::Record(Record::Broken { generation }));
        }
        self.progress.interrupt();
        self.phase = Phase::Gathering(Box::new(gathering));
    }

    /// Forgets the workers of an earlier launch at `places`, which are another launcher's now. A coordinator
    /// that no launcher has started *again* is part of a new launch: of the launch before no process may be
    /// left, or only the launchers of other machines, which look for their coordinator for a while, with
    /// their workers. So none of its workers is given up before the reunion is over, but one that is replaced
    /// is neither waited for nor counted as lost. If none is left, what the run had used of its budgets and
    /// what was asked of it ends with them.
    pub(super) fn replace_launch(&mut self, places: &[u32]) {
        if self.config.restarted || self.phase.is_over() {
            return;
        }
        let left_behind = self.fleet.left_behind(places);
        if left_behind.is_empty() {
            return;
        }
        let was_member = left_behind.iter().any(|slot| self.is_member(*slot));
        for slot in left_behind {
            self.fleet.roster.clear(slot);
            self.out.push(Action::Record(Record::Lost { slot, respawn: None }));
        }
        if self.fleet.is_new() {
            self.gather(GatheringPhase::new(self.now.after(self.config.patience.rendezvous)));
            self.faults.incident = None;
            self.faults.spend(|spent| *spent = Default::default(), &mut self.out);
            self.order(|orders| *orders = Default::default());
            self.say(self.fleet.incomplete());
        } else if was_member && self.progress.result_is_safe() {
            // Nobody is missed, and a rank that has left in order would not come for another generation.
            self.end(self.end_in_order());
        } else if was_member {
            self.break_up("a launcher was restarted", true);
        }
    }

    /// Forms the next generation if all workers that it needs are there.
    pub(super) fn try_form(&mut self) {
        let forming = forming::decide(self);
        let Phase::Gathering(gathering) = &mut self.phase else { return };
        match forming {
            Formation::Wait => {}
            Formation::OpenLastCall => {
                gathering.last_call = LastCall::Open(self.now.after(self.config.patience.last_call));
            }
            Formation::Never => conclude(self, "no remaining rank has any part of the training state"),
            Formation::Of(slots) if self.faults.closing().is_some() => self.form(slots),
            Formation::Of(slots) => match self.faults.account(gathering.fruitless.take(), &mut self.out) {
                Ok(()) => self.form(slots),
                Err(failure) => close(self, *failure),
            },
        }
    }

    /// Gathering to Connecting: all workers that are needed are ready.
    fn form(&mut self, mut slots: Vec<Slot>) {
        self.generation = Generation(self.generation.0 + 1);
        let (generation, progress) = (self.generation, &self.progress);
        progress.quarantine.rotate(&mut slots);
        let members = self.fleet.members(&slots);
        let checkpoint = progress.checkpoints.newest_complete();
        let world = self.config.world;
        let assignment = Assignment::new(generation, checkpoint, members, &progress.quarantine, world);
        let assignment = Arc::new(Assignment { closing: self.faults.closing().is_some(), ..assignment });
        for member in &assignment.members {
            if let Ok(mut worker) = self.fleet.roster.get_mut(member.worker) {
                (worker.generation, worker.ready) = (generation, false);
                // Collectives of an older one say nothing of this one.
                worker.doing.collective = (0, 0);
            }
        }
        self.tell_who_stands_in(&slots);
        let members = assignment.members.iter().map(|member| (member.slot, member.worker)).collect();
        self.out.push(Action::Record(Record::Generation { generation, members }));
        self.phase = Phase::Running(Box::new(RunningPhase::new(assignment.clone())));
        self.say(self.formed(&assignment));
        for worker in self.fleet.roster.living() {
            if let (Some(stream), Some(rank)) = (worker.line.stream, assignment.rank_of(worker.id)) {
                self.out.push(Action::Tell(stream, Directive::Assignment(assignment.clone(), rank)));
            }
        }
        self.fleet.motion.begin(self.now);
        self.let_go();
    }

    /// Tells the workers that wait at these slots that they have ranks from now on, and that the others are
    /// spares.
    fn tell_who_stands_in(&mut self, slots: &[Slot]) {
        let was_spare =
            |slot: &Slot| self.fleet.roster.living_at(*slot).is_some_and(|worker| worker.without.spare);
        let mut came: Vec<_> = slots.iter().copied().filter(was_spare).collect();
        came.sort();
        came.into_iter().for_each(|slot| self.announce(MemberChange::StandsIn { slot }));
        self.fleet.roster.choose(slots);
    }

    /// Asks a generation with members that are to go to end at the next boundary, after a checkpoint.
    pub(super) fn let_go(&mut self) {
        if forming::lets_go(self) {
            self.regroup(true);
        }
    }

    /// Asks the members to leave their generation at the next boundary, because the world is to change; after
    /// a checkpoint, if some of them are to go.
    pub(super) fn regroup(&mut self, hand_over: bool) {
        let Phase::Running(running) = &mut self.phase else { return };
        (running.regroup, running.hand_over) = (true, hand_over);
        let assignment = running.assignment.clone();
        self.faults.incident(self.now).on_purpose = true;
        self.faults.spend(|spent| spent.rescales += 1, &mut self.out);
        let directive = Directive::Regroup { generation: assignment.generation, checkpoint: hand_over };
        self.tell_members(&assignment, &directive, false);
    }

    /// Starts the generation, once what its state proves is covered by reports.
    pub(super) fn try_start(&mut self) {
        let Some((first, source, last)) = self.phase.running().and_then(RunningPhase::agreed) else { return };
        // Reports of the others may be on their way, unless they have spoken, too.
        let before = self.progress.committed;
        let settled = self.progress.settle(self.generation, first, source, last, &mut self.out);
        let committed = self.progress.committed;
        if committed > before {
            self.faults.got_on(&mut self.out);
        }
        let message = match settled {
            Ok(true) if self.faults.closing().is_none() => return self.start(first, source),
            // Nothing is trained from here, so nothing is leased, and nothing is rolled back.
            Ok(true) if first >= committed => return self.say(Reason::Closing),
            Ok(true) => {
                return conclude(self, &format!("the remaining ranks have the older state of step {first}"));
            }
            Ok(false) if !last => return,
            Ok(false) => format!(
                "all ranks want to start at step {first}, but the run is only at step {committed}: the steps \
                 between were never assigned"
            ),
            Err(message) => message,
        };
        self.fatal(Failure::of_run(CauseKind::Disagreement, message));
    }

    /// Connecting to Training: the ranks have agreed where to start.
    fn start(&mut self, first_step: Step, source: StateSource) {
        let Phase::Running(running) = &mut self.phase else { return };
        let (generation, members) = (running.assignment.generation, running.assignment.workers());
        running.stage = Stage::Training;
        self.out.push(Action::Record(Record::Started { generation, first_step, source }));
        if self.orders.checkpoint_due.is_some() {
            self.order(|orders| orders.checkpoint_due = None);
        }
        if source == StateSource::Checkpoint {
            self.progress.checkpoints.gone_on_from(first_step);
        }
        let committed = self.progress.committed;
        self.fleet.motion.begin(self.now);
        if let Some(reached) = self.progress.start(generation, &members, first_step) {
            self.out.push(Action::Record(Record::RolledBack(reached)));
            self.publish(News::RolledBack { from: committed, to: first_step });
        }
        self.say(Reason::Started { generation, first_step, source });
        self.grant(&self.progress.all_ranks());
        self.recovered(members.len() as u32, first_step, source);
        if self.progress.done() {
            self.say(Reason::StepsDone);
        } else if let Some(reason) = self.orders.stop.clone() {
            self.say(Reason::StopAsked(reason));
        } else if self.orders.pause {
            self.say(Reason::Pausing);
        }
    }

    /// The incident, if there was one, is over.
    fn recovered(&mut self, members: u32, first_step: Step, source: StateSource) {
        let Some(incident) = self.faults.survive(&mut self.out) else { return };
        self.publish(News::Recovered(Recovery {
            generation: self.generation,
            members,
            world: self.config.world.most(),
            first_step,
            source,
            took: self.now.since(incident.since),
            what: incident.what(),
            spent: self.faults.spent.clone(),
            max_restarts: self.config.budgets.restarts,
        }));
    }

    /// To Over, for a failure that nothing can be done about.
    pub(super) fn fatal(&mut self, failure: Failure) {
        if self.phase.is_over() || self.faults.closing().is_some() {
            let message = failure.message.clone();
            self.publish(News::Consequence(Arc::new(failure)));
            return conclude(self, &message);
        }
        let failure = final_failure(self, failure);
        self.end(End::Failed(Arc::new(failure)));
    }

    /// A worker of an elastic world was taken away on purpose: the others go on.
    pub(super) fn shrink(&mut self, slot: Slot, reason: &str) {
        let incident = self.faults.incident(self.now);
        incident.on_purpose |= incident.lost.is_empty();
        self.faults.spend(|spent| spent.rescales += 1, &mut self.out);
        self.break_up(&format!("rank {slot} left: {reason}"), true);
    }

    /// Running to Over, once every worker has left.
    pub(super) fn finish(&mut self) {
        let Phase::Running(running) = &mut self.phase else { return };
        // Who has left does not come back under the same name.
        let rest = &running.assignment.members[running.left_up_to..];
        let gone = rest.iter().take_while(|member| self.fleet.there(member).is_none()).count();
        running.left_up_to += gone;
        if running.left_up_to == running.assignment.members.len() {
            self.end(self.end_in_order());
        }
    }

    /// Tells every worker that the run is over. One that had no part in the last generation of a run that
    /// ends well has nothing to complain of.
    fn tell_end(&mut self, in_order: bool, reason: String) {
        for worker in self.fleet.roster.workers() {
            let Some(stream) = worker.line.stream else { continue };
            let directive = match in_order && worker.generation < self.generation {
                true => Directive::Dismiss(reason.clone()),
                false => Directive::Abort { generation: self.generation, reason: reason.clone(), over: true },
            };
            self.out.push(Action::Tell(stream, directive));
        }
    }

    /// To Over.
    pub(super) fn end(&mut self, end: End) {
        let reason = Reason::of_end(&end);
        let told = match &end {
            End::Failed(failure) => {
                self.publish(News::Failure(failure.clone(), self.faults.spent.clone()));
                failure.to_string()
            }
            End::Finished(_) | End::Stopped(..) => reason.to_string(),
        };
        self.tell_end(end.in_order(), told);
        let deadline = self.now.after(self.config.patience.farewell);
        if self.faults.closing().is_some() {
            self.faults.spend(|spent| spent.closing = None, &mut self.out);
        }
        self.out.push(Action::Record(Record::Over(end.clone())));
        self.phase = Phase::Over(OverPhase { end, deadline, expired: false });
        self.progress.close();
        self.memory.answer(self.now, &self.fleet.roster, false, &mut self.out);
        self.say(reason);
        if !self.memory.ledger.is_empty() {
            self.publish(News::Memory(self.memory.table(&self.fleet.roster)));
        }
    }
}

/// The end, for the failure of one worker that would meet any other: what the others have learned is intact,
/// unless ranks disagree about it.
pub(super) fn end_for(run: &mut Run, failure: Failure) {
    match failure.kind {
        CauseKind::Disagreement => run.fatal(failure),
        _ => close(run, failure),
    }
}

/// As [`Run::fatal`], for a failure that leaves the state intact: survivors write a checkpoint first, if
/// there is anything to save.
pub(super) fn close(run: &mut Run, failure: Failure) {
    if !closing::is_worth_it(run) {
        let failure = if closing::is_saved(run) { closing::told(run, &failure, "") } else { failure };
        return run.fatal(failure);
    }
    let failure = final_failure(run, failure);
    let because = format!("remaining workers write a last checkpoint, because the run has failed: {failure}");
    run.break_up(&because, true);
    let by = run.now.after(run.config.patience.rendezvous);
    if let Phase::Gathering(gathering) = &mut run.phase {
        gathering.deadline = by;
    }
    run.faults.close(failure, by, &mut run.out);
    run.say(Reason::Regathering { generation: run.generation, because });
    run.try_form();
}

/// To Over, for the failure that was to be followed by a last checkpoint; `hindrance` says why that is not
/// there, if it is not.
pub(super) fn conclude(run: &mut Run, hindrance: &str) {
    let Some(failure) = run.faults.closing().filter(|_| !run.phase.is_over()) else { return };
    let failure = closing::told(run, failure, hindrance);
    run.end(End::Failed(Arc::new(failure)));
}

/// It ends the run, with the victims so far.
fn final_failure(run: &Run, mut failure: Failure) -> Failure {
    failure.fatal = true;
    if let Some(incident) = &run.faults.incident {
        failure.victims.extend(&incident.victims);
    }
    failure
}
