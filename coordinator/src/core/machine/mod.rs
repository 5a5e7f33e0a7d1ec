//! The state machine of one run: events in, actions out.
//!
//! [`Machine::handle`] never waits, reads no clock and cannot fail for a reason outside the machine; the
//! driver hands in the time and carries out the actions. Every call goes down this list, and none comes back
//! up:
//!
//! ```text
//! mod          which event it is
//! joining      places, slots and lines                       leaving      failures, good-byes, exits
//! working      what workers report                           asking       what people want
//!
//! watching     what is due because time has passed
//! transitions  the only one that changes the phase           recalling    the phase of an earlier life
//!
//! losing       what a loss means                             standstill   ranks that hold others up
//! forming      the members of the next generation            showing      the run at this moment
//! closing      the checkpoint before the end of a run that fails
//!
//! run          the owners of the run's state, and questions that concern several of them
//! ```

mod asking;
mod closing;
mod forming;
mod joining;
mod leaving;
mod losing;
mod recalling;
pub(super) mod run;
mod showing;
mod standstill;
mod transitions;
mod watching;
mod working;

use std::sync::Arc;

use coxswain_proto::ids::Step;

pub use super::config::Config;
use asking::People;
use joining::Arrivals;
use leaving::Departures;
use run::Run;
use watching::Watch;
use working::Reports;

use super::{
    action::{Action, Reply},
    event::{Ask, Event, Ticket},
    failure::End,
    invariants,
    memory::RankMemory,
    phase::Phase,
    reason::RunPhase,
    status::Status,
    time::Timestamp,
};
use crate::options::Outcome;

/// One run, and its callers.
#[derive(Clone, Debug)]
pub struct Machine {
    pub(super) run: Run,
}

impl AsRef<Run> for Machine {
    fn as_ref(&self) -> &Run {
        &self.run
    }
}

impl Machine {
    /// A run that waits for its workers from `now` on, or goes on with those of its past.
    pub fn new(now: Timestamp, mut config: Config) -> Self {
        let mut past = std::mem::take(&mut config.past);
        let others = past.leave_out_other_versions(&config.version);
        let mut run = Run::new(now, config, &past);
        run.out.extend(others.into_iter().map(Action::Record));
        recalling::recall(&mut run, &past);
        Self { run }
    }

    /// What follows from one event.
    pub fn handle(&mut self, now: Timestamp, event: Event) -> Vec<Action> {
        self.run.now = now;
        match event {
            Event::Asked(ticket, ask) => self.asked(ticket, ask),
            Event::LineClosed(worker, stream) => {
                Arrivals { run: &mut self.run }.line_closed(worker, stream);
            }
            Event::NodeLineClosed(node_id, stream) => self.run.fleet.node_line_closed(now, &node_id, stream),
            Event::Tick => Watch { run: &mut self.run }.tick(),
        }
        // Large worlds are looked at by their own tests: this is linear in the world.
        debug_assert!(
            self.run.config.world.size() > 64 || invariants::violated(self).is_none(),
            "{:?}",
            invariants::violated(self)
        );
        std::mem::take(&mut self.run.out)
    }

    /// When to send [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        watching::next_deadline(&self.run)
    }

    /// How the run ended, once all workers have left.
    pub fn outcome(&self) -> Option<Outcome> {
        let Phase::Over(over) = &self.run.phase else { return None };
        (over.expired || self.run.fleet.roster.all_gone()).then(|| match &over.end {
            End::Finished(steps) => Outcome::Finished { steps: *steps },
            End::Stopped(steps, reason) => Outcome::Stopped { steps: *steps, reason: reason.clone() },
            End::Failed(failure) => Outcome::Failed(failure.first_cause()),
        })
    }

    /// Steps below this one are committed.
    pub fn committed(&self) -> Step {
        self.run.progress.committed
    }

    /// The phase as people see it.
    pub fn run_phase(&self) -> RunPhase {
        self.run.phase_for(&self.run.voice.reason)
    }

    /// The run at this moment; changes nothing but the machine's time.
    pub fn status(&mut self, now: Timestamp) -> Status {
        self.run.now = now;
        showing::status(&self.run)
    }

    /// What ranks have reported of their memory.
    pub fn memory(&self) -> Arc<Vec<RankMemory>> {
        self.run.memory.table(&self.run.fleet.roster)
    }

    fn asked(&mut self, ticket: Ticket, ask: Ask) {
        let (caller, run) = (ask.caller(), &mut self.run);
        let reply = match ask {
            // These answer by themselves: before the directives of a line that is opened, or when memory has
            // been reported.
            Ask::FollowNode { node_id, stream } => {
                return Arrivals { run }.follow_node(ticket, &node_id, stream);
            }
            Ask::Follow { worker, incarnation, stream } => {
                return Arrivals { run }.follow(ticket, worker, &incarnation, stream);
            }
            Ask::RefreshMemory { reset } => return People { run }.refresh_memory(ticket, reset),
            Ask::JoinNode(claim) => Arrivals { run }.join_node(&claim),
            Ask::GetRun(origin) => Arrivals { run }.welcome(&origin).map(|()| Reply::Welcome),
            Ask::Register(claim) => Arrivals { run }.register(claim),
            Ask::Ready(ready) => Reports { run }.ready(&ready),
            Ask::Start(report) => Reports { run }.reported_start(&report),
            Ask::Heartbeat(beat) => Ok(Reply::Known(Reports { run }.heartbeat(&beat))),
            Ask::Node(news) => Ok(Reports { run }.node(&news)),
            Ask::Steps(worker, reports) => Reports { run }.steps(worker, &reports),
            Ask::Memory(worker, report) => Reports { run }.memory(worker, report),
            Ask::Checkpoint(worker, report) => Reports { run }.checkpoint(worker, report),
            Ask::Cache(worker, report) => Reports { run }.cache_report(worker, report),
            Ask::Note { worker, sequence, text, hardware } => {
                Reports { run }.note(worker, sequence, text, hardware)
            }
            Ask::Failure { run_id, worker, failure, sample } => {
                run.is_this(&run_id).and_then(|()| match (worker, sample) {
                    (Some(worker), Some(sample)) => Departures { run }.failed_sample(worker, sample, failure),
                    (Some(worker), None) => Departures { run }.reported_failure(worker, failure),
                    (None, _) => Ok(Departures { run }.failed_unregistered(failure)),
                })
            }
            Ask::Leave { worker, exit_code, reason } => Departures { run }.leave(worker, exit_code, reason),
            Ask::Exit { node_id, slot, pid, ended, sample } => {
                Departures { run }.exited(&node_id, slot, pid, ended, sample)
            }
            Ask::RebuildCache => People { run }.rebuild_cache(),
            Ask::Pause => People { run }.pause(),
            Ask::Resume => People { run }.resume(),
            Ask::CheckpointNow => People { run }.checkpoint_now(),
            Ask::Stop { reason } => People { run }.stop(reason),
            Ask::Drain { node, reason } => People { run }.drain(node, reason),
        };
        if let Err(refusal) = &reply {
            self.run.voice.refuse(caller, refusal, &mut self.run.out);
        }
        self.run.reply(ticket, reply);
    }
}
