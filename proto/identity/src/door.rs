//! A coordinator's side: who has called, and how much of it others could read.
//!
//! A connection from this machine may be in clear. One from elsewhere goes through TLS, unless the door was
//! opened with `--plaintext`. What comes from elsewhere in clear all the same is marked so: it may ask
//! whether the coordinator is well, as the probes of schedulers do, and nothing else.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::net::TcpStream;

use crate::{Credentials, IdentityError, Scope, Stream, Tokens, address::is_here, tls};

/// How long a caller may take to say its first byte, and then for TLS's handshake.
const PATIENCE: Duration = Duration::from_secs(10);
/// The first byte of TLS's handshake.
const HANDSHAKE: u8 = 0x16;

/// What callers come through. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Door {
    tokens: Option<Tokens>,
    tls: Option<Arc<tls::Server>>,
    plaintext: bool,
}

/// Who has called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// From where.
    pub address: Option<SocketAddr>,
    /// Whether nobody but us can read what it sends, or that was asked for.
    pub is_private: bool,
    /// What its certificate grants.
    pub granted: Vec<Scope>,
}

impl Door {
    /// One that lets in who shows one of these tokens, or a certificate that they name. With `plaintext`
    /// nothing is encrypted.
    pub fn new(credentials: &Credentials, plaintext: bool) -> Result<Self, IdentityError> {
        let tokens = credentials.tokens().cloned();
        let tls = match &tokens {
            Some(tokens) if tls::IS_HERE && !plaintext => {
                Some(Arc::new(tls::Server::new(credentials.certificates(), tokens)?))
            }
            _ if credentials.certificates().are_given() && !plaintext => {
                return Err(IdentityError::CertificateWithoutTls);
            }
            _ => None,
        };
        Ok(Self { tokens, tls, plaintext })
    }

    /// The tokens; nobody is asked for one where there are none.
    pub fn tokens(&self) -> Option<&Tokens> {
        self.tokens.as_ref()
    }

    /// Whether it may be open at this address; if not, what to do.
    pub fn check(&self, address: SocketAddr) -> Result<(), &'static str> {
        if is_here(address.ip()) {
            return Ok(());
        }
        if self.tokens.is_none() {
            return Err("set COX_TOKEN or COX_TOKEN_FILE (see `cox token`), or listen on 127.0.0.1");
        }
        if self.tls.is_none() && !self.plaintext {
            return Err(
                "this build of cox has no TLS: build it with `--features tls`, or give --plaintext if the \
                 network is trusted",
            );
        }
        Ok(())
    }

    /// Whether a connection has to be waited for before it can be served.
    pub fn takes_time(&self) -> bool {
        self.tls.is_some()
    }

    /// Finds out who has called. Ends within a bounded time.
    pub async fn greet(&self, tcp: TcpStream) -> io::Result<(Stream, Caller)> {
        let address = tcp.peer_addr().ok();
        let from_here = address.is_some_and(|address| is_here(address.ip()));
        if let Some(tls) = &self.tls {
            let mut first = [0];
            bounded(tcp.peek(&mut first)).await?;
            if first == [HANDSHAKE] {
                let (stream, granted) = bounded(tls.accept(tcp)).await?;
                return Ok((stream, Caller { address, is_private: true, granted }));
            }
        }
        let is_private = from_here || self.tls.is_none();
        Ok((Stream::Left(tcp), Caller { address, is_private, granted: Vec::new() }))
    }
}

async fn bounded<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "it did not identify itself in time");
    tokio::time::timeout(PATIENCE, work).await.map_err(late)?
}
