//! `coxswain.v1.Coordinator`: what workers and launchers ask.

use std::pin::Pin;

use coxswain_proto::{
    ids::WorkerId,
    limits::HEARTBEAT_INTERVAL,
    v1::{self, coordinator_server::Coordinator},
};
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use super::{
    decode, encode,
    fields::name,
    node,
    shared::{Service, mismatch},
};
use crate::{
    clock,
    core::{action::Reply, event::Ask},
};

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Coordinator for Service {
    async fn join_node(&self, request: Request<v1::JoinNodeRequest>) -> Answer<v1::JoinNodeResponse> {
        let mut request = request.into_inner();
        let spec = request.spec.take();
        let ask = Ask::try_from(request)?;
        if let (Ask::JoinNode(claim), Some(theirs)) = (&ask, &spec) {
            self.must_be_ours(theirs, &claim.host)?;
        }
        match self.handle.ask(ask).await? {
            Reply::Placed { node_rank, first } => Ok(Response::new(v1::JoinNodeResponse {
                node_rank,
                first_rank: first.0,
                world_size: self.facts.world,
                run_id: self.facts.run_id.clone(),
                claim: self.facts.claim.unwrap_or(0),
            })),
            other => Err(mismatch(&other)),
        }
    }

    async fn get_run(&self, request: Request<v1::GetRunRequest>) -> Answer<v1::GetRunResponse> {
        let v1::GetRunRequest { version, run_id } = request.into_inner();
        match self.handle.ask(Ask::GetRun(decode::origin(version, run_id)?)).await? {
            Reply::Welcome => Ok(Response::new(v1::GetRunResponse {
                run_id: self.facts.run_id.clone(),
                spec: Some(self.facts.document.clone()),
                world_size: self.facts.world,
            })),
            other => Err(mismatch(&other)),
        }
    }

    async fn register(&self, request: Request<v1::RegisterRequest>) -> Answer<v1::RegisterResponse> {
        match self.handle.ask(request.into_inner().try_into()?).await? {
            Reply::Registered(id) => Ok(Response::new(v1::RegisterResponse {
                worker_id: id.0,
                heartbeat_interval_ms: HEARTBEAT_INTERVAL.as_millis() as u32,
                unix_ms: clock::unix_ms(),
            })),
            other => Err(mismatch(&other)),
        }
    }

    type FollowStream = Pin<Box<dyn Stream<Item = Result<v1::Directive, Status>> + Send>>;

    async fn follow(&self, request: Request<v1::FollowRequest>) -> Answer<Self::FollowStream> {
        let v1::FollowRequest { worker_id, incarnation } = request.into_inner();
        let incarnation = name("incarnation", incarnation)?;
        let line = self.handle.follow(WorkerId(worker_id), incarnation).await?;
        Ok(Response::new(Box::pin(line.map(|directive| Ok(encode::directive(directive))))))
    }

    type FollowNodeStream = Pin<Box<dyn Stream<Item = Result<v1::NodeDirective, Status>> + Send>>;

    async fn follow_node(&self, request: Request<v1::FollowNodeRequest>) -> Answer<Self::FollowNodeStream> {
        let node_id = name("node_id", request.into_inner().node_id)?;
        let line = self.handle.follow_node(node_id).await?;
        Ok(Response::new(Box::pin(line.map(|respawn| Ok(encode::node_directive(respawn))))))
    }

    type SpeakForNodeStream = Pin<Box<dyn Stream<Item = Result<v1::NodeTold, Status>> + Send>>;

    async fn speak_for_node(
        &self,
        request: Request<Streaming<v1::NodeNews>>,
    ) -> Answer<Self::SpeakForNodeStream> {
        let told = node::listen(self.handle.clone(), request.into_inner()).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(told))))
    }

    async fn ready(&self, request: Request<v1::ReadyRequest>) -> Answer<v1::ReadyResponse> {
        self.handle.ask(request.into_inner().try_into()?).await?;
        Ok(Response::new(v1::ReadyResponse {}))
    }

    async fn report_start(
        &self,
        request: Request<v1::ReportStartRequest>,
    ) -> Answer<v1::ReportStartResponse> {
        self.handle.ask(request.into_inner().try_into()?).await?;
        Ok(Response::new(v1::ReportStartResponse {}))
    }

    async fn heartbeat(&self, request: Request<v1::HeartbeatRequest>) -> Answer<v1::HeartbeatResponse> {
        match self.handle.ask(request.into_inner().try_into()?).await? {
            Reply::Known(known) => Ok(Response::new(v1::HeartbeatResponse { known })),
            other => Err(mismatch(&other)),
        }
    }

    async fn report_steps(
        &self,
        request: Request<v1::ReportStepsRequest>,
    ) -> Answer<v1::ReportStepsResponse> {
        match self.handle.ask(request.into_inner().try_into()?).await? {
            Reply::Committed(step) => Ok(Response::new(v1::ReportStepsResponse { committed_steps: step.0 })),
            other => Err(mismatch(&other)),
        }
    }

    async fn report_memory(
        &self,
        request: Request<v1::ReportMemoryRequest>,
    ) -> Answer<v1::ReportMemoryResponse> {
        self.handle.ask(request.into_inner().try_into()?).await?;
        Ok(Response::new(v1::ReportMemoryResponse {}))
    }

    async fn report_checkpoint(
        &self,
        request: Request<v1::ReportCheckpointRequest>,
    ) -> Answer<v1::ReportCheckpointResponse> {
        self.handle.ask(request.into_inner().try_into()?).await?;
        Ok(Response::new(v1::ReportCheckpointResponse {}))
    }

    async fn report_cache(
        &self,
        request: Request<v1::ReportCacheRequest>,
    ) -> Answer<v1::ReportCacheResponse> {
        self.handle.ask(request.into_inner().try_into()?).await?;
        Ok(Response::new(v1::ReportCacheResponse {}))
    }

    async fn report_note(&self, request: Request<v1::ReportNoteRequest>) -> Answer<v1::ReportNoteResponse> {
        self.handle.ask(request.into_inner().into()).await?;
        Ok(Response::new(v1::ReportNoteResponse {}))
    }

    async fn report_failure(
        &self,
        request: Request<v1::ReportFailureRequest>,
    ) -> Answer<v1::ReportFailureResponse> {
        self.handle.ask(request.into_inner().try_into()?).await?;
        Ok(Response::new(v1::ReportFailureResponse {}))
    }

    async fn leave(&self, request: Request<v1::LeaveRequest>) -> Answer<v1::LeaveResponse> {
        self.handle.ask(request.into_inner().into()).await?;
        Ok(Response::new(v1::LeaveResponse {}))
    }

    async fn report_exit(&self, request: Request<v1::ReportExitRequest>) -> Answer<v1::ReportExitResponse> {
        self.handle.ask(request.into_inner().try_into()?).await?;
        Ok(Response::new(v1::ReportExitResponse {}))
    }
}
