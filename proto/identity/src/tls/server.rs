//! What a coordinator shows, and what a caller's certificate grants.

use std::{fmt, io, sync::Arc};

use rustls::{
    Error, ServerConfig,
    client::verify_server_name,
    crypto::ring,
    pki_types::{CertificateDer, ServerName},
    server::{ClientHello, NoClientAuth, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier},
    sign::CertifiedKey,
    version::TLS13,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use super::{derived, files};
use crate::{CertificateFiles, IdentityError, Scope, Stream, Tokens};

/// TLS of a coordinator.
pub(crate) struct Server {
    acceptor: TlsAcceptor,
    tokens: Tokens,
}

impl Server {
    /// Shows the certificate of its own, if there is one, and those that follow from its tokens.
    pub(crate) fn new(certificates: &CertificateFiles, tokens: &Tokens) -> Result<Self, IdentityError> {
        let provider = Arc::new(ring::default_provider());
        let own = match (files::own(certificates)?, &certificates.key) {
            (Some(own), Some(path)) => {
                let key = CertifiedKey::from_der(own.chain, own.key, &provider);
                Some(Arc::new(key.map_err(|error| files::wrong("COX_TLS_KEY", path, error))?))
            }
            _ => None,
        };
        let clients = match (files::roots(certificates)?, &certificates.ca) {
            (Some(roots), Some(path)) => {
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
                    .allow_unauthenticated()
                    .build()
                    .map_err(|error| files::wrong("COX_TLS_CA", path, error))?
            }
            _ => Arc::new(NoClientAuth),
        };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .expect("ring has TLS 1.3")
            .with_client_cert_verifier(clients)
            .with_cert_resolver(Arc::new(ServerCertificates { own, tokens: tokens.clone() }));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // Callers connect once and stay: nothing is kept for their next time.
        config.send_tls13_tickets = 0;
        Ok(Self { acceptor: Arc::new(config).into(), tokens: tokens.clone() })
    }

    /// Agrees with a caller on how to go on; what its certificate grants.
    pub(crate) async fn accept(&self, tcp: TcpStream) -> io::Result<(Stream, Vec<Scope>)> {
        let stream = self.acceptor.accept(tcp).await.map_err(explained)?;
        let certificates = stream.get_ref().1.peer_certificates();
        let granted = certificates.and_then(<[_]>::first).map(|first| self.granted(first));
        Ok((Stream::Right(Box::new(stream)), granted.unwrap_or_default()))
    }

    /// What the names of a certificate grant that COX_TLS_CA has issued.
    fn granted(&self, certificate: &CertificateDer<'_>) -> Vec<Scope> {
        let Ok(certificate) = ParsedCertificate::try_from(certificate) else { return Vec::new() };
        let is_of = |name: &str| {
            ServerName::try_from(name).is_ok_and(|name| verify_server_name(&certificate, &name).is_ok())
        };
        self.tokens.names().into_iter().filter(|(name, _)| is_of(name)).map(|(_, scope)| scope).collect()
    }
}

/// An error of the handshake, as the coordinator's log has it.
fn explained(error: io::Error) -> io::Error {
    let of_tls = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    // Where there is no certificate to show, for the one reason that the resolver below has.
    let is_unknown = matches!(of_tls, Some(Error::General(_)));
    if is_unknown { io::Error::other("it uses a token that is not valid here") } else { error }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

/// What a coordinator shows: who asks for a token's key gets that, anybody else its own certificate, or where
/// there is none, that of some token.
struct ServerCertificates {
    own: Option<Arc<CertifiedKey>>,
    tokens: Tokens,
}

impl ResolvesServerCert for ServerCertificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        match hello.server_name().and_then(derived::asked_for) {
            Some(name) => derived::certified(&self.tokens.named(name, Scope::Read)?),
            None => self.own.clone().or_else(|| derived::certified(&self.tokens.for_scope(Scope::Read)?)),
        }
    }
}

impl fmt::Debug for ServerCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shown").finish_non_exhaustive()
    }
}
