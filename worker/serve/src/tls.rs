//! TLS 1.3 before the first byte of HTTP, with a certificate of one's own.
//!
//! The handshake is made here as a whole, so that it has one deadline: a client that sends it byte by byte
//! holds its thread no longer than one that sends nothing.
//!
//! What this file does not do: certificates of clients. Who may come in is the token's to say.

use std::{
    fs,
    io::{self, Read, Write},
    path::Path,
    sync::Arc,
    time::Duration,
};

use rustls::{
    Error, ServerConfig, ServerConnection, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    version::TLS13,
};

use crate::{clock::Stopwatch, error::ServeError};

/// A certificate and its key.
#[derive(Clone, Debug)]
pub struct Tls(Arc<ServerConfig>);

/// A client's stream, in clear.
pub type ClearStream<S> = StreamOwned<ServerConnection, S>;

impl Tls {
    /// Reads a certificate, behind which those may follow that lead to its issuer's, and its key; both PEM.
    pub fn load(cert: &Path, key: &Path) -> Result<Self, ServeError> {
        let of_cert = |problem: String| ServeError::tls("certificate", cert, problem);
        let of_key = |problem: String| ServeError::tls("key", key, problem);
        let text = fs::read(cert).map_err(|error| of_cert(error.to_string()))?;
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&text)
            .collect::<Result<_, _>>()
            .map_err(|error| of_cert(format!("not PEM: {error}")))?;
        if chain.is_empty() {
            let found = "no certificate in it; expected PEM that begins with -----BEGIN CERTIFICATE-----";
            return Err(of_cert(found.into()));
        }
        let text = fs::read(key).map_err(|error| of_key(error.to_string()))?;
        let private = PrivateKeyDer::from_pem_slice(&text).map_err(|_| of_key(no_key(&text).into()))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .expect("ring has TLS 1.3")
            .with_no_client_auth()
            .with_single_cert(chain, private);
        let mut config = config.map_err(|error| match error {
            Error::InconsistentKeys(_) => of_key(format!("not the key of {}", cert.display())),
            Error::InvalidCertificate(why) => {
                of_cert(format!("the first certificate in it is invalid: {why}"))
            }
            other => of_key(other.to_string()),
        })?;
        // A client connects once and stays: nothing is kept for its next time.
        config.send_tls13_tickets = 0;
        Ok(Self(Arc::new(config)))
    }

    /// Agrees with a client on how to go on, within `patience` and the stream's own bound on a read.
    pub(crate) fn accept<S: Read + Write>(
        &self,
        mut stream: S,
        patience: Duration,
    ) -> io::Result<ClearStream<S>> {
        let mut connection = ServerConnection::new(self.0.clone()).map_err(io::Error::other)?;
        let stopwatch = Stopwatch::start();
        while connection.is_handshaking() || connection.wants_write() {
            if stopwatch.elapsed() > patience {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "it did not finish the TLS handshake"));
            }
            if connection.wants_write() {
                connection.write_tls(&mut stream)?;
            } else if connection.read_tls(&mut stream)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            } else if let Err(problem) = connection.process_new_packets() {
                // The client is told as well as may be.
                let _ = connection.write_tls(&mut stream);
                return Err(io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {problem}")));
            }
        }
        Ok(StreamOwned::new(connection, stream))
    }
}

/// Tells a client that nothing follows.
pub(crate) fn close<S: Read + Write>(stream: &mut ClearStream<S>) {
    stream.conn.send_close_notify();
    // It may have gone.
    let _ = stream.flush();
}

/// What is there instead of a key.
fn no_key(text: &[u8]) -> &'static str {
    let text = String::from_utf8_lossy(text);
    match text.contains("ENCRYPTED") {
        true => "the key is encrypted; write it without a passphrase: openssl pkey -in FILE -out PLAIN",
        false => "no key in it; expected PEM that begins with -----BEGIN PRIVATE KEY-----",
    }
}
