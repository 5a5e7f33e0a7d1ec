//! The trainer of a simulated worker: it joins generation after generation, and a step is time and three
//! collectives.
//!
//! ```text
//! exchange ─ choose ─ move ─ settle ─ start ─┬─ lease ─ compute ─ vote ─ shift ─ gather ─ report ─┐
//!                                            └────────────────── checkpoint, now and then ◀───────┘
//! vote       all have finished the step before: replica and undo hold one version
//! shift      the reduced gradient is with its replica: that holds the next version, too, and so does the
//!            owner
//! gather     everyone has the new weights
//! ```

use std::{sync::Arc, time::Duration};

use coxswain_coordinator::{
    CauseKind,
    core::{
        event::{Ask, CheckpointReport, CheckpointState, StartReport},
        failure::Failure,
        report::{CacheUse, StateSource, StepReport, StepTimes, Totals},
    },
};
use coxswain_proto::{
    ids::{Bytes, Generation, Step},
    plan,
};
use coxswain_worker::{
    link::{Assignment, LinkError},
    train::recovery::Holding,
    zero::Versions,
};

use crate::{
    coordinator::{KEPT_CHECKPOINTS, RUN},
    process::{OPENING, TrainerStage},
    session::Call,
    world::{Happening, ToProcess, World},
};

impl World {
    /// Looks whether what the trainer waits for has come.
    pub fn wake(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        match process.at {
            TrainerStage::Waiting => match process.standing.enter() {
                Some(Ok(assignment)) => self.connect(pid, assignment),
                Some(Err(why)) => self.cut_off(pid, &why),
                None => {}
            },
            TrainerStage::Leasing => self.lease(pid),
            TrainerStage::Exchanging
            | TrainerStage::Moving
            | TrainerStage::Settling
            | TrainerStage::Voting
            | TrainerStage::Shifting
            | TrainerStage::Gathering
            | TrainerStage::Publishing
            | TrainerStage::Exporting => {
                if let Err(why) = process.standing.alive() {
                    self.abandon(pid, &why);
                }
            }
            // Looked at when the computing or writing is done.
            TrainerStage::Loading
            | TrainerStage::Computing
            | TrainerStage::Saving
            | TrainerStage::Evaluating
            | TrainerStage::Leaving => {}
        }
    }

    /// Loads the model, once the worker has its slot.
    pub fn load(&mut self, pid: usize) {
        self.pause(pid, TrainerStage::Loading, self.script.load_ms * (1.0 - OPENING));
    }

    /// The generation is over for this rank, because it was told so, or because its peers are gone.
    fn abandon(&mut self, pid: usize, why: &LinkError) {
        let generation = self.processes[pid].standing.generation();
        self.break_ring(generation, Some(pid));
        match why {
            LinkError::Aborted(_) => self.wait_for_another(pid, String::new()),
            other => self.cut_off(pid, other),
        }
    }

    fn wait_for_another(&mut self, pid: usize, reason: String) {
        if self.processes[pid].at == TrainerStage::Settling {
            // It has the new state, and cannot know whether all have.
            let taken = self
                .new_state(pid)
                .filter(|(_, source)| matches!(source, StateSource::Replica | StateSource::Carried));
            self.processes[pid].coming = taken.map(|(coming, _)| coming);
        }
        self.processes[pid].at = TrainerStage::Waiting;
        self.processes[pid].waits += 1;
        self.say_ready(pid, reason);
        self.wake(pid);
    }

    fn cut_off(&mut self, pid: usize, why: &LinkError) {
        self.leave(pid, if matches!(why, LinkError::Dismissed(_)) { 0 } else { 4 });
    }

    /// A ring with a member less is no ring: the others see their connections end, one after another.
    pub fn break_ring(&mut self, generation: Generation, but: Option<usize>) {
        let Some(ring) = self.rings.get_mut(&generation) else { return };
        if std::mem::replace(&mut ring.broken, true) {
            return;
        }
        for member in ring.members.clone().into_iter().filter(|member| Some(*member) != but) {
            let delay = self.delay();
            self.after(delay, Happening::Process(member, ToProcess::PeerLost(generation)));
        }
    }

    pub fn peer_lost(&mut self, pid: usize, generation: Generation) {
        let process = &self.processes[pid];
        if process.in_ring() && process.standing.generation() == generation {
            self.wait_for_another(pid, format!("a peer is gone (collective {})", process.collective));
        }
    }

    fn connect(&mut self, pid: usize, assignment: Assignment) {
        let process = &mut self.processes[pid];
        let (own, replica) = (process.own, process.replica);
        let held = process.held.map(|held| Holding { own, replica, ..held });
        let (generation, rank, saved) = (assignment.generation, assignment.rank, process.saved);
        process.assignment = Some(assignment);
        (process.collective, process.entered) = (0, 0);
        let Some(ring) = self.rings.get_mut(&generation) else { return };
        ring.holdings.extend([held, process.coming].into_iter().flatten().map(|held| (rank, held)));
        ring.saved = ring.saved.max(saved);
        self.enter(pid, TrainerStage::Exchanging);
    }

    /// Enters the next collective of the ring; the last to come finishes it for all.
    fn enter(&mut self, pid: usize, at: TrainerStage) {
        let process = &mut self.processes[pid];
        process.at = at;
        process.entered += 1;
        let (generation, collective) = (process.standing.generation(), process.collective);
        let Some(ring) = self.rings.get_mut(&generation) else { return };
        if ring.broken {
            let delay = self.delay();
            return self.after(delay, Happening::Process(pid, ToProcess::PeerLost(generation)));
        }
        if !ring.enter(collective) {
            return;
        }
        let members = ring.members.clone();
        if at == TrainerStage::Shifting {
            self.checker.executed(self.now, generation, self.processes[pid].own.newest);
        }
        for member in members {
            let delay = self.delay();
            self.after(delay, Happening::Process(member, ToProcess::Collected(generation, collective)));
        }
    }

    pub fn collected(&mut self, pid: usize, generation: Generation, collective: u64) {
        let process = &mut self.processes[pid];
        if process.standing.generation() != generation || process.collective != collective {
            return;
        }
        let here = |versions: Versions| Versions { older: false, ..versions };
        let next = |versions: Versions| Versions { newest: versions.newest + 1, older: true };
        match process.at {
            TrainerStage::Exchanging => {
                process.collective += 1;
                self.go_on_from_what_was_coming(pid);
                self.pause(pid, TrainerStage::Moving, self.script.move_ms);
            }
            TrainerStage::Settling => {
                process.collective += 1;
                self.start(pid);
            }
            TrainerStage::Voting => {
                process.collective += 1;
                let step = Step(process.own.newest);
                if self.rings.get(&generation).is_some_and(|ring| ring.regroup == Some(step)) {
                    return self.wait_for_another(pid, String::new());
                }
                (process.own, process.replica) = (here(process.own), process.replica.map(here));
                self.enter(pid, TrainerStage::Shifting);
            }
            TrainerStage::Shifting => {
                process.collective += 1;
                (process.own, process.replica) = (next(process.own), process.replica.map(next));
                self.enter(pid, TrainerStage::Gathering);
            }
            TrainerStage::Gathering => {
                process.collective += 1;
                self.report(pid);
                self.next_step(pid);
            }
            TrainerStage::Publishing => {
                process.collective += 1;
                self.published(pid);
            }
            TrainerStage::Exporting => self.leave(pid, 0),
            _ => {}
        }
    }

    /// Waits by itself.
    fn pause(&mut self, pid: usize, at: TrainerStage, ms: f64) {
        let process = &mut self.processes[pid];
        process.at = at;
        process.waits += 1;
        let wait = process.waits;
        let factor = if process.slow.0 > self.now { process.slow.1 } else { 1.0 };
        let ms = ms * factor * (0.95 + 0.1 * self.random.unit());
        let takes = Duration::from_secs_f64(ms / 1e3);
        if at == TrainerStage::Computing {
            self.processes[pid].computed = takes;
        }
        self.after(takes, Happening::Process(pid, ToProcess::Done(wait)));
    }

    /// Something that took time is done.
    pub fn waited(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        if process.at == TrainerStage::Loading {
            return self.wait_for_another(pid, String::new());
        }
        if let Err(why) = process.standing.alive() {
            return self.abandon(pid, &why);
        }
        match process.at {
            TrainerStage::Moving => self.enter(pid, TrainerStage::Settling),
            TrainerStage::Computing => {
                if process.standing.commands().regroup {
                    let (generation, step) = (process.standing.generation(), Step(process.own.newest));
                    if let Some(ring) = self.rings.get_mut(&generation) {
                        ring.regroup = Some(step);
                    }
                }
                self.enter(pid, TrainerStage::Voting);
            }
            TrainerStage::Saving => self.enter(pid, TrainerStage::Publishing),
            TrainerStage::Evaluating => self.enter(pid, TrainerStage::Exporting),
            _ => {}
        }
    }

    /// If all ranks go on from what this one was taking over, what it had before is nobody's any more.
    fn go_on_from_what_was_coming(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        let Some(assignment) = &process.assignment else { return };
        let Some(ring) = self.rings.get_mut(&assignment.generation) else { return };
        let newest = ring.newest_checkpoint(assignment.checkpoint_step, &self.disk);
        let Some(choice) = ring.choice(newest) else { return };
        if let Some(coming) = process.coming.take_if(|coming| coming.generation == choice.generation) {
            process.hold(coming);
        }
    }

    /// The state that all ranks of its generation have chosen, and where it comes from.
    fn new_state(&mut self, pid: usize) -> Option<(Holding, StateSource)> {
        let assignment = self.processes[pid].assignment.as_ref()?;
        let ring = self.rings.get_mut(&assignment.generation)?;
        let newest = ring.newest_checkpoint(assignment.checkpoint_step, &self.disk);
        let (version, source) = match ring.choice(newest) {
            Some(choice) if choice.uses_replica() => (choice.version, StateSource::Replica),
            Some(choice) => (choice.version, StateSource::Carried),
            None if newest > Step(0) => (self.soundest(newest.0), StateSource::Checkpoint),
            None => (0, StateSource::Fresh),
        };
        let own = Versions { newest: version, older: false };
        let replica = (self.script.replica && assignment.world > 1).then_some(own);
        let holding = Holding {
            generation: assignment.generation,
            world: assignment.world,
            rank: assignment.rank,
            own,
            replica,
            distance: assignment.replica_distance,
            skipped: 0,
            left_out: false,
            loss_scale: None,
        };
        Some((holding, source))
    }

    /// The newest checkpoint from `step` on that can be read; the damaged one itself if none can.
    fn soundest(&self, step: u64) -> u64 {
        let sound = self.disk.range(..=step).rev().find(|step| !self.damaged.contains(step));
        sound.copied().unwrap_or(step)
    }

    /// Takes over the state that all ranks have chosen, and says where that is.
    fn start(&mut self, pid: usize) {
        let Some((state, source)) = self.new_state(pid) else { return };
        let (generation, version) = (state.generation, state.own.newest);
        self.tell_unknown(pid);
        let saved = self.rings.get(&generation).map_or(0, |ring| ring.saved);
        if source == StateSource::Checkpoint && !self.disk.contains(&version) {
            let problem = format!("generation {generation} starts from a checkpoint that is not there");
            self.checker.violated(self.now, problem);
        }
        if source == StateSource::Checkpoint {
            if self.damaged.contains(&version) {
                return self.cannot_restore(pid, version);
            }
            let set_aside = self.disk.split_off(&(version + 1));
            self.damaged.retain(|step| !set_aside.contains(step));
        }
        let process = &mut self.processes[pid];
        process.hold(state);
        process.coming = None;
        process.saved = if source == StateSource::Checkpoint { version } else { saved };
        let report = StartReport {
            worker: process.id.unwrap_or_default(),
            generation,
            first_step: Step(version),
            source,
        };
        self.say(pid, Call::Other(Ask::Start(report)));
        self.next_step(pid);
    }

    /// The first rank tells of checkpoints on disk that the coordinator does not know.
    fn tell_unknown(&mut self, pid: usize) {
        let Some(assignment) = &self.processes[pid].assignment else { return };
        if assignment.rank.0 > 0 {
            return;
        }
        let unknown: Vec<u64> = self.disk.range(assignment.checkpoint_step.0 + 1..).copied().collect();
        unknown.into_iter().for_each(|step| self.tell_checkpoint(pid, step, CheckpointState::Complete));
    }

    fn tell_checkpoint(&mut self, pid: usize, step: u64, state: CheckpointState) {
        let worker = self.processes[pid].id.unwrap_or_default();
        let report =
            CheckpointReport { step: Step(step), state, path: format!("step-{step}"), bytes: Bytes(0) };
        self.say(pid, Call::Other(Ask::Checkpoint(worker, report)));
    }

    /// No checkpoint can be read: its rank says which, and ends.
    fn cannot_restore(&mut self, pid: usize, step: u64) {
        let message = format!("{} is damaged, and there is none before it", Step(step).checkpoint_dir());
        let failure = Failure::of_run(CauseKind::BadInput, message);
        let (run_id, worker) = (String::from(RUN), self.processes[pid].id);
        self.say(pid, Call::Other(Ask::Failure { run_id, worker, failure, sample: None }));
        let generation = self.processes[pid].standing.generation();
        self.break_ring(generation, Some(pid));
        self.leave(pid, 3);
    }

    fn next_step(&mut self, pid: usize) {
        let (total, every) = (self.script.steps, self.script.checkpoint_every);
        let process = &mut self.processes[pid];
        let step = process.own.newest;
        if process.assignment.as_ref().is_some_and(|assignment| assignment.closing) {
            return match step > 0 && process.saved != step {
                true => self.pause(pid, TrainerStage::Saving, self.script.save_ms),
                false => self.wait_for_another(pid, String::new()),
            };
        }
        let due = step > 0 && (step == total || (every > 0 && step.is_multiple_of(every)));
        if due && process.saved != step {
            return self.pause(pid, TrainerStage::Saving, self.script.save_ms);
        }
        if step >= total {
            return self.pause(pid, TrainerStage::Evaluating, self.script.eval_ms);
        }
        process.at = TrainerStage::Leasing;
        self.lease(pid);
    }

    fn lease(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        match process.standing.lease(Step(process.own.newest)) {
            None => {}
            Some(Ok(lease)) => {
                process.cache_phase = lease.cache_phase.number();
                self.pause(pid, TrainerStage::Computing, self.script.step_ms);
            }
            Some(Err(why)) => self.abandon(pid, &why),
        }
    }

    /// All parts of a checkpoint are written.
    fn published(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        let step = process.own.newest;
        process.saved = step;
        let first = process.assignment.as_ref().is_some_and(|assignment| assignment.rank.0 == 0);
        if first {
            let disk = self.coordinator.storage.as_ref().map(|storage| &storage.disk);
            let refused = disk.is_some_and(|disk| disk.refuses(self.now));
            if !refused {
                self.disk.insert(step);
                while self.disk.len() > KEPT_CHECKPOINTS {
                    self.disk.pop_first();
                }
                self.checker.saved(step);
                self.damaged.remove(&step);
                self.flimsy.extend(disk.filter(|disk| disk.lies(self.now)).map(|_| step));
            }
            let state = if refused { CheckpointState::Failed } else { CheckpointState::Complete };
            self.tell_checkpoint(pid, step, state);
        }
        self.next_step(pid);
    }

    fn report(&mut self, pid: usize) {
        let plan = self.checker.plan;
        let process = &self.processes[pid];
        let Some(assignment) = &process.assignment else { return };
        // The state is already of the step after.
        let step = Step(process.own.newest - 1);
        let batch = plan.batch(step);
        let slice = plan::slice(batch.len(), assignment.rank, assignment.world);
        let report = StepReport {
            generation: assignment.generation,
            step,
            epoch: batch.epoch,
            positions: vec![batch.positions.start + slice.start..batch.positions.start + slice.end],
            totals: Totals { loss_sum: 1.0 / (1.0 + step.0 as f64), valid_count: 1.0, grad_norm: 1.0 },
            times: StepTimes { total: process.computed, ..StepTimes::default() },
            metrics: Arc::default(),
            tokens: 0,
            memory_peak: Bytes(0),
            retries: 0,
            cache_generation: process.cache_phase,
            cache: CacheUse::default(),
            skipped: None,
        };
        self.say(pid, Call::Steps(vec![report]));
    }
}
