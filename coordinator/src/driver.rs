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
//! Before a deadline counts, everything that was said until then is heard: a heartbeat that waits in the
//! inbox is a sign of life. Time in which no call could be heard does not count at all (see
//! [`clock`](crate::clock)).

mod inbox;
mod lines;
mod streams;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use coxswain_proto::{
    ids::{Step, WorkerId},
    limits::{DIRECTIVE_QUEUE, HEARTBEAT_INTERVAL, INBOX_QUEUE, WATCH_QUEUE},
    report::CheckpointState,
};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use inbox::{Answer, Follow, InboxCall, Owner};
pub use lines::Told;
use lines::{Lines, NodeLine, WorkerLine};
use streams::OpenLine;
pub use streams::{DirectiveStream, NodeStream};

use crate::{
    clock::{self, Clock},
    core::{
        action::{Action, Directive, Record, Reply},
        event::{Ask, Event, StreamId, Ticket},
        machine::{Config, Machine},
        news::News,
        refusal::Refusal,
        roster::Respawn,
        time::Timestamp,
    },
    journal::{History, JournalError, JournalThread, LedgerEntry},
    log::Log,
    options::Outcome,
};

/// News with the moment they were published.
#[derive(Debug)]
pub struct Dated {
    /// Milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// What happened.
    pub news: News,
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum Denied {
    /// The core said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The coordinator is shutting down.
    #[error("the coordinator is shutting down")]
    Gone,
    /// The journal cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// The driver, seen from the handlers.
#[derive(Clone)]
pub struct Handle {
    calls: mpsc::Sender<InboxCall>,
    news: broadcast::WeakSender<Arc<Dated>>,
    journal: JournalThread,
    last_stream: Arc<AtomicU64>,
}

impl Handle {
    /// Asks the core.
    pub async fn ask(&self, ask: Ask) -> Result<Reply, Denied> {
        let (reply, answer) = oneshot::channel();
        self.calls.send(InboxCall::Ask(ask, reply)).await.map_err(|_| Denied::Gone)?;
        Ok(answer.await.map_err(|_| Denied::Gone)??)
    }

    /// Opens a worker's line.
    pub async fn follow(
        &self,
        worker: WorkerId,
        incarnation: String,
    ) -> Result<DirectiveStream<Directive>, Denied> {
        let (line, end) = self.line(Owner::Worker(worker));
        let follow = Follow { worker, incarnation, stream: end.stream(), line: WorkerLine::Own(line) };
        self.open(|opened| InboxCall::Follow(follow, opened)).await?;
        Ok(end)
    }

    /// Opens a launcher's line.
    pub async fn follow_node(&self, node_id: String) -> Result<DirectiveStream<Respawn>, Denied> {
        let (line, end) = self.line(Owner::Node(node_id.clone()));
        let (stream, line) = (end.stream(), NodeLine::Own(line));
        self.open(|opened| InboxCall::FollowNode { node_id, stream, line, opened }).await?;
        Ok(end)
    }

    /// Opens a launcher's line, on which lines of its workers can be opened, too.
    pub async fn speak_for(&self, node_id: String) -> Result<NodeStream, Denied> {
        let (end, shared) = NodeStream::new(node_id.clone(), self.next_stream(), self.calls.clone());
        let (stream, line) = (end.stream(), NodeLine::Shared(shared));
        self.open(|opened| InboxCall::FollowNode { node_id, stream, line, opened }).await?;
        Ok(end)
    }

    /// Opens a worker's line on its launcher's, which knows it by `number`.
    pub async fn follow_on(
        &self,
        on: &mut NodeStream,
        number: u64,
        worker: WorkerId,
        incarnation: String,
    ) -> Result<(), Denied> {
        let known = incarnation.as_str().into();
        let (stream, line) = (self.next_stream(), on.begin(number).ok_or(Denied::Gone)?);
        on.enter(number, OpenLine { worker, stream, incarnation: known });
        let follow = Follow { worker, incarnation, stream, line };
        let opened = self.open(|opened| InboxCall::Follow(follow, opened)).await;
        if opened.is_err() {
            on.forget(number);
        }
        opened
    }

    async fn open(&self, call: impl FnOnce(Answer) -> InboxCall) -> Result<(), Denied> {
        let (opened, answer) = oneshot::channel();
        self.calls.send(call(opened)).await.map_err(|_| Denied::Gone)?;
        answer.await.map_err(|_| Denied::Gone)??;
        Ok(())
    }

    /// Both ends of a line that is about to be opened. The caller's is there before the call is made: a
    /// caller that hangs up while it waits for the answer has closed the line.
    fn line<D>(&self, owner: Owner) -> (mpsc::Sender<D>, DirectiveStream<D>) {
        let (line, directives) = mpsc::channel(DIRECTIVE_QUEUE);
        (line, DirectiveStream::new(directives, owner, self.next_stream(), self.calls.clone()))
    }

    fn next_stream(&self) -> StreamId {
        StreamId(self.last_stream.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// News from now on; ends with the driver.
    pub fn subscribe(&self) -> Result<broadcast::Receiver<Arc<Dated>>, Denied> {
        Ok(self.news.upgrade().ok_or(Denied::Gone)?.subscribe())
    }

    /// At most `limit` committed steps from `first` on.
    pub async fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, Denied> {
        Ok(self.journal.ledger(first, limit).await?)
    }

    /// What the journal has beside them.
    pub async fn history(&self) -> Result<History, Denied> {
        Ok(self.journal.history().await?)
    }
}

/// Owner of the core.
pub struct Driver {
    machine: Machine,
    clock: Clock,
    inbox: mpsc::Receiver<InboxCall>,
    journal: JournalThread,
    news: broadcast::Sender<Arc<Dated>>,
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
        let clock = Clock::start();
        let handle =
            Handle { calls, news: news.downgrade(), journal: journal.clone(), last_stream: Arc::default() };
        let found = config.checkpoints.iter().map(|found| found.step).max();
        let driver = Self {
            machine: Machine::new(clock.now(), config),
            clock,
            inbox,
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
        loop {
            let next_round = self.clock.next_round(self.machine.next_deadline());
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(self.shut_down()),
                count = self.inbox.recv_many(&mut calls, Self::BATCH) => if count == 0 {
                    return Ok(self.shut_down());
                },
                () = tokio::time::sleep_until(next_round) => {}
            }
            let steps = self.machine.committed();
            let actions = self.hear(&mut calls);
            match self.carry_out(actions).await {
                // Nobody was told of what is not on disk, so that it has not happened.
                Err(JournalError::Stopped { .. }) => return Ok(Outcome::ShutDown { steps }),
                done => done?,
            }
            if let Some(outcome) = self.machine.outcome() {
                return Ok(outcome);
            }
        }
    }

    /// Hands in what was said, and then time, if it is still needed.
    fn hear(&mut self, calls: &mut Vec<InboxCall>) -> Vec<Action> {
        let (now, deaf) = self.clock.come_round();
        if deaf >= HEARTBEAT_INTERVAL {
            let stood_still_ms = deaf.as_millis() as u64;
            tracing::warn!(
                target: "coxswain::run",
                stood_still_ms,
                "the coordinator stood still for {:.1} s, waiting for its disk or for a processor: this time is held against no worker",
                deaf.as_secs_f64()
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
            let event = self.accept(call);
            actions.extend(self.machine.handle(now, event));
        }
        actions
    }

    fn shut_down(&self) -> Outcome {
        self.machine.outcome().unwrap_or(Outcome::ShutDown { steps: self.machine.committed() })
    }

    /// A call becomes an event; its caller, who waits for the answer, is remembered.
    fn accept(&mut self, call: InboxCall) -> Event {
        let (ask, waiting) = match call {
            InboxCall::LineClosed(owner, stream) => {
                self.lines.forget(stream);
                return match owner {
                    Owner::Worker(worker) => Event::LineClosed(worker, stream),
                    Owner::Node(node_id) => Event::NodeLineClosed(node_id, stream),
                };
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
        Event::Asked(ticket, ask)
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
            self.journal.append(records).await?;
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
            tracing::warn!(%error, "the checkpoint of step {step} does not go to the bucket; the next one is tried as usual");
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
        drop(self.news.send(Arc::new(Dated { unix_ms: clock::unix_ms(), news })));
    }
}

#[cfg(test)]
mod tests;
