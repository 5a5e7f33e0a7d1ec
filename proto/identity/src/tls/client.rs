//! What a caller accepts: the key of its token, or what `COX_TLS_CA` has issued.

use std::{fmt, io, sync::Arc};

use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, Error, OtherError,
    RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime},
    server::ParsedCertificate,
    version::TLS13,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{
    derived,
    files::{self, OwnCertificate},
};
use crate::{Address, CertificateFiles, IdentityError, Stream, Token, error::DialError};

/// TLS of a caller.
pub(crate) struct Client {
    provider: Arc<CryptoProvider>,
    roots: Option<Arc<RootCertStore>>,
    own: Option<OwnCertificate>,
}

impl Client {
    /// Reads the certificates.
    pub(crate) fn new(certificates: &CertificateFiles) -> Result<Self, IdentityError> {
        let roots = files::roots(certificates)?.map(Arc::new);
        let provider = Arc::new(ring::default_provider());
        let client = Self { provider, roots, own: files::own(certificates)? };
        if let (Some(own), Some(path)) = (&client.own, &certificates.key) {
            let key = rustls::sign::CertifiedKey::from_der(
                own.chain.clone(),
                own.key.clone_key(),
                &client.provider,
            );
            key.map_err(|error| files::wrong("COX_TLS_KEY", path, error))?;
        }
        Ok(client)
    }

    /// Speaks TLS with who answers at `address`, if that is who it should be: without certificates, who has
    /// the token that is about to be `shown`.
    pub(crate) async fn connect(
        &self,
        tcp: TcpStream,
        address: &Address,
        shown: Option<&Token>,
    ) -> Result<Stream, DialError> {
        let place = address.host_port();
        let (verifier, name) = self.expected(address, shown)?;
        let refused = |error: Error| handshake(place, error);
        let config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])
            .expect("ring has TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let mut config = match &self.own {
            None => config.with_no_client_auth(),
            Some(own) => {
                config.with_client_auth_cert(own.chain.clone(), own.key.clone_key()).map_err(refused)?
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let connected = TlsConnector::from(Arc::new(config)).connect(name, tcp).await;
        connected.map(|stream| Stream::Right(Box::new(stream))).map_err(|error| explained(place, error))
    }

    /// What decides whether the server is the right one, and the name to ask for.
    fn expected(
        &self,
        address: &Address,
        shown: Option<&Token>,
    ) -> Result<(Arc<dyn ServerCertVerifier>, ServerName<'static>), IdentityError> {
        let place = || address.host_port().to_owned();
        if let Some(roots) = &self.roots {
            let verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), self.provider.clone());
            let verifier = verifier
                .build()
                .map_err(|error| IdentityError::Handshake { address: place(), problem: error.to_string() })?;
            let name = ServerName::try_from(address.host().to_owned())
                .map_err(|error| IdentityError::Handshake { address: place(), problem: error.to_string() })?;
            return Ok((verifier, name));
        }
        let token = shown.ok_or_else(|| IdentityError::NothingToTrust(place()))?;
        let key = derived::public_key(token).ok_or_else(|| IdentityError::OtherKey(place()))?;
        let name = ServerName::try_from(derived::server_name(token)).expect("digits and dots are a name");
        Ok((Arc::new(PinnedKeyVerifier { key, provider: self.provider.clone() }), name))
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

/// What an error of the handshake means; one of the connection may pass.
fn explained(place: &str, error: io::Error) -> DialError {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(problem) => handshake(place, problem.clone()).into(),
        None => error.into(),
    }
}

fn handshake(place: &str, error: Error) -> IdentityError {
    let place = place.to_owned();
    match error {
        Error::InvalidMessage(_) => IdentityError::InClear(place),
        Error::AlertReceived(AlertDescription::AccessDenied) => IdentityError::UnknownToken(place),
        Error::InvalidCertificate(CertificateError::Other(_)) => IdentityError::OtherKey(place),
        Error::InvalidCertificate(problem) => {
            let problem = match &problem {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                    "not issued by COX_TLS_CA; check COX_TLS_CA here and the server's COX_TLS_CERT".to_owned()
                }
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                    format!("{problem}; renew the certificate, or correct the clocks")
                }
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    format!("{problem}; correct the clocks")
                }
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                    format!("{problem}; connect to a name in the certificate, or issue one for this name")
                }
                other => other.to_string(),
            };
            IdentityError::NotAccepted { address: place, problem }
        }
        other => IdentityError::Handshake { address: place, problem: other.to_string() },
    }
}

/// Accepts one key, and no authority's word for another.
#[derive(Debug)]
struct PinnedKeyVerifier {
    key: SubjectPublicKeyInfoDer<'static>,
    provider: Arc<CryptoProvider>,
}

/// The server has another key.
#[derive(Debug, thiserror::Error)]
#[error("its key does not match our token")]
struct AnotherKey;

impl ServerCertVerifier for PinnedKeyVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // Its signature over this handshake shows that it has the private key, too.
        match ParsedCertificate::try_from(end_entity)?.subject_public_key_info() == self.key {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(CertificateError::Other(OtherError(Arc::new(AnotherKey))).into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("only TLS 1.3 is supported".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
