//! What handlers hand to the driver.

use coxswain_proto::ids::WorkerId;
use tokio::sync::oneshot;

use super::lines::{NodeLine, WorkerLine};
use crate::{
    clock::SignOfLife,
    core::{
        action::Reply,
        event::{Ask, StreamId},
        refusal::Refusal,
    },
};

/// Where an answer goes.
pub type Answer = oneshot::Sender<Result<Reply, Refusal>>;

/// One thing that is handed in.
pub enum InboxCall {
    /// Someone asks.
    Ask(Ask, Answer),
    /// A worker opens its line.
    Follow(Follow, Answer),
    /// A launcher does.
    FollowNode { node_id: String, stream: StreamId, line: NodeLine, opened: Answer },
    /// A line was closed by its owner.
    LineClosed(Owner, StreamId),
    /// The coordinator lives.
    Alive(SignOfLife),
}

/// A worker opens its line.
pub struct Follow {
    pub worker: WorkerId,
    pub incarnation: String,
    pub stream: StreamId,
    pub line: WorkerLine,
}

/// Whose line it is.
#[derive(Clone, Debug)]
pub enum Owner {
    Worker(WorkerId),
    Node(String),
}
