//! The one task that owns the core: it hands in calls and time, and carries out actions.
//!
//! ```text
//! handlers ──Call──▶ inbox ──▶ Machine::handle ──▶ records to the journal, durable
//!                     ▲                      └───▶ then: answers, directives, news
//!                deadline
//! ```
//!
//! Calls that came in while the journal wrote are handled together, and their records share one transaction.
//! Nothing here waits for a worker: a line whose queue is full is closed, and the worker opens it again and
//! is told what still applies.
//!
//! Callers that only [look](looks) wait apart.
//!
//! Before a deadline counts, everything that was said until then is heard: a heartbeat that waits in the
//! inbox is a sign of life. Time in which no call could be heard does not count at all (see
//! [`clock`](crate::clock)).

mod handle;
mod inbox;
mod lines;
pub mod looks;
mod streams;

use std::{collections::HashMap, sync::Arc};

use coxswain_proto::{
    ids::Step,
    limits::{HEARTBEAT_INTERVAL, INBOX_QUEUE, WATCH_QUEUE},
    report::CheckpointState,
};
use tokio::{
    sync::{broadcast, mpsc},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

pub use handle::{CallError, DatedNews, Handle};
use inbox::{Answer, Follow, InboxCall, Owner};
use lines::Lines;
pub use lines::Notice;
use looks::Looks;
pub use streams::NodeStream;

use crate::{
    clock::{self, Clock, SignsOfLife},
    core::{
        action::{Action, Record, Reply},
        event::{Ask, Event, StreamId, Ticket},
        machine::{Config, Machine},
        news::News,
        refusal::Refusal,
        time::Timestamp,
    },
    journal::{JournalError, JournalThread},
    log::Log,
    options::Outcome,
};

/// Owner of the core.
pub struct Driver {
    machine: Machine,
    clock: Clock,
    inbox: mpsc::Receiver<InboxCall>,
    /// For what the coordinator says to itself.
    calls: mpsc::WeakSender<InboxCall>,
    looks: Looks,
    journal: JournalThread,
    news: broadcast::Sender<Arc<DatedNews>>,
    log: Log,
    waiting: HashMap<Ticket, (Answer, Option<StreamId>)>,
    lines: Lines,
    last_ticket: u64,
    /// The newest complete checkpoint, until the journal has been copied for it.
    uncopied: Option<Step>,
}

impl Driver {
    /// Calls handled together at most; bounds how long an answer waits for others'.
    const BATCH: usize = 256;

    /// A driver, and the handle that handlers share.
    pub fn new(config: Config, journal: JournalThread, log: Log) -> (Self, Handle) {
        let (calls, inbox) = mpsc::channel(INBOX_QUEUE);
        let (news, _) = broadcast::channel(WATCH_QUEUE);
        let (look, looks) = Looks::new();
        let (clock, weak) = (Clock::start(), calls.downgrade());
        let handle = Handle {
            calls,
            looks: look,
            news: news.downgrade(),
            journal: journal.clone(),
            last_stream: Arc::default(),
        };
        let found = config.checkpoints.iter().map(|found| found.step).max();
        let driver = Self {
            machine: Machine::new(clock.now(), config),
            clock,
            inbox,
            calls: weak,
            looks,
            journal,
            news,
            log,
            waiting: HashMap::new(),
            lines: Lines::default(),
            last_ticket: 0,
            uncopied: found,
        };
        (driver, handle)
    }

    /// Runs until the run is over and everyone has left, or `stop` is cancelled.
    pub async fn run(mut self, stop: CancellationToken) -> Result<Outcome, JournalError> {
        let mut calls = Vec::with_capacity(Self::BATCH);
        let mut living = JoinSet::new();
        living.spawn(live(self.calls.clone()));
        loop {
            let next_round = self.clock.next_round(self.machine.next_deadline());
            let next_look = self.looks.due(clock::monotonic());
            let next_round = next_look.map_or(next_round, |look| look.min(next_round));
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(self.shut_down()),
                count = self.inbox.recv_many(&mut calls, Self::BATCH) => if count == 0 {
                    return Ok(self.shut_down());
                },
                () = self.looks.come() => {}
                () = tokio::time::sleep_until(next_round) => {}
            }
            let steps = self.machine.committed();
            let actions = self.hear(&mut calls);
            match self.carry_out(actions).await {
                // Nobody was told of what is not on disk, so that it has not happened.
                Err(JournalError::Stopped { .. }) => return Ok(Outcome::ShutDown { steps }),
                done => done?,
            }
            let began = clock::monotonic();
            self.looks.answer(began, &mut self.machine, self.clock.now());
            self.looks.rest(began, began.elapsed());
            if let Some(outcome) = self.machine.outcome() {
                return Ok(outcome);
            }
        }
    }

    /// Hands in what was said, and then time, if it is still needed.
    fn hear(&mut self, calls: &mut Vec<InboxCall>) -> Vec<Action> {
        let (now, stall) = self.clock.come_round();
        if let Some(stall) = stall.filter(|stall| stall.time >= HEARTBEAT_INTERVAL) {
            tracing::warn!(
                target: "coxswain::run",
                stood_still_ms = stall.time.as_millis() as u64,
                cause = ?stall.cause,
                "the coordinator stalled for {:.1} s: {}; no worker is declared lost because of this stall",
                stall.time.as_secs_f64(),
                stall.cause.text()
            );
        }
        let mut actions = self.hand_in(now, calls);
        if self.is_due(now) {
            // As many as there are now: under load more of them come without an end.
            calls.extend((0..self.inbox.len()).map_while(|_| self.inbox.try_recv().ok()));
            actions.extend(self.hand_in(now, calls));
        }
        if self.is_due(now) {
            actions.extend(self.machine.handle(now, Event::Tick));
        }
        actions
    }

    fn is_due(&self, now: Timestamp) -> bool {
        self.machine.next_deadline().is_some_and(|at| at <= now)
    }

    fn hand_in(&mut self, now: Timestamp, calls: &mut Vec<InboxCall>) -> Vec<Action> {
        let mut actions = Vec::new();
        for call in calls.drain(..) {
            let Some(event) = self.accept(call) else { continue };
            actions.extend(self.machine.handle(now, event));
        }
        actions
    }

    fn shut_down(&self) -> Outcome {
        self.machine.outcome().unwrap_or(Outcome::ShutDown { steps: self.machine.committed() })
    }

    /// A call becomes an event; its caller, who waits for the answer, is remembered.
    fn accept(&mut self, call: InboxCall) -> Option<Event> {
        let (ask, waiting) = match call {
            InboxCall::LineClosed(owner, stream) => {
                self.lines.forget(stream);
                return Some(match owner {
                    Owner::Worker(worker) => Event::LineClosed(worker, stream),
                    Owner::Node(node_id) => Event::NodeLineClosed(node_id, stream),
                });
            }
            InboxCall::Alive(sign) => {
                self.clock.hear(sign);
                return None;
            }
            InboxCall::Ask(ask, answer) => (ask, (answer, None)),
            InboxCall::Follow(Follow { worker, incarnation, stream, line }, opened) => {
                self.lines.of_worker(stream, line);
                (Ask::Follow { worker, incarnation, stream }, (opened, Some(stream)))
            }
            InboxCall::FollowNode { node_id, stream, line, opened } => {
                self.lines.of_node(stream, line);
                (Ask::FollowNode { node_id, stream }, (opened, Some(stream)))
            }
        };
        self.last_ticket += 1;
        let ticket = Ticket(self.last_ticket);
        self.waiting.insert(ticket, waiting);
        Some(Event::Asked(ticket, ask))
    }

    async fn carry_out(&mut self, actions: Vec<Action>) -> Result<(), JournalError> {
        let (records, rest): (Vec<Record>, Vec<Action>) =
            actions.into_iter().fold((Vec::new(), Vec::new()), |(mut records, mut rest), action| {
                match action {
                    Action::Record(record) => records.push(record),
                    other => rest.push(other),
                }
                (records, rest)
            });
        if !records.is_empty() {
            let since = clock::monotonic();
            self.journal.append(records).await?;
            self.clock.waited_for_disk(since);
        }
        for action in rest {
            if let Action::Publish(News::Checkpoint(of)) = &action
                && of.state == CheckpointState::Complete
            {
                self.uncopied = Some(of.step);
            }
            match action {
                Action::Record(_) => {}
                Action::Reply(ticket, reply) => self.reply(ticket, reply),
                Action::Tell(stream, directive) => self.lines.tell(stream, directive),
                Action::TellNode(stream, respawn) => self.lines.tell_node(stream, respawn),
                Action::Close(stream) => self.lines.close(stream),
                Action::Publish(news) => self.publish(news),
            }
        }
        self.lines.flush();
        if let Some(step) = self.uncopied.take_if(|step| *step <= self.machine.committed())
            && let Err(error) = self.journal.copy_for(step).await
        {
            tracing::warn!(%error, "the checkpoint of step {step} could not be uploaded to the bucket; the next checkpoint will be uploaded as usual");
        }
        Ok(())
    }

    /// Callers that have gone do not want their answers.
    fn reply(&mut self, ticket: Ticket, reply: Result<Reply, Refusal>) {
        let Some((answer, line)) = self.waiting.remove(&ticket) else {
            return debug_assert!(false, "{ticket:?} was answered twice");
        };
        if let (Err(_), Some(stream)) = (&reply, line) {
            self.lines.forget(stream);
        }
        drop(answer.send(reply));
    }

    fn publish(&mut self, news: News) {
        self.log.write(&news);
        // Without a watcher the send fails, and nothing is lost.
        drop(self.news.send(Arc::new(DatedNews { unix_ms: clock::unix_ms(), news })));
    }
}

/// Says on the way of a worker's call that the coordinator lives, until the driver has ended.
async fn live(calls: mpsc::WeakSender<InboxCall>) {
    let mut signs = SignsOfLife::start();
    loop {
        let sign = signs.next().await;
        let Some(calls) = calls.upgrade() else { return };
        if calls.send(InboxCall::Alive(sign)).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
