//! The state machine of one run: events in, actions out.
//!
//! [`Machine::handle`] never waits, reads no clock and cannot fail for a reason outside the machine; the driver hands in the time
//! and carries out the actions. One file each: `joining` (rendezvous), `working` (what workers report), `asking` (what people
//! want), `ending` (failures and farewells), `transitions` (the only one that changes the phase).

mod asking;
mod ending;
mod joining;
mod transitions;
mod working;

use std::{collections::BTreeSet, sync::Arc};

use coxswain_proto::{
    ids::{Generation, Rank, Step},
    plan::Plan,
    run_spec::Train,
};

use super::{
    action::{Action, Directive, News, Reply},
    checkpoints::{CheckpointEntry, Checkpoints},
    event::{Ask, DataSet, Event, Ticket},
    invariants,
    memory::MemoryLedger,
    phase::{End, Gathering, Phase},
    reason::{Reason, RunPhase},
    refusal::{Refusal, Witness},
    report::CommittedStep,
    roster::Roster,
    status::Pace,
    time::Timestamp,
};
use crate::options::{Outcome, Patience, World};

/// What a machine is made from.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names the run among runs.
    pub run_id: String,
    /// What workers' versions must equal.
    pub version: String,
    /// How long, in which batches.
    pub train: Train,
    /// How many workers.
    pub world: World,
    /// Bounds on waiting.
    pub patience: Patience,
    /// Starts of the coordinator for this run, from 1.
    pub life: u32,
    /// The newest membership of earlier lives.
    pub last_generation: Generation,
    /// Where training starts: the step of the newest complete checkpoint.
    pub first_step: Step,
    /// The data set of earlier lives.
    pub dataset: Option<DataSet>,
    /// Checkpoints on disk.
    pub checkpoints: Vec<CheckpointEntry>,
}

/// One run.
#[derive(Clone, Debug)]
pub struct Machine {
    pub(super) config: Config,
    pub(super) roster: Roster,
    pub(super) phase: Phase,
    pub(super) reason: Reason,
    pub(super) orders: Orders,
    pub(super) progress: Progress,
    generation: Generation,
    dataset: Option<(DataSet, Witness)>,
    plan: Option<Plan>,
    memory: MemoryLedger,
    checkpoints: Checkpoints,
    refreshes: Vec<Refresh>,
    /// When to look for lost workers; none counts as lost before.
    next_loss: Option<Timestamp>,
}

/// What people want; told to every worker whose line is opened.
#[derive(Clone, Debug, Default)]
pub(super) struct Orders {
    pub(super) pause: bool,
    pub(super) stop: Option<String>,
    pub(super) checkpoints: u32,
    pub(super) memory_reports: u32,
}

/// How far the run has come; outlives the phases.
#[derive(Clone, Debug)]
pub(super) struct Progress {
    pub(super) committed: Step,
    pub(super) last: Option<Arc<CommittedStep>>,
    pub(super) pace: Pace,
}

/// People who wait for fresh memory reports.
#[derive(Clone, Debug)]
struct Refresh {
    ticket: Ticket,
    missing: BTreeSet<Rank>,
    deadline: Timestamp,
}

impl Machine {
    /// A run that waits for its workers from `now` on.
    pub fn new(now: Timestamp, config: Config) -> Self {
        let world = config.world;
        Self {
            roster: Roster::new(world, config.life),
            phase: Phase::Gathering(Gathering { deadline: now.after(config.patience.rendezvous) }),
            reason: Reason::Incomplete { present: 0, world: world.size() },
            orders: Orders::default(),
            progress: Progress { committed: config.first_step, last: None, pace: Pace::default() },
            generation: config.last_generation,
            dataset: config.dataset.clone().map(|dataset| (dataset, Witness::Journal)),
            plan: None,
            memory: MemoryLedger::default(),
            checkpoints: Checkpoints::found(config.checkpoints.clone()),
            refreshes: Vec::new(),
            next_loss: None,
            config,
        }
    }

    /// What follows from one event.
    pub fn handle(&mut self, now: Timestamp, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::Asked(ticket, ask) => self.asked(now, ticket, ask, &mut out),
            Event::LineClosed(worker, stream) => self.line_closed(worker, stream, &mut out),
            Event::Tick => self.tick(now, &mut out),
        }
        debug_assert_eq!(invariants::violated(self), None);
        out
    }

    /// When to send [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let phase = match &self.phase {
            Phase::Gathering(gathering) => Some(gathering.deadline),
            Phase::Running(_) => None,
            Phase::Searching(searching) => Some(searching.deadline),
            Phase::Over(over) => (!over.expired).then_some(over.deadline),
        };
        let refresh = self.refreshes.iter().map(|refresh| refresh.deadline).min();
        [phase, self.next_loss, refresh].into_iter().flatten().min()
    }

    /// How the run ended, once there is nobody left to say good-bye to.
    pub fn outcome(&self) -> Option<Outcome> {
        let Phase::Over(over) = &self.phase else { return None };
        (over.expired || self.roster.all_gone()).then(|| match &over.end {
            End::Finished(steps) => Outcome::Finished { steps: *steps },
            End::Stopped(steps, reason) => Outcome::Stopped { steps: *steps, reason: reason.clone() },
            End::Failed(failure) => Outcome::Failed(failure.first_cause()),
        })
    }

    /// Steps below this one are committed.
    pub fn committed(&self) -> Step {
        self.progress.committed
    }

    /// The phase as people see it.
    pub fn run_phase(&self) -> RunPhase {
        match &self.phase {
            Phase::Gathering(_) => RunPhase::WaitingForWorkers,
            Phase::Searching(_) => RunPhase::Failed,
            Phase::Over(over) => match over.end {
                End::Failed(_) => RunPhase::Failed,
                End::Finished(_) | End::Stopped(..) => RunPhase::Finished,
            },
            Phase::Running(running) => match self.reason {
                Reason::AllWait => RunPhase::Paused,
                Reason::StopAsked(_) | Reason::StepsDone => RunPhase::Stopping,
                _ if running.ledger.committed() > running.assignment.first_step => RunPhase::Training,
                _ => RunPhase::Starting,
            },
        }
    }

    fn asked(&mut self, now: Timestamp, ticket: Ticket, ask: Ask, out: &mut Vec<Action>) {
        let reply = match ask {
            Ask::JoinNode(claim) => self.join_node(claim, out),
            Ask::GetRun(origin) => self.welcome(&origin),
            Ask::Register(claim) => self.register(now, claim, out),
            Ask::Follow { worker, incarnation, stream } => {
                // The answer comes before the directives, so that the line is there when they are sent.
                let opened = self.open_line(now, worker, &incarnation, stream, out);
                let replay = opened.is_ok();
                out.push(Action::Reply(ticket, opened));
                if replay {
                    self.replay(worker, stream, out);
                }
                return;
            }
            Ask::Heartbeat(beat) => Ok(Reply::Known(self.heartbeat(now, &beat, out))),
            Ask::Steps(worker, reports) => self.steps(now, worker, reports, out),
            Ask::Memory(worker, peaks) => self.memory(now, worker, &peaks, out),
            Ask::Checkpoint(worker, report) => self.checkpoint(now, worker, report, out),
            Ask::Note { worker, sequence, text } => self.note(worker, sequence, text, out),
            Ask::Failure { run_id, worker, failure } => {
                self.same_run(&run_id).and_then(|()| self.reported_failure(now, worker, failure, out))
            }
            Ask::Leave { worker, exit_code, reason } => self.leave(now, worker, exit_code, reason, out),
            Ask::Exit { node_id, rank, ended } => {
                self.roster.joined(&node_id).and_then(|()| self.exited(now, rank, ended, out))
            }
            Ask::Status => Ok(Reply::Status(Box::new(self.status(now)))),
            Ask::Pause => self.pause(out),
            Ask::Resume => self.resume(out),
            Ask::CheckpointNow => self.checkpoint_now(out),
            Ask::Stop { reason } => self.stop(now, reason, out),
            Ask::ShowMemory { refresh: false } => Ok(Reply::Memory(self.memory_table())),
            Ask::ShowMemory { refresh: true } => return self.refresh_memory(now, ticket, out),
        };
        if let Err(refusal) = &reply
            && !matches!(refusal, Refusal::UnknownWorker(_) | Refusal::Over(_))
        {
            out.push(Action::Publish(News::Refused(refusal.clone())));
        }
        out.push(Action::Reply(ticket, reply));
    }

    fn tick(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        self.finish_refreshes(now, out);
        if self.next_loss.is_some_and(|at| at <= now) {
            self.look_for_losses(now, out);
        }
        self.phase_deadline(now, out);
    }

    /// Publishes the phase and its reason if either has changed.
    fn say(&mut self, reason: Reason, out: &mut Vec<Action>) {
        if self.reason != reason {
            self.reason = reason;
            out.push(Action::Publish(News::Phase(self.run_phase(), self.reason.clone())));
        }
    }

    /// Sends a directive down every open line.
    fn tell_all(&self, directive: &Directive, out: &mut Vec<Action>) {
        let lines = self.roster.workers().filter_map(|worker| worker.line);
        out.extend(lines.map(|stream| Action::Tell(stream, directive.clone())));
    }

    /// No worker can count as lost before this.
    pub(super) fn watched_from(&self) -> Option<Timestamp> {
        self.next_loss
    }

    /// Makes sure that the worker is looked at when it could count as lost.
    fn watch_for_loss(&mut self, at: Timestamp) {
        self.next_loss = Some(self.next_loss.map_or(at, |next| next.min(at)));
    }
}
