//! The coordinator: membership, leases, ledgers and control of one run, over gRPC. It never links burn and reads no data.

#![forbid(unsafe_code)]

mod options;

use std::future::Future;

pub use options::{CauseKind, FirstCause, Options, Outcome, Patience, World};
use tokio::net::TcpListener;

/// Why a coordinator did not serve, or stopped serving.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Reachable from elsewhere, and open to everyone.
    #[error(
        "{address} is reachable from other machines: give a token (--token or COX_TOKEN), or listen on 127.0.0.1"
    )]
    Unprotected {
        /// Where it listens.
        address: std::net::SocketAddr,
    },
    /// The listener or the transport.
    #[error("cannot serve: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// The listener.
    #[error("cannot read the listener's address: {0}")]
    Listener(#[from] std::io::Error),
}

/// Serves one run on `listener` until it is over and every worker has left, or until `shutdown` completes.
pub async fn serve(
    listener: TcpListener,
    options: Options,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<Outcome, ServeError> {
    let address = listener.local_addr()?;
    if options.token.is_none() && !address.ip().is_loopback() {
        return Err(ServeError::Unprotected { address });
    }
    let (_health, health) = tonic_health::server::health_reporter();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tonic::transport::Server::builder()
        .add_service(health)
        .serve_with_incoming_shutdown(incoming, shutdown)
        .await?;
    Ok(Outcome::ShutDown { steps: coxswain_proto::ids::Step(0) })
}
