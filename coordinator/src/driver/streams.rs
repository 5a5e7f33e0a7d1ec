//! The other ends of lines, which handlers hold. The core hears when one is dropped.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll},
};

use coxswain_proto::{
    ids::WorkerId,
    limits::{DIRECTIVE_QUEUE, MAX_NODE_WORKERS},
};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;

use super::{
    inbox::{InboxCall, Owner},
    lines::{NodePipe, Notice, WorkerLine},
};
use crate::core::event::StreamId;

/// The other end of a worker's or launcher's line.
pub struct DirectiveStream<D> {
    directives: mpsc::Receiver<D>,
    owner: Owner,
    stream: StreamId,
    calls: mpsc::Sender<InboxCall>,
}

impl<D> DirectiveStream<D> {
    /// A line of `owner` that is about to be opened.
    pub fn new(
        directives: mpsc::Receiver<D>,
        owner: Owner,
        stream: StreamId,
        calls: mpsc::Sender<InboxCall>,
    ) -> Self {
        Self { directives, owner, stream, calls }
    }

    /// Name.
    pub fn stream(&self) -> StreamId {
        self.stream
    }
}

impl<D> Stream for DirectiveStream<D> {
    type Item = D;

    /// Ends when the core closes the line.
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<D>> {
        self.directives.poll_recv(context)
    }
}

impl<D> Drop for DirectiveStream<D> {
    fn drop(&mut self) {
        hand_in(&self.calls, InboxCall::LineClosed(self.owner.clone(), self.stream));
    }
}

/// The other end of a launcher's stream, with the lines of its workers.
pub struct NodeStream {
    told: mpsc::Receiver<Notice>,
    broken: CancellationToken,
    shared: Weak<NodePipe>,
    node_id: String,
    stream: StreamId,
    /// By the number that the launcher has given.
    lines: HashMap<u64, OpenLine>,
    calls: mpsc::Sender<InboxCall>,
}

/// A worker's line.
pub struct OpenLine {
    /// Whose.
    pub worker: WorkerId,
    /// Name.
    pub stream: StreamId,
    /// Which process.
    pub incarnation: Arc<str>,
}

impl NodeStream {
    /// A stream that is about to be opened, and the driver's end of it. It ends with the driver.
    pub fn new(node_id: String, stream: StreamId, calls: mpsc::Sender<InboxCall>) -> (Self, Arc<NodePipe>) {
        let (tell, told) = mpsc::channel(DIRECTIVE_QUEUE * MAX_NODE_WORKERS);
        let broken = CancellationToken::new();
        let shared = Arc::new(NodePipe::new(tell, broken.clone()));
        let weak = Arc::downgrade(&shared);
        (Self { told, broken, shared: weak, node_id, stream, lines: HashMap::new(), calls }, shared)
    }

    /// Name.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// Waits for something to go down the stream, and takes all there is; false when the stream has ended.
    pub async fn told(&mut self, batch: &mut Vec<Notice>) -> bool {
        tokio::select! {
            biased;
            () = self.broken.cancelled() => false,
            count = self.told.recv_many(batch, MAX_NODE_WORKERS) => count > 0,
        }
    }

    /// The driver's end of a new line; nothing when the driver has ended.
    pub fn begin(&self, number: u64) -> Option<WorkerLine> {
        Some(WorkerLine::On(self.shared.upgrade()?, number))
    }

    /// A line is open, or about to be.
    pub fn enter(&mut self, number: u64, line: OpenLine) {
        self.lines.insert(number, line);
    }

    /// It was not opened.
    pub fn forget(&mut self, number: u64) {
        self.lines.remove(&number);
    }

    /// Worker has closed it.
    pub fn close(&mut self, number: u64) {
        if let Some(OpenLine { worker, stream, .. }) = self.lines.remove(&number) {
            hand_in(&self.calls, InboxCall::LineClosed(Owner::Worker(worker), stream));
        }
    }

    /// The process of a worker whose line goes down this stream.
    pub fn incarnation(&self, worker: WorkerId) -> Option<Arc<str>> {
        let line = self.lines.values().find(|line| line.worker == worker);
        line.map(|line| line.incarnation.clone())
    }

    /// Lines there are.
    pub fn lines(&self) -> usize {
        self.lines.len()
    }
}

impl Drop for NodeStream {
    fn drop(&mut self) {
        for (_, OpenLine { worker, stream, .. }) in self.lines.drain() {
            hand_in(&self.calls, InboxCall::LineClosed(Owner::Worker(worker), stream));
        }
        let owner = Owner::Node(std::mem::take(&mut self.node_id));
        hand_in(&self.calls, InboxCall::LineClosed(owner, self.stream));
    }
}

fn hand_in(calls: &mpsc::Sender<InboxCall>, closed: InboxCall) {
    if let Err(mpsc::error::TrySendError::Full(closed)) = calls.try_send(closed)
        && let Ok(runtime) = tokio::runtime::Handle::try_current()
    {
        let calls = calls.clone();
        runtime.spawn(async move { drop(calls.send(closed).await) });
    }
}
