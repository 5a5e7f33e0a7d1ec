//! Why there is no server.

use std::{io, net::SocketAddr};

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The port cannot be had.
    #[error("listen on {address}: {source}; choose another one with --listen")]
    Port {
        /// What was asked for.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// No thread can be made.
    #[error("start a thread: {0}")]
    Thread(io::Error),
    /// The model does not answer an observation of its own making.
    #[error("the policy does not answer: {0}")]
    WarmUp(String),
}
