//! Where workers call: the coordinator's service, as a launcher offers it.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use coxswain_proto::{
    limits::DIRECTIVE_QUEUE,
    v1::{self, coordinator_server::Coordinator, rank_call::Kind},
};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::conversation::{CallOf, LineOf, Message, Steps};
use crate::{clock, control::Access};

type Answer<T> = Result<Response<T>, Status>;
/// Streams that no launcher offers.
type NoStream<T> = tokio_stream::Empty<Result<T, Status>>;

/// Takes what workers say to the conversation, and their rare calls to the coordinator as they are.
#[derive(Debug)]
pub(super) struct Desk {
    access: Access,
    say: mpsc::Sender<Message>,
    /// Names calls and lines; never used twice, over all streams.
    last: Arc<AtomicU64>,
}

impl Desk {
    pub(super) fn new(access: Access, say: mpsc::Sender<Message>) -> Self {
        Self { access, say, last: Arc::default() }
    }

    fn next(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    async fn call(&self, number: u64, kind: Kind, line: Option<LineOf>) -> Result<(), Status> {
        let (answer, answered) = oneshot::channel();
        self.say(Message::Call(CallOf { number, kind, line, answer })).await?;
        answered.await.map_err(|_| broken())?
    }

    async fn say(&self, message: Message) -> Result<(), Status> {
        self.say.send(message).await.map_err(|_| broken())
    }
}

/// Worth another try, as a lost connection is.
fn broken() -> Status {
    Status::unavailable("the launcher has lost the coordinator")
}

fn not_here() -> Status {
    Status::unimplemented("a launcher accepts calls of its workers only; launchers call the coordinator")
}

#[tonic::async_trait]
impl Coordinator for Desk {
    type FollowStream = LocalLine;
    type FollowNodeStream = NoStream<v1::NodeDirective>;
    type SpeakForNodeStream = NoStream<v1::NodeTold>;

    async fn follow(&self, request: Request<v1::FollowRequest>) -> Answer<LocalLine> {
        let follow = request.into_inner();
        let (directives, told) = mpsc::channel(DIRECTIVE_QUEUE);
        let (number, worker) = (self.next(), follow.worker_id);
        // Before the call: a worker that is gone while it waits for the answer has closed its line.
        let line = LocalLine { told, number, say: self.say.clone() };
        self.call(number, Kind::Follow(follow), Some(LineOf { worker, directives, open: false })).await?;
        Ok(Response::new(line))
    }

    async fn ready(&self, request: Request<v1::ReadyRequest>) -> Answer<v1::ReadyResponse> {
        self.call(self.next(), Kind::Ready(request.into_inner()), None).await?;
        Ok(Response::new(v1::ReadyResponse {}))
    }

    async fn report_start(
        &self,
        request: Request<v1::ReportStartRequest>,
    ) -> Answer<v1::ReportStartResponse> {
        self.call(self.next(), Kind::Start(request.into_inner()), None).await?;
        Ok(Response::new(v1::ReportStartResponse {}))
    }

    async fn heartbeat(&self, request: Request<v1::HeartbeatRequest>) -> Answer<v1::HeartbeatResponse> {
        // While there is no stream for long, there is a newer one by the time that there is.
        drop(self.say.try_send(Message::Beat(request.into_inner(), clock::now())));
        // One that the coordinator does not know any more hears it when it opens its line again.
        Ok(Response::new(v1::HeartbeatResponse { known: true }))
    }

    async fn report_steps(
        &self,
        request: Request<v1::ReportStepsRequest>,
    ) -> Answer<v1::ReportStepsResponse> {
        let (answer, answered) = oneshot::channel();
        self.say(Message::Steps(Steps { report: request.into_inner(), answer })).await?;
        let committed_steps = answered.await.map_err(|_| broken())??;
        Ok(Response::new(v1::ReportStepsResponse { committed_steps }))
    }

    async fn get_run(&self, request: Request<v1::GetRunRequest>) -> Answer<v1::GetRunResponse> {
        self.access.coordinator().get_run(request.into_inner()).await
    }

    async fn register(&self, request: Request<v1::RegisterRequest>) -> Answer<v1::RegisterResponse> {
        self.access.coordinator().register(request.into_inner()).await
    }

    async fn report_memory(
        &self,
        request: Request<v1::ReportMemoryRequest>,
    ) -> Answer<v1::ReportMemoryResponse> {
        self.access.coordinator().report_memory(request.into_inner()).await
    }

    async fn report_checkpoint(
        &self,
        request: Request<v1::ReportCheckpointRequest>,
    ) -> Answer<v1::ReportCheckpointResponse> {
        self.access.coordinator().report_checkpoint(request.into_inner()).await
    }

    async fn report_cache(
        &self,
        request: Request<v1::ReportCacheRequest>,
    ) -> Answer<v1::ReportCacheResponse> {
        self.access.coordinator().report_cache(request.into_inner()).await
    }

    async fn report_note(&self, request: Request<v1::ReportNoteRequest>) -> Answer<v1::ReportNoteResponse> {
        self.access.coordinator().report_note(request.into_inner()).await
    }

    async fn report_failure(
        &self,
        request: Request<v1::ReportFailureRequest>,
    ) -> Answer<v1::ReportFailureResponse> {
        self.access.coordinator().report_failure(request.into_inner()).await
    }

    async fn leave(&self, request: Request<v1::LeaveRequest>) -> Answer<v1::LeaveResponse> {
        self.access.coordinator().leave(request.into_inner()).await
    }

    async fn join_node(&self, _: Request<v1::JoinNodeRequest>) -> Answer<v1::JoinNodeResponse> {
        Err(not_here())
    }

    async fn follow_node(&self, _: Request<v1::FollowNodeRequest>) -> Answer<Self::FollowNodeStream> {
        Err(not_here())
    }

    async fn speak_for_node(&self, _: Request<Streaming<v1::NodeNews>>) -> Answer<Self::SpeakForNodeStream> {
        Err(not_here())
    }

    async fn report_exit(&self, _: Request<v1::ReportExitRequest>) -> Answer<v1::ReportExitResponse> {
        Err(not_here())
    }
}

/// A worker's line, as far as its launcher. The coordinator hears when it is closed.
pub(super) struct LocalLine {
    told: mpsc::Receiver<v1::Directive>,
    number: u64,
    say: mpsc::Sender<Message>,
}

impl Stream for LocalLine {
    type Item = Result<v1::Directive, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.told.poll_recv(context).map(|told| told.map(Ok))
    }
}

impl Drop for LocalLine {
    fn drop(&mut self) {
        if let Err(mpsc::error::TrySendError::Full(closed)) = self.say.try_send(Message::Closed(self.number))
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let say = self.say.clone();
            runtime.spawn(async move { drop(say.send(closed).await) });
        }
    }
}
