//! Why there is no server.

use std::{io, net::SocketAddr, path::PathBuf};

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The port cannot be had.
    #[error("cannot listen on {address}: {source}; choose another address with --listen")]
    Port {
        /// What was asked for.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// No thread can be made.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// A certificate or its key cannot be used.
    #[error("TLS {what} {}: {problem}", path.display())]
    Tls {
        /// Which of the two.
        what: &'static str,
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The program was built without TLS.
    #[error(
        "this cox was built without TLS: build it with `cargo build --release --features tls`, or listen \
         on 127.0.0.1 behind a proxy or a tunnel with TLS"
    )]
    WithoutTls,
    /// The model does not answer an observation of its own making.
    #[error("the policy does not answer: {0}")]
    WarmUp(String),
}

impl ServeError {
    #[cfg(feature = "tls")]
    pub(crate) fn tls(what: &'static str, path: &std::path::Path, problem: String) -> Self {
        Self::Tls { what, path: path.to_owned(), problem }
    }
}
