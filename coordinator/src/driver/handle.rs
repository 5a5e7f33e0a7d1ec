//! The driver, seen from those who hand in calls and those who only look.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use coxswain_proto::{
    ids::{Step, WorkerId},
    limits::DIRECTIVE_QUEUE,
};
use tokio::sync::{broadcast, mpsc, oneshot};

use super::{
    inbox::{Answer, Follow, InboxCall, Owner},
    lines::{NodeLine, WorkerLine},
    looks::Look,
    streams::{DirectiveStream, NodeStream, OpenLine},
};
use crate::{
    core::{
        action::{Directive, Reply},
        event::{Ask, StreamId},
        memory::RankMemory,
        news::News,
        refusal::Refusal,
        roster::Respawn,
        status::Status,
    },
    journal::{History, JournalError, JournalThread, LedgerEntry},
};

/// News with the moment they were published.
#[derive(Debug)]
pub struct DatedNews {
    /// Milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// What happened.
    pub news: News,
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
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
    pub(super) calls: mpsc::Sender<InboxCall>,
    pub(super) looks: mpsc::Sender<Look>,
    pub(super) news: broadcast::WeakSender<Arc<DatedNews>>,
    pub(super) journal: JournalThread,
    pub(super) last_stream: Arc<AtomicU64>,
}

impl Handle {
    /// Asks the core.
    pub async fn ask(&self, ask: Ask) -> Result<Reply, CallError> {
        let (reply, answer) = oneshot::channel();
        self.calls.send(InboxCall::Ask(ask, reply)).await.map_err(|_| CallError::Gone)?;
        Ok(answer.await.map_err(|_| CallError::Gone)??)
    }

    /// The run at this moment.
    pub async fn status(&self) -> Result<Arc<Status>, CallError> {
        self.look(Look::Status).await
    }

    /// What ranks have reported of their memory.
    pub async fn memory(&self) -> Result<Arc<Vec<RankMemory>>, CallError> {
        self.look(Look::Memory).await
    }

    async fn look<T>(&self, look: impl FnOnce(oneshot::Sender<T>) -> Look) -> Result<T, CallError> {
        let (reply, answer) = oneshot::channel();
        self.looks.send(look(reply)).await.map_err(|_| CallError::Gone)?;
        answer.await.map_err(|_| CallError::Gone)
    }

    /// Opens a worker's line.
    pub async fn follow(
        &self,
        worker: WorkerId,
        incarnation: String,
    ) -> Result<DirectiveStream<Directive>, CallError> {
        let (line, end) = self.line(Owner::Worker(worker));
        let follow = Follow { worker, incarnation, stream: end.stream(), line: WorkerLine::Own(line) };
        self.open(|opened| InboxCall::Follow(follow, opened)).await?;
        Ok(end)
    }

    /// Opens a launcher's line.
    pub async fn follow_node(&self, node_id: String) -> Result<DirectiveStream<Respawn>, CallError> {
        let (line, end) = self.line(Owner::Node(node_id.clone()));
        let (stream, line) = (end.stream(), NodeLine::Own(line));
        self.open(|opened| InboxCall::FollowNode { node_id, stream, line, opened }).await?;
        Ok(end)
    }

    /// Opens a launcher's line, on which lines of its workers can be opened, too.
    pub async fn speak_for(&self, node_id: String) -> Result<NodeStream, CallError> {
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
    ) -> Result<(), CallError> {
        let known = incarnation.as_str().into();
        let (stream, line) = (self.next_stream(), on.begin(number).ok_or(CallError::Gone)?);
        on.enter(number, OpenLine { worker, stream, incarnation: known });
        let follow = Follow { worker, incarnation, stream, line };
        let opened = self.open(|opened| InboxCall::Follow(follow, opened)).await;
        if opened.is_err() {
            on.forget(number);
        }
        opened
    }

    async fn open(&self, call: impl FnOnce(Answer) -> InboxCall) -> Result<(), CallError> {
        let (opened, answer) = oneshot::channel();
        self.calls.send(call(opened)).await.map_err(|_| CallError::Gone)?;
        answer.await.map_err(|_| CallError::Gone)??;
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
    pub fn subscribe(&self) -> Result<broadcast::Receiver<Arc<DatedNews>>, CallError> {
        Ok(self.news.upgrade().ok_or(CallError::Gone)?.subscribe())
    }

    /// At most `limit` committed steps from `first` on.
    pub async fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, CallError> {
        Ok(self.journal.ledger(first, limit).await?)
    }

    /// What the journal has beside them.
    pub async fn history(&self) -> Result<History, CallError> {
        Ok(self.journal.history().await?)
    }
}
