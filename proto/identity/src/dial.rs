//! A caller's side: connections that speak TLS where they leave the machine, and the token on every call.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use coxswain_proto::calls;
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioIo};
use tonic::{
    Request, Status,
    codegen::{Service, http::Uri},
    service::Interceptor,
    transport::{Channel, Endpoint},
};

use crate::{
    CertificateFiles, IdentityError, Scope, Stream, Tokens, Whereabouts, error::DialError, names::Names, tls,
};

/// What a process shows of itself, and by what it knows others.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    tokens: Option<Tokens>,
    certificates: CertificateFiles,
}

impl Credentials {
    /// These tokens and certificates.
    pub fn new(tokens: Option<Tokens>, certificates: CertificateFiles) -> Self {
        Self { tokens, certificates }
    }

    /// The tokens.
    pub fn tokens(&self) -> Option<&Tokens> {
        self.tokens.as_ref()
    }

    /// The files of certificates.
    pub fn certificates(&self) -> &CertificateFiles {
        &self.certificates
    }

    /// Whether the same token is shown for both, or none is: then one connection does for both.
    pub fn have_one_for(&self, one: Scope, other: Scope) -> bool {
        let shown = |scope| self.tokens.as_ref().and_then(|tokens| tokens.for_scope(scope));
        match (shown(one), shown(other)) {
            (Some(one), Some(other)) => one.is(other.secret()),
            (one, other) => one.is_none() && other.is_none(),
        }
    }

    /// Shows, on each call, a token that grants this.
    pub fn for_scope(&self, scope: Scope) -> ShowToken {
        ShowToken { tokens: self.tokens.clone(), scope }
    }
}

/// Puts `authorization: Bearer TOKEN` on every call; the token is the one that is valid then.
#[derive(Clone, Debug)]
pub struct ShowToken {
    tokens: Option<Tokens>,
    scope: Scope,
}

impl Interceptor for ShowToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = self.tokens.as_ref().and_then(|tokens| tokens.for_scope(self.scope)) {
            let shown = calls::bearer(token.secret());
            let shown = shown.map_err(|_| Status::invalid_argument("this token cannot be sent"))?;
            request.metadata_mut().insert("authorization", shown);
        }
        Ok(request)
    }
}

/// A channel to a coordinator that connects when it is first used, and again whenever the connection is gone.
/// `endpoint` says how; where, and whether through TLS, [`Whereabouts`] is asked for each connection. Calls
/// on it show a token for `scope`: by that token, and no lesser one, the coordinator is known. Certificates
/// are read here.
pub fn channel(
    endpoint: &Endpoint,
    whereabouts: &Whereabouts,
    credentials: &Credentials,
    scope: Scope,
) -> Result<Channel, IdentityError> {
    let mut tcp = HttpConnector::new_with_resolver(Names::of_the_system());
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    let tls = Arc::new(tls::Client::new(&credentials.certificates)?);
    let (whereabouts, tokens) = (whereabouts.clone(), credentials.tokens.clone());
    Ok(endpoint.connect_with_connector_lazy(Dialer { tcp, whereabouts, tokens, scope, tls }))
}

/// Why a call could not be made that will not do better a moment later: who is at the other end, or we
/// ourselves, cannot be trusted.
pub fn refusal(status: &Status) -> Option<String> {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if let Some(DialError::Identity(problem)) = error.downcast_ref() {
            return Some(problem.to_string());
        }
        source = error.source();
    }
    None
}

/// Makes a channel's connections.
struct Dialer {
    tcp: HttpConnector<Names>,
    whereabouts: Whereabouts,
    tokens: Option<Tokens>,
    scope: Scope,
    tls: Arc<tls::Client>,
}

impl Service<Uri> for Dialer {
    type Response = TokioIo<Stream>;
    type Error = DialError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, DialError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        self.tcp.poll_ready(context).map_err(|error| DialError::Network(error.into()))
    }

    /// The URI is that of the first connection; a coordinator may have moved since.
    fn call(&mut self, _: Uri) -> Self::Future {
        let (mut tcp, whereabouts) = (self.tcp.clone(), self.whereabouts.clone());
        let (tokens, scope, tls) = (self.tokens.clone(), self.scope, self.tls.clone());
        Box::pin(async move {
            // The directory may be a server's, which takes its time.
            let asked = tokio::task::spawn_blocking(move || whereabouts.now()).await;
            let address = asked.map_err(|error| DialError::Network(error.into()))?;
            let uri = format!("http://{}", address.host_port()).parse::<Uri>();
            let connecting = tcp.call(uri.map_err(|error| DialError::Network(error.into()))?);
            let tcp = connecting.await.map_err(|error| DialError::Network(error.into()))?.into_inner();
            let stream = match address.encrypts(tcp.peer_addr()?.ip()) {
                true => {
                    let shown = tokens.and_then(|tokens| tokens.for_scope(scope));
                    tls.connect(tcp, &address, shown.as_ref()).await?
                }
                false => Stream::Left(tcp),
            };
            Ok(TokioIo::new(stream))
        })
    }
}
