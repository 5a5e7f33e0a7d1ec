//! A launcher that speaks for its workers (`cox run --one-stream`): they call it, on this machine's loopback,
//! as if it were the coordinator, and it has one stream to the coordinator for all of them.
//!
//! ```text
//! worker ─┐ Follow, Heartbeat, ReportSteps, ..  ┌──────── launcher ────────┐   NodeNews ─▶
//! worker ─┼────────────────────────────────────▶│ desk ─▶ conversation     │──────────────── coordinator
//! worker ─┘     rare calls, as they are         └──────────────────────────┘   ◀─ NodeTold
//! ```
//!
//! It remembers nothing that a coordinator would have to know: when the stream breaks, the workers' lines
//! break with it, and each worker opens its line again and says what may have been forgotten, as it does
//! after any lost connection. A worker's connection that closes is told at once.
//!
//! What it does not do: decide anything. It answers heartbeats by itself, since the coordinator takes
//! silence, and not an answer, for the sign of a fault: what a worker has said is passed on with its age.

mod conversation;
mod desk;

use std::{io, sync::Arc};

use coxswain_identity::{Address, Credentials, Scope, Tokens};
use coxswain_proto::{
    limits::{INBOX_QUEUE, MAX_MESSAGE_BYTES},
    v1::{Respawn, coordinator_server::CoordinatorServer},
};
use tokio::{
    net::TcpListener,
    sync::{Mutex, mpsc},
    task::JoinHandle,
};
use tonic::{
    Request, Status,
    service::interceptor::InterceptedService,
    transport::{Server, server::TcpIncoming},
};

use self::{
    conversation::{Conversation, Message},
    desk::Desk,
};
use crate::control::Access;

/// The launcher's ear for its workers; closed when this is dropped.
#[derive(Debug)]
pub struct Relay {
    access: Access,
    address: Address,
    /// What workers have said and the coordinator has not heard.
    unsent: Mutex<mpsc::Receiver<Message>>,
    serving: JoinHandle<()>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Relay {
    /// Listens to workers that show a token of these credentials, on behalf of the coordinator of `access`.
    pub async fn start(access: Access, credentials: &Credentials) -> io::Result<Arc<Self>> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = Address::parse(&listener.local_addr()?.to_string());
        let (say, unsent) = mpsc::channel(INBOX_QUEUE);
        let service = CoordinatorServer::new(Desk::new(access.clone(), say))
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let tokens = credentials.tokens().cloned();
        let guarded = InterceptedService::new(service, move |request| admit(tokens.as_ref(), request));
        let server = Server::builder().add_service(guarded);
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let serving = tokio::spawn(async move {
            if let Err(error) = server.serve_with_incoming(incoming).await {
                tracing::warn!(%error, "this launcher can no longer be reached by its workers");
            }
        });
        Ok(Arc::new(Self { access, address, unsent: Mutex::new(unsent), serving }))
    }

    /// Where workers call.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Opens the stream of the node that has joined as `node_id`, and speaks for its workers until it
    /// breaks. What the launcher itself is told goes to `orders`.
    pub async fn speak(&self, node_id: &str, orders: mpsc::Sender<Respawn>) -> Result<(), Status> {
        // One stream at a time; nobody else waits for it.
        let mut unsent = self.unsent.lock().await;
        let conversation = Conversation::open(&self.access, node_id, orders).await?;
        conversation.hold(&mut unsent).await;
        Ok(())
    }
}

/// As the coordinator would do on this machine: a call that takes part in the run needs a worker's token.
fn admit(tokens: Option<&Tokens>, request: Request<()>) -> Result<Request<()>, Status> {
    let Some(tokens) = tokens else { return Ok(request) };
    let shown = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
    let presented = shown.and_then(|value| value.strip_prefix("Bearer "));
    match presented.and_then(|presented| tokens.scope_of(presented)) {
        Some(scope) if scope.grants(Scope::Worker) => Ok(request),
        Some(scope) => Err(Status::permission_denied(format!(
            "this token has the scope `{scope}`, but workers need `{}`",
            Scope::Worker
        ))),
        None => {
            Err(Status::unauthenticated("the token is not this run's; check COX_TOKEN or COX_TOKEN_FILE"))
        }
    }
}

#[cfg(test)]
mod tests;
