//! What workers report: that they are ready, where they start, how far they are.

use coxswain_proto::{
    cache_plan::CacheReport,
    ids::{Bytes, Rank, Slot, WorkerId},
};

use super::{forming, losing, run::Run, transitions};
use crate::{
    core::{
        action::{Action, Member, Reply},
        event::{Beat, CheckpointReport, NodeNews, Readiness, StartReport},
        failure::Failure,
        ledger::Fault,
        memory::MemoryReport,
        news::News,
        phase::{Phase, Stage},
        reason::Reason,
        refusal::Refusal,
        report::{StepReport, WorkerPhase},
        roster::Worker,
        stragglers::SlownessChange,
    },
    options::CauseKind,
};

/// What workers say, and the run that they say it of.
pub(super) struct Reports<'a> {
    pub(super) run: &'a mut Run,
}

impl Reports<'_> {
    /// A worker can take a place in the next generation; if it left one that was taken for alive, that one is
    /// broken.
    pub(super) fn ready(&mut self, ready: &Readiness) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        run.must_go_on()?;
        let mut worker = run.fleet.roster.living_mut(ready.worker)?;
        if worker.claim.incarnation != ready.incarnation {
            return Err(Refusal::UnknownWorker(ready.worker));
        }
        worker.last_seen = run.now;
        // Reported before it was assigned, and heard again; or it has never heard of its assignment, whose
        // generation is over: nothing else will come of it.
        if ready.left < worker.generation && !matches!(run.phase, Phase::Gathering(_)) {
            return Ok(Reply::Done);
        }
        let slot = worker.slot();
        drop(worker);
        if run.faults.closing().is_some() && run.is_member(slot) {
            self.closed(ready);
            return Ok(Reply::Done);
        }
        if let Ok(mut worker) = run.fleet.roster.get_mut(ready.worker) {
            worker.ready = true;
        }
        match &run.phase {
            // The worker that has left in order was its neighbour, and that is all that it lost.
            Phase::Running(_) if run.is_member(slot) && run.progress.result_is_safe() => {
                run.end(run.end_in_order())
            }
            Phase::Running(_) if run.is_member(slot) => self.deserted(slot, &ready.reason),
            Phase::Running(_) if forming::widens(run) => run.regroup(false),
            Phase::Running(_) => run.fleet.now_spare(slot),
            Phase::Gathering(_) if !ready.reason.is_empty() => self.complained(slot, &ready.reason),
            Phase::Gathering(_) | Phase::Over(_) => {}
        }
        self.run.dismiss(ready.worker);
        self.run.try_form();
        Ok(Reply::Done)
    }

    /// A member of the last generation is through, or has lost the others. The first rank tells of the
    /// checkpoint, before it says this.
    fn closed(&mut self, ready: &Readiness) {
        let rank = self.run.phase.running().and_then(|running| running.rank_of(ready.worker));
        match ready.reason.as_str() {
            "" if rank != Some(Rank(0)) => {}
            "" => transitions::conclude(self.run, "the log says why"),
            reason => transitions::conclude(self.run, reason),
        }
    }

    /// A member has left the generation by itself: its peers are gone for it, or all were asked to leave.
    fn deserted(&mut self, slot: Slot, reason: &str) {
        // A worker that leaves without a reason was asked to, as all were; a coordinator that was restarted
        // may not know that it asked.
        let asked = reason.is_empty();
        let incident = self.run.faults.incident(self.run.now);
        incident.on_purpose |= asked;
        let because = if asked { incident.what() } else { format!("rank {slot}: {reason}") };
        if !asked {
            self.complained(slot, reason);
        }
        // Workers that were asked leave at one boundary, each by itself.
        self.run.break_up(&because, !asked);
    }

    /// A worker suffers from a fault that another rank may be to blame for.
    fn complained(&mut self, slot: Slot, reason: &str) {
        let complaint = self.run.failure_of(slot, CauseKind::PeerLost, reason.to_owned());
        self.run.faults.complained(slot, complaint);
    }

    pub(super) fn reported_start(&mut self, report: &StartReport) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        let slot = run.fleet.seen(run.now, report.worker)?.slot();
        let stale = Refusal::Stale { theirs: report.generation, ours: run.generation };
        let Phase::Running(running) = &mut run.phase else { return Err(stale) };
        let Some(rank) = running.rank_of(report.worker) else { return Err(stale) };
        if running.assignment.generation != report.generation {
            return Err(stale);
        }
        let agreed = match &mut running.stage {
            Stage::Training => run.progress.training().map(|course| course.first_step),
            Stage::Connecting(connecting) => Some(connecting.says(rank, report.first_step, report.source)),
        };
        if let Some(agreed) = agreed.filter(|agreed| *agreed != report.first_step) {
            let message = format!(
                "starts generation {} at step {}, but another rank starts at step {agreed}",
                report.generation, report.first_step
            );
            run.fatal(run.failure_of(slot, CauseKind::Disagreement, message));
        } else {
            run.try_start();
        }
        Ok(Reply::Done)
    }

    pub(super) fn heartbeat(&mut self, beat: &Beat) -> bool {
        let run = &mut *self.run;
        let known = run.fleet.roster.heard(run.now, beat);
        if known && let Some(slot) = run.fleet.note_motion(beat) {
            run.publish(News::Standstill(slot, "moves again".into()));
        }
        if known && run.voice.reason == Reason::Pausing {
            self.all_paused();
        }
        known
    }

    /// Training to Paused, once every rank waits: for `resume`, or in a collective for those that do. A rank
    /// whose directive came a moment after the vote goes one step further and waits there.
    fn all_paused(&mut self) {
        let paused = |phase| phase == WorkerPhase::Paused;
        let waits = |phase| paused(phase) || phase == WorkerPhase::Communication;
        let Some(running) = self.run.phase.running() else { return };
        let phase = |member: &Member| self.run.fleet.there(member).map(|worker| worker.doing.phase);
        let members = &running.assignment.members;
        // One that was at work is most likely at work still: then there is no need to ask the others.
        let at_work = |at: &usize| members.get(*at).and_then(phase).is_some_and(|phase| !waits(phase));
        let last = running.at_work;
        let found = (last..members.len()).chain(0..last).find(at_work);
        let all_wait = found.is_none() && members.iter().filter_map(phase).any(paused);
        if let (Phase::Running(running), Some(found)) = (&mut self.run.phase, found) {
            running.at_work = found;
        }
        if all_wait {
            self.run.say(Reason::AllWait);
        }
    }

    /// What a launcher says of workers of its node, as if each of them had said it.
    pub(super) fn node(&mut self, news: &NodeNews) -> Reply {
        let mut unknown = Vec::new();
        for beat in &news.beats {
            if !self.heartbeat(beat) {
                unknown.push(beat.worker);
            }
        }
        for (worker, reports) in &news.steps {
            if self.steps(*worker, reports).is_err() {
                unknown.push(*worker);
            }
        }
        Reply::NodeHeard { committed: self.run.progress.committed, unknown }
    }

    pub(super) fn steps(&mut self, id: WorkerId, reports: &[StepReport]) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        let mut worker = run.fleet.seen(run.now, id)?;
        let slot = worker.slot();
        if let Some(newest) = reports.last() {
            worker.times = newest.times;
            worker.metrics = newest.metrics.clone();
            worker.doing.step = newest.step;
        }
        drop(worker);
        match run.progress.accept_reports(id, slot, reports) {
            Ok(changes) => {
                self.tell_slow(&changes);
                self.replace_slow();
            }
            Err(refused) => match *refused {
                // An earlier life had heard what is missing; on its new line the worker says it again, and
                // this, too.
                (_, Fault::Gap { .. }) if run.config.life > 1 => {}
                (report, fault) => self.disagreement(slot, &report, &fault),
            },
        }
        self.commit();
        self.run.try_start();
        let due = self.run.progress.due_rank(id);
        self.run.grant(due.as_slice());
        Ok(Reply::Committed(self.run.progress.committed))
    }

    /// Names ranks that have become slow, or are well again.
    fn tell_slow(&mut self, changes: &[SlownessChange]) {
        let Some(running) = self.run.phase.running() else { return };
        let member = |change: &SlownessChange| running.assignment.members.get(change.rank.0 as usize);
        let news = changes.iter().filter_map(|change| Some(News::Slow(member(change)?.slot, change.slow)));
        news.collect::<Vec<_>>().into_iter().for_each(|news| self.run.publish(news));
    }

    /// A rank that has been slow for long enough gives its place to a spare at the next boundary, if there is
    /// one, and is a spare itself from then on: a world does not shrink for it.
    fn replace_slow(&mut self) {
        let run = &mut *self.run;
        let windows = run.config.faults.replace_slow;
        if windows == 0 || !forming::may_regroup(run) || run.orders.stop.is_some() {
            return;
        }
        let sound = |worker: &Worker| !worker.without.aside && !run.health.is_cordoned(worker.slot());
        if run.fleet.roster.assignable() == 0 || !forming::spares(run).any(sound) {
            return;
        }
        let Some(overdue) = run.progress.overdue(windows) else { return };
        let member = run.phase.running().and_then(|it| it.assignment.members.get(overdue.rank.0 as usize));
        let Some(slot) = member.map(|member| member.slot) else { return };
        if let Some(mut worker) = run.fleet.roster.at_mut(slot) {
            worker.without.aside = true;
        }
        run.out.extend(overdue.slow.map(|slow| Action::Publish(News::SetAside(slot, slow))));
        // Its part of the state is in the checkpoint of that boundary, whether there is a replica or not.
        run.regroup(true);
    }

    /// Commits every step that all ranks have reported.
    fn commit(&mut self) {
        let run = &mut *self.run;
        if !run.progress.commit(&mut run.out) {
            return;
        }
        run.faults.got_on(&mut run.out);
        run.fleet.motion.begin(run.now);
        if run.progress.training().is_none() {
            return;
        }
        run.grant(&run.progress.dry_ranks());
        match run.voice.reason {
            _ if run.progress.done() => run.say(Reason::StepsDone),
            Reason::Started { .. } | Reason::Recalled { .. } | Reason::Resumed => run.say(Reason::Committing),
            _ => {}
        }
    }

    /// A rank reports what cannot be true.
    fn disagreement(&mut self, slot: Slot, report: &StepReport, fault: &Fault) {
        let kind = match fault {
            Fault::NotFinite { .. } => CauseKind::Numeric,
            _ => CauseKind::Disagreement,
        };
        self.run.fatal(Failure {
            generation: report.generation,
            phase: WorkerPhase::Communication,
            step: report.step,
            collective: 0,
            memory_in_use: Bytes(0),
            ..self.run.failure_of(slot, kind, fault.to_string())
        });
    }

    pub(super) fn memory(&mut self, id: WorkerId, report: MemoryReport) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        let slot = run.fleet.seen(run.now, id)?.slot();
        run.memory.record_report(slot, report);
        run.memory.answer(run.now, &run.fleet.roster, true, &mut run.out);
        Ok(Reply::Done)
    }

    pub(super) fn checkpoint(&mut self, id: WorkerId, report: CheckpointReport) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        run.fleet.seen(run.now, id)?;
        if run.orders.checkpoint_due.is_some_and(|due| due <= report.step) {
            run.order(|orders| orders.checkpoint_due = None);
        }
        if let Some(entry) = run.progress.checkpoints.apply_report(report) {
            run.publish(News::Checkpoint(entry));
        }
        Ok(Reply::Done)
    }

    pub(super) fn cache_report(&mut self, id: WorkerId, report: CacheReport) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        run.fleet.seen(run.now, id)?;
        if run.progress.cache_report(report, &mut run.out) {
            run.grant(&run.progress.dry_ranks());
        }
        Ok(Reply::Done)
    }

    /// A line for people; one about a fault of the worker's machine counts.
    pub(super) fn note(
        &mut self,
        id: WorkerId,
        sequence: u64,
        text: String,
        hardware: bool,
    ) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        let mut worker = run.fleet.seen(run.now, id)?;
        if sequence > worker.notes {
            worker.notes = sequence;
            let slot = worker.slot();
            drop(worker);
            run.publish(News::Note(slot, text.clone()));
            let noted = Some((id, sequence));
            if hardware && run.count_fault(slot, &text, noted) && losing::can_spare(run, slot) {
                run.expel(slot);
            }
        }
        Ok(Reply::Done)
    }
}
