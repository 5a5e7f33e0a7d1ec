//! The one task that owns the core: it hands in calls and time, and carries out actions.
//!
//! ```text
//! handlers ──Call──▶ inbox ──▶ Machine::handle ──▶ records to the journal, durable
//!                     ▲                      └───▶ then: answers, directives, news
//!                deadline
//! ```
//!
//! Calls that came in while the journal wrote are handled together, and their records share one transaction. Nothing here waits
//! for a worker: a line whose queue is full is closed, and the worker opens it again and is told what still applies.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use coxswain_proto::{
    ids::{Step, WorkerId},
    limits::{DIRECTIVE_QUEUE, INBOX_QUEUE, WATCH_QUEUE},
};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;

use crate::{
    clock::{self, Clock},
    core::{
        action::{Action, Directive, News, Record, Reply},
        event::{Ask, Event, StreamId, Ticket},
        machine::{Config, Machine},
        refusal::Refusal,
    },
    journal::{JournalError, JournalThread, LedgerEntry},
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
    /// The ledger cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

type Answer = oneshot::Sender<Result<Reply, Refusal>>;

enum Call {
    Ask(Ask, Answer),
    Follow {
        worker: WorkerId,
        incarnation: String,
        line: mpsc::Sender<Directive>,
        opened: oneshot::Sender<Opened>,
    },
    LineClosed(WorkerId, StreamId),
}

type Opened = Result<StreamId, Refusal>;

/// The driver, seen from the handlers.
#[derive(Clone)]
pub struct Handle {
    calls: mpsc::Sender<Call>,
    news: broadcast::WeakSender<Arc<Dated>>,
    journal: JournalThread,
}

impl Handle {
    /// Asks the core.
    pub async fn ask(&self, ask: Ask) -> Result<Reply, Denied> {
        let (reply, answer) = oneshot::channel();
        self.calls.send(Call::Ask(ask, reply)).await.map_err(|_| Denied::Gone)?;
        Ok(answer.await.map_err(|_| Denied::Gone)??)
    }

    /// Opens a worker's line.
    pub async fn follow(&self, worker: WorkerId, incarnation: String) -> Result<Line, Denied> {
        let (line, directives) = mpsc::channel(DIRECTIVE_QUEUE);
        let (opened, answer) = oneshot::channel();
        let call = Call::Follow { worker, incarnation, line, opened };
        self.calls.send(call).await.map_err(|_| Denied::Gone)?;
        let stream = answer.await.map_err(|_| Denied::Gone)??;
        Ok(Line { directives, worker, stream, calls: self.calls.clone() })
    }

    /// News from now on; ends with the driver.
    pub fn subscribe(&self) -> Result<broadcast::Receiver<Arc<Dated>>, Denied> {
        Ok(self.news.upgrade().ok_or(Denied::Gone)?.subscribe())
    }

    /// At most `limit` committed steps from `first` on.
    pub async fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, Denied> {
        Ok(self.journal.ledger(first, limit).await?)
    }
}

/// The worker's end of its line; the core hears when it is dropped.
pub struct Line {
    directives: mpsc::Receiver<Directive>,
    worker: WorkerId,
    stream: StreamId,
    calls: mpsc::Sender<Call>,
}

impl Stream for Line {
    type Item = Directive;

    /// Ends when the core closes the line.
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Directive>> {
        self.directives.poll_recv(context)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let closed = Call::LineClosed(self.worker, self.stream);
        if let Err(mpsc::error::TrySendError::Full(closed)) = self.calls.try_send(closed)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let calls = self.calls.clone();
            runtime.spawn(async move { drop(calls.send(closed).await) });
        }
    }
}

/// Owner of the core.
pub struct Driver {
    machine: Machine,
    clock: Clock,
    inbox: mpsc::Receiver<Call>,
    journal: JournalThread,
    news: broadcast::Sender<Arc<Dated>>,
    log: Log,
    waiting: HashMap<Ticket, Waiting>,
    lines: HashMap<StreamId, mpsc::Sender<Directive>>,
    last_ticket: u64,
    last_stream: u64,
}

enum Waiting {
    Answer(Answer),
    Opened(StreamId, oneshot::Sender<Opened>),
}

impl Driver {
    /// Calls handled together at most; bounds how long an answer waits for others'.
    const BATCH: usize = 256;

    /// A driver, and the handle that handlers share.
    pub fn new(config: Config, journal: JournalThread, log: Log) -> (Self, Handle) {
        let (calls, inbox) = mpsc::channel(INBOX_QUEUE);
        let (news, _) = broadcast::channel(WATCH_QUEUE);
        let clock = Clock::start();
        let handle = Handle { calls, news: news.downgrade(), journal: journal.clone() };
        let driver = Self {
            machine: Machine::new(clock.now(), config),
            clock,
            inbox,
            journal,
            news,
            log,
            waiting: HashMap::new(),
            lines: HashMap::new(),
            last_ticket: 0,
            last_stream: 0,
        };
        (driver, handle)
    }

    /// Runs until the run is over and everyone has left, or `stop` is cancelled.
    pub async fn run(mut self, stop: CancellationToken) -> Result<Outcome, JournalError> {
        let mut calls = Vec::with_capacity(Self::BATCH);
        loop {
            let deadline = self.machine.next_deadline().map(|at| self.clock.instant(at));
            let events = tokio::select! {
                count = self.inbox.recv_many(&mut calls, Self::BATCH) => match count {
                    0 => return Ok(self.shut_down()),
                    _ => calls.drain(..).filter_map(|call| self.accept(call)).collect(),
                },
                () = until(deadline) => vec![Event::Tick],
                () = stop.cancelled() => return Ok(self.shut_down()),
            };
            let now = self.clock.now();
            let actions = events.into_iter().flat_map(|event| self.machine.handle(now, event)).collect();
            self.carry_out(actions).await?;
            if let Some(outcome) = self.machine.outcome() {
                return Ok(outcome);
            }
        }
    }

    fn shut_down(&self) -> Outcome {
        self.machine.outcome().unwrap_or(Outcome::ShutDown { steps: self.machine.committed() })
    }

    /// A call becomes an event; whoever waits for its answer is remembered.
    fn accept(&mut self, call: Call) -> Option<Event> {
        let (ask, waiting) = match call {
            Call::LineClosed(worker, stream) => {
                self.lines.remove(&stream);
                return Some(Event::LineClosed(worker, stream));
            }
            Call::Ask(ask, answer) => (ask, Waiting::Answer(answer)),
            Call::Follow { worker, incarnation, line, opened } => {
                self.last_stream += 1;
                let stream = StreamId(self.last_stream);
                self.lines.insert(stream, line);
                (Ask::Follow { worker, incarnation, stream }, Waiting::Opened(stream, opened))
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
            self.journal.append(records).await?;
        }
        for action in rest {
            match action {
                Action::Record(_) => {}
                Action::Reply(ticket, reply) => self.reply(ticket, reply),
                Action::Tell(stream, directive) => self.tell(stream, directive),
                Action::Close(stream) => drop(self.lines.remove(&stream)),
                Action::Publish(news) => self.publish(news),
            }
        }
        Ok(())
    }

    /// Callers that have gone do not want their answers.
    fn reply(&mut self, ticket: Ticket, reply: Result<Reply, Refusal>) {
        match self.waiting.remove(&ticket) {
            Some(Waiting::Answer(answer)) => drop(answer.send(reply)),
            Some(Waiting::Opened(stream, opened)) => {
                if reply.is_err() {
                    self.lines.remove(&stream);
                }
                drop(opened.send(reply.map(|_| stream)));
            }
            None => debug_assert!(false, "{ticket:?} was answered twice"),
        }
    }

    /// A full line belongs to a worker that does not read: it is closed, and will be replayed when opened again.
    fn tell(&mut self, stream: StreamId, directive: Directive) {
        if let Some(line) = self.lines.get(&stream)
            && line.try_send(directive).is_err()
        {
            self.lines.remove(&stream);
        }
    }

    fn publish(&mut self, news: News) {
        self.log.write(&news);
        // Without a watcher there is nobody to tell.
        drop(self.news.send(Arc::new(Dated { unix_ms: clock::unix_ms(), news })));
    }
}

async fn until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
