//! `coxswain.v1.Control`: what people and their tools ask.

use std::{pin::Pin, sync::Arc};

use coxswain_identity::Scope;
use coxswain_proto::{
    ids::Step,
    limits::{MAX_ERROR_TEXT, MAX_LEDGER_PAGE, MAX_LEDGER_RANKS},
    v1::{self, control_server::Control, watch_event::Kind},
};
use tokio_stream::{
    Stream, StreamExt,
    wrappers::{BroadcastStream, errors::BroadcastStreamRecvError},
};
use tonic::{Request, Response, Status};

use super::{
    auth::Grant,
    encode,
    fields::{cut, name},
    records,
    shared::{Service, mismatch},
};
use crate::{
    clock,
    core::{
        action::Reply,
        event::{Ask, NodeName},
    },
};

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Control for Service {
    async fn get_status(&self, _: Request<v1::GetStatusRequest>) -> Answer<v1::GetStatusResponse> {
        Ok(Response::new(self.status().await?))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WatchEvent, Status>> + Send>>;

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Answer<Self::WatchStream> {
        // Subscribed before the status is taken: an event may be told twice, never missed.
        let news = BroadcastStream::new(self.handle.subscribe()?);
        let first = event(Kind::Status(self.status().await?));
        let rest = news.filter_map(|news| match news {
            Ok(dated) => encode::watch_event(&dated).map(Ok),
            Err(BroadcastStreamRecvError::Lagged(missed)) => Some(Ok(event(Kind::Missed(missed)))),
        });
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(first)).chain(rest))))
    }

    async fn pause(&self, _: Request<v1::PauseRequest>) -> Answer<v1::PauseResponse> {
        Ok(Response::new(v1::PauseResponse { phase: self.phase_after(Ask::Pause).await? }))
    }

    async fn resume(&self, _: Request<v1::ResumeRequest>) -> Answer<v1::ResumeResponse> {
        Ok(Response::new(v1::ResumeResponse { phase: self.phase_after(Ask::Resume).await? }))
    }

    async fn checkpoint(&self, _: Request<v1::CheckpointRequest>) -> Answer<v1::CheckpointResponse> {
        self.handle.ask(Ask::CheckpointNow).await?;
        // Which boundary it will be is agreed by the ranks in their next vote.
        Ok(Response::new(v1::CheckpointResponse {}))
    }

    async fn rebuild_cache(&self, _: Request<v1::RebuildCacheRequest>) -> Answer<v1::RebuildCacheResponse> {
        match self.handle.ask(Ask::RebuildCache).await? {
            Reply::Rebuild(decided) => Ok(Response::new(v1::RebuildCacheResponse {
                generation: decided.generation.number,
                from_step: decided.first.0,
            })),
            other => Err(mismatch(&other)),
        }
    }

    async fn stop_run(&self, request: Request<v1::StopRunRequest>) -> Answer<v1::StopRunResponse> {
        let reason = cut(request.into_inner().reason, MAX_ERROR_TEXT);
        Ok(Response::new(v1::StopRunResponse { phase: self.phase_after(Ask::Stop { reason }).await? }))
    }

    async fn drain_node(&self, request: Request<v1::DrainNodeRequest>) -> Answer<v1::DrainNodeResponse> {
        use v1::drain_node_request::Node;
        let v1::DrainNodeRequest { node, reason } = request.into_inner();
        let node = match node {
            Some(Node::NodeRank(place)) => NodeName::Place(place),
            Some(Node::NodeId(node_id)) => NodeName::Launcher(name("node_id", node_id)?),
            None => return Err(Status::invalid_argument("node: give its rank or its id")),
        };
        let reason = cut(reason, MAX_ERROR_TEXT);
        match self.handle.ask(Ask::Drain { node, reason }).await? {
            Reply::Drained(node_rank) => Ok(Response::new(v1::DrainNodeResponse { node_rank })),
            other => Err(mismatch(&other)),
        }
    }

    async fn get_memory(&self, request: Request<v1::GetMemoryRequest>) -> Answer<v1::GetMemoryResponse> {
        let v1::GetMemoryRequest { refresh, reset } = *request.get_ref();
        if let Some(grant) = request.extensions().get::<Grant>().filter(|_| reset) {
            grant.require(Scope::Control, "GetMemory with `reset`")?;
        }
        let table = match refresh || reset {
            false => self.handle.memory().await?,
            true => match self.handle.ask(Ask::RefreshMemory { reset }).await? {
                Reply::Memory(table) => table,
                other => return Err(mismatch(&other)),
            },
        };
        Ok(Response::new(encode::memory(&table)))
    }

    async fn get_ledger(&self, request: Request<v1::GetLedgerRequest>) -> Answer<v1::GetLedgerResponse> {
        let v1::GetLedgerRequest { first_step, limit } = request.into_inner();
        let most = page_of(self.facts.world);
        let limit = match limit as usize {
            0 => most,
            limit => limit.min(most),
        };
        // One more than asked for tells whether there is a next page.
        let mut entries = self.handle.ledger(Step(first_step), limit + 1).await?;
        let next = (entries.len() > limit).then(|| entries[limit].step.0);
        entries.truncate(limit);
        Ok(Response::new(records::ledger(&entries, next)))
    }

    type GetHistoryStream = Pin<Box<dyn Stream<Item = Result<v1::GetHistoryResponse, Status>> + Send>>;

    async fn get_history(&self, _: Request<v1::GetHistoryRequest>) -> Answer<Self::GetHistoryStream> {
        let entries = records::history(&self.handle.history().await?);
        Ok(Response::new(Box::pin(tokio_stream::iter(entries.into_iter().map(Ok)))))
    }
}

impl Service {
    async fn status(&self) -> Result<v1::GetStatusResponse, Status> {
        let status = self.handle.status().await?;
        Ok(encode::status(Arc::unwrap_or_clone(status), &self.facts))
    }

    async fn phase_after(&self, ask: Ask) -> Result<i32, Status> {
        match self.handle.ask(ask).await? {
            Reply::Phase(phase) => Ok(encode::run_phase(phase).into()),
            other => Err(mismatch(&other)),
        }
    }
}

/// Steps in a page of the ledger: each has a line for every rank.
fn page_of(world: u32) -> usize {
    (MAX_LEDGER_RANKS / world.max(1) as usize).clamp(1, MAX_LEDGER_PAGE)
}

fn event(kind: Kind) -> v1::WatchEvent {
    v1::WatchEvent { unix_ms: clock::unix_ms(), kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_the_ledger_fits_a_message_in_any_world() {
        assert_eq!((page_of(1), page_of(250), page_of(10_000)), (1_000, 1_000, 25));
    }
}
