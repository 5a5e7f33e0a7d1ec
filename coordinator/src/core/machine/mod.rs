//! The state machine of one run: events in, actions out.
//!
//! [`Machine::handle`] never waits, reads no clock and cannot fail for a reason outside the machine; the driver hands in the time
//! and carries out the actions. One file each:
//!
//! ```text
//! joining      places and lines                         working      what workers report
//! forming      who is in the next generation            leasing      how far ranks may go
//! starting     where it starts                          caching      the feature cache
//! transitions  the only one that changes the phase      sampling     samples that fail
//! launching    processes that are being started         losing       faults
//! recalling    after a restart of the coordinator       standstill   hangs
//! relaunching  after a new launch                       asking       what people want
//! draining     nodes that are to go                     ending       the end
//! ```

mod asking;
mod caching;
mod draining;
mod ending;
mod forming;
mod joining;
mod launching;
mod leasing;
mod losing;
mod recalling;
mod relaunching;
mod sampling;
mod standstill;
mod starting;
mod transitions;
mod working;

use std::{collections::BTreeSet, sync::Arc};

use coxswain_proto::{
    ids::{Generation, Seat, Step},
    plan::Plan,
    run_spec::{Cache, Train},
};

use super::{
    action::{Action, Directive, Orders, Record, Reply, Spent},
    cache::{CacheBook, Reached},
    checkpoints::{CheckpointEntry, Checkpoints},
    event::{Ask, DataSet, Event, Ticket},
    failure::{Failure, Incident},
    invariants,
    memory::MemoryLedger,
    motion::Motion,
    news::News,
    nodes::Nodes,
    past::Past,
    phase::{End, Gathering, LastCall, Phase, Stage},
    quarantine::Quarantine,
    reason::{Reason, RunPhase},
    refusal::{Refusal, Refused, Witness},
    report::CommittedStep,
    roster::Roster,
    starts::Starts,
    status::Pace,
    time::Timestamp,
};
use crate::options::{Budgets, Outcome, Patience, World};

/// What a machine is made from.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names the run among runs.
    pub run_id: String,
    /// What workers' versions must equal.
    pub version: String,
    /// How long, in which batches.
    pub train: Train,
    /// Where features come from.
    pub cache: Cache,
    /// How many workers.
    pub world: World,
    /// Bounds on waiting.
    pub patience: Patience,
    /// Bounds on trying again.
    pub budgets: Budgets,
    /// `run.seed`: with the data set it decides the order of samples.
    pub seed: u64,
    /// Starts of the coordinator for this run, from 1.
    pub life: u32,
    /// True when this coordinator takes the place of one that was lost a moment ago.
    pub restarted: bool,
    /// What earlier lives have recorded.
    pub past: Past,
    /// Checkpoints on disk now; what was there once does not count.
    pub checkpoints: Vec<CheckpointEntry>,
}

/// One run.
#[derive(Clone, Debug)]
pub struct Machine {
    pub(super) config: Config,
    pub(super) roster: Roster,
    pub(super) nodes: Nodes,
    starts: Starts,
    /// Somebody of an earlier life of the coordinator has been heard of in this one.
    reunited: bool,
    pub(super) phase: Phase,
    pub(super) reason: Reason,
    /// The phase that was published last.
    said: RunPhase,
    pub(super) orders: Orders,
    pub(super) progress: Progress,
    pub(super) motion: Motion,
    pub(super) incident: Option<Incident>,
    pub(super) spent: Spent,
    /// Since when the results are known to be on disk, while not everybody has left.
    safe_since: Option<Timestamp>,
    /// A step was committed in this launch: its run file, model and data can be used.
    proven: bool,
    pub(super) quarantine: Quarantine,
    pub(super) generation: Generation,
    pub(super) cache: CacheBook,
    /// When a measurement of drift that everybody waits for is given up.
    drift_by: Option<Timestamp>,
    /// The newest fault that was survived.
    survived: Option<Arc<Failure>>,
    dataset: Option<(DataSet, Witness)>,
    plan: Option<Plan>,
    memory: MemoryLedger,
    checkpoints: Checkpoints,
    refreshes: Vec<Refresh>,
    refused: Refused,
    /// When to look for lost workers and nodes; none counts as lost before.
    next_loss: Option<Timestamp>,
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
    missing: BTreeSet<Seat>,
    deadline: Timestamp,
}

impl Machine {
    /// A run that waits for its workers from `now` on, or goes on with those of its past.
    pub fn new(now: Timestamp, mut config: Config) -> Self {
        let world = config.world;
        let past = std::mem::take(&mut config.past);
        let checkpoints =
            Checkpoints::found(config.checkpoints.iter().cloned(), config.train.keep_checkpoints);
        let committed = past.committed.unwrap_or_else(|| checkpoints.newest_complete());
        let plan =
            past.dataset.as_ref().and_then(|dataset| Plan::new(&config.train, dataset.training_samples).ok());
        let mut cache = CacheBook::new(
            &config.cache,
            plan.as_ref(),
            past.turns.values(),
            past.caches.values(),
            past.reached,
        );
        if let Some(plan) = plan.filter(|_| past.started().is_some()) {
            let leased = cache.leased_at_most(committed, Step(plan.total_steps()));
            cache.reached(Reached { committed, leased });
        }
        let mut machine = Self {
            cache,
            drift_by: None,
            roster: Roster::new(world.size(), config.life),
            nodes: Nodes::new(world, !config.restarted),
            starts: Starts::default(),
            reunited: false,
            phase: Phase::Gathering(Box::new(Gathering::new(now.after(config.patience.rendezvous)))),
            reason: Reason::Incomplete { present: 0, world: world.size(), enough: world.least() },
            said: RunPhase::WaitingForWorkers,
            orders: past.orders.clone(),
            progress: Progress { committed, last: None, pace: Pace::default() },
            motion: Motion::default(),
            incident: None,
            spent: past.spent.clone(),
            safe_since: None,
            proven: config.restarted && past.has_trained(),
            quarantine: past.quarantine.clone(),
            generation: past.newest().map_or(Generation(0), |(generation, _)| generation),
            survived: past.fault.clone(),
            dataset: past.dataset.clone().map(|dataset| (dataset, Witness::Journal)),
            plan,
            memory: MemoryLedger::default(),
            checkpoints,
            refreshes: Vec::new(),
            refused: Refused::default(),
            next_loss: None,
            config,
        };
        machine.recall(now, &past);
        machine
    }

    /// What follows from one event.
    pub fn handle(&mut self, now: Timestamp, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::Asked(ticket, ask) => self.asked(now, ticket, ask, &mut out),
            Event::LineClosed(worker, stream) => self.line_closed(now, worker, stream, &mut out),
            Event::NodeLineClosed(node_id, stream) => self.node_line_closed(now, &node_id, stream),
            Event::Tick => self.tick(now, &mut out),
        }
        // Large worlds are looked at by their own tests: this is linear in the world.
        debug_assert!(
            self.config.world.size() > 64 || invariants::violated(self).is_none(),
            "{:?}",
            invariants::violated(self)
        );
        out
    }

    /// When to send [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let phase = match &self.phase {
            Phase::Gathering(gathering) => {
                let last_call = match gathering.last_call {
                    LastCall::Open(until) => Some(until),
                    LastCall::Closed | LastCall::Over => None,
                };
                let others = [gathering.settle_by, gathering.respawn_by, last_call];
                others.into_iter().flatten().chain([gathering.deadline]).min()
            }
            Phase::Running(_) => None,
            Phase::Over(over) => (!over.expired).then_some(over.deadline),
        };
        let refresh = self.refreshes.iter().map(|refresh| refresh.deadline).min();
        [phase, self.next_look(), self.next_loss, refresh, self.drift_deadline()].into_iter().flatten().min()
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
            Phase::Over(over) => match over.end {
                End::Failed(_) => RunPhase::Failed,
                End::Finished(_) | End::Stopped(..) => RunPhase::Finished,
            },
            Phase::Running(running) => match self.reason {
                Reason::AllWait => RunPhase::Paused,
                Reason::StopAsked(_) | Reason::StepsDone => RunPhase::Stopping,
                _ => match &running.stage {
                    Stage::Training(at) if at.course.ledger.committed() > at.first_step => RunPhase::Training,
                    _ => RunPhase::Starting,
                },
            },
        }
    }

    fn asked(&mut self, now: Timestamp, ticket: Ticket, ask: Ask, out: &mut Vec<Action>) {
        let caller = ask.caller();
        let reply = match ask {
            Ask::JoinNode(claim) => self.join_node(now, claim, out),
            Ask::FollowNode { node_id, stream } => {
                let opened = self.open_node_line(now, &node_id, stream, out);
                let replay = opened.is_ok();
                out.push(Action::Reply(ticket, opened));
                if replay {
                    self.replay_node(now, &node_id, stream, out);
                }
                return;
            }
            Ask::GetRun(origin) => self.welcome(&origin),
            Ask::Register(claim) => self.register(now, claim, out),
            Ask::Follow { worker, incarnation, stream } => {
                // The answer comes before the directives, so that the line is there when they are sent.
                let opened = self.open_line(now, worker, &incarnation, stream, out);
                let replay = opened.is_ok();
                out.push(Action::Reply(ticket, opened));
                if replay {
                    self.replay(worker, stream, out);
                    self.try_form(now, out);
                }
                return;
            }
            Ask::Ready(ready) => self.ready(now, ready, out),
            Ask::Start(report) => self.reported_start(now, report, out),
            Ask::Heartbeat(beat) => Ok(Reply::Known(self.heartbeat(now, &beat, out))),
            Ask::Steps(worker, reports) => self.steps(now, worker, reports, out),
            Ask::Memory(worker, report) => self.memory(now, worker, report, out),
            Ask::Checkpoint(worker, report) => self.checkpoint(now, worker, report, out),
            Ask::Cache(worker, report) => self.cache_report(now, worker, report, out),
            Ask::RebuildCache => self.rebuild_cache(now, out),
            Ask::Note { worker, sequence, text } => self.note(now, worker, sequence, text, out),
            Ask::Failure { run_id, worker, failure, sample } => {
                self.same_run(&run_id).and_then(|()| match (worker, sample) {
                    (Some(worker), Some(at)) => self.failed_sample(now, worker, (at, failure), out),
                    _ => self.reported_failure(now, worker, failure, out),
                })
            }
            Ask::Leave { worker, exit_code, reason } => self.leave(now, worker, exit_code, reason, out),
            Ask::Exit { node_id, seat, pid, ended } => {
                match self.nodes.find(&node_id).map(|(place, _)| place) {
                    Ok(place) => self.exited(now, place, (seat, pid), ended, out),
                    Err(unknown) => Err(unknown),
                }
            }
            Ask::Status => Ok(Reply::Status(Box::new(self.status(now)))),
            Ask::Pause => self.pause(out),
            Ask::Resume => self.resume(out),
            Ask::CheckpointNow => self.checkpoint_now(out),
            Ask::Stop { reason } => self.stop(now, reason, out),
            Ask::Drain { node, reason } => self.drain(now, node, reason, out),
            Ask::ShowMemory { refresh: false } => Ok(Reply::Memory(self.memory_table())),
            Ask::ShowMemory { refresh: true } => return self.refresh_memory(now, ticket, out),
        };
        if let Err(refusal) = &reply
            && refusal.is_news()
            && self.refused.is_news(caller, refusal)
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
        self.look_for_drift(now, out);
        self.look_for_standstill(now, out);
        self.phase_deadline(now, out);
    }

    /// Publishes the phase and its reason if either has changed.
    fn say(&mut self, reason: Reason, out: &mut Vec<Action>) {
        let another = self.reason != reason;
        // A run that was stopped is over for the reason for which it was stopping.
        self.reason = reason;
        let phase = self.run_phase();
        if another || phase != self.said {
            self.said = phase;
            out.push(Action::Publish(News::Phase(phase, self.reason.clone())));
        }
    }

    /// Sends a directive down every open line.
    fn tell_all(&self, directive: &Directive, out: &mut Vec<Action>) {
        let lines = self.roster.workers().filter_map(|worker| worker.line);
        out.extend(lines.map(|stream| Action::Tell(stream, directive.clone())));
    }

    /// Remembers and makes durable what people want.
    fn order(&mut self, change: impl FnOnce(&mut Orders), out: &mut Vec<Action>) {
        change(&mut self.orders);
        out.push(Action::Record(Record::Orders(self.orders.clone())));
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
