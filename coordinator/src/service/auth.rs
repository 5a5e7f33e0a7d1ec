//! Who may ask what: each call wants a scope, which its token or its connection's certificate grants.
//!
//! | scope | what it opens |
//! |---|---|
//! | `read` | what looks and changes nothing: status, ledger, history, memory, `/metrics`, reflection |
//! | `control` | the rest of the service for people: pause, checkpoint, drain, stop |
//! | `worker` | the service for launchers and workers |
//!
//! What looks is bounded in number and time besides: see [`readers`](super::readers).
//!
//! Health's `Check` is open to everybody, through whatever connection: probes of schedulers know no token.

use std::{
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use axum::{
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use coxswain_identity::{Caller, Scope, Tokens};
use tonic::Status;

use super::{
    metrics::METRICS,
    readers::{ReadCaller, ReadKind, Readers},
};
use crate::{pace::Peer, standing::Standing};

/// What needs no token.
const OPEN: &str = "/grpc.health.v1.Health/Check";
/// Beginning of the paths of reflection, in every version.
const REFLECTION: &str = "/grpc.reflection.";
/// The service of launchers and workers.
const WORKERS: &str = "/coxswain.v1.Coordinator/";
/// The service of people, and what in it changes nothing; but for `GetMemory` with `reset`, which asks for
/// itself what its caller may.
const PEOPLE: &str = "/coxswain.v1.Control/";
const LOOKS: [(&str, ReadKind); 5] = [
    ("GetStatus", ReadKind::Look),
    ("GetMemory", ReadKind::Look),
    ("GetLedger", ReadKind::Records),
    ("GetHistory", ReadKind::Records),
    ("Watch", ReadKind::Watch),
];

/// Lets calls through that may be made; all of them where there are no tokens.
#[derive(Clone)]
pub struct Guard {
    tokens: Option<Tokens>,
    readers: Readers,
    /// Names callers, for as long as the process lives.
    names: RandomState,
}

/// What a caller may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    scopes: Vec<Scope>,
}

impl Grant {
    /// The standing of a connection on which this grant was shown.
    fn standing(&self) -> Standing {
        let may = |wanted| self.scopes.iter().any(|scope| scope.grants(wanted));
        match may(Scope::Worker) || may(Scope::Control) {
            true => Standing::Member,
            false => Standing::Reader,
        }
    }

    /// Whether it grants `wanted`; if not, what to do.
    pub fn require(&self, wanted: Scope, call: &str) -> Result<(), Status> {
        match &self.scopes[..] {
            scopes if scopes.iter().any(|scope| scope.grants(wanted)) => Ok(()),
            scopes => {
                let has: Vec<_> = scopes.iter().map(|scope| format!("`{scope}`")).collect();
                let has = has.join(" and ");
                Err(Status::permission_denied(format!(
                    "this token has the scope {has}, but {call} requires `{wanted}`"
                )))
            }
        }
    }
}

/// What a call shows.
#[derive(Clone, Copy, Debug)]
struct CallCredentials<'a> {
    path: &'a str,
    authorization: Option<&'a str>,
    caller: Option<&'a Caller>,
}

impl Guard {
    /// A guard that knows these tokens.
    pub fn new(tokens: Option<Tokens>, readers: Readers) -> Self {
        Self { tokens, readers, names: RandomState::new() }
    }

    /// What a caller may do who may make this call; if it may not, what to do.
    fn admit(&self, shown: CallCredentials<'_>) -> Result<Grant, Status> {
        let Some(tokens) = self.tokens.as_ref().filter(|_| shown.path != OPEN) else {
            return Ok(Grant { scopes: vec![Scope::All] });
        };
        if shown.caller.is_some_and(|caller| !caller.is_private) {
            return Err(Status::unauthenticated(
                "this coordinator requires TLS from other machines, but this call was unencrypted: use a \
                 cox built with `--features tls`, without --plaintext or http://; replace any token \
                 that was sent, because it may have been read",
            ));
        }
        let wanted = wanted(shown.path);
        let of_certificate = shown.caller.map(|caller| caller.granted.as_slice()).unwrap_or_default();
        if of_certificate.iter().any(|scope| scope.grants(wanted)) {
            return Ok(Grant { scopes: of_certificate.to_vec() });
        }
        let presented = shown.authorization.and_then(|value| value.strip_prefix("Bearer "));
        match presented.map(|presented| tokens.scope_of(presented)) {
            Some(Some(scope)) => {
                let grant = Grant { scopes: vec![scope] };
                grant.require(wanted, shown.path.rsplit('/').next().unwrap_or_default()).map(|()| grant)
            }
            Some(None) => Err(Status::unauthenticated(
                "the token is not this coordinator's; check COX_TOKEN or COX_TOKEN_FILE",
            )),
            None => Err(Status::unauthenticated(
                "this coordinator requires `authorization: Bearer TOKEN`; set COX_TOKEN or COX_TOKEN_FILE",
            )),
        }
    }
}

/// The scope that a path wants. What is not known wants all.
fn wanted(path: &str) -> Scope {
    if path.starts_with(WORKERS) {
        return Scope::Worker;
    }
    match path.strip_prefix(PEOPLE) {
        Some(call) if LOOKS.iter().any(|(look, _)| *look == call) => Scope::Read,
        Some(_) => Scope::Control,
        None if path == METRICS || path.starts_with("/grpc.") => Scope::Read,
        None => Scope::All,
    }
}

/// What a path reads, if that is all it does.
fn read_kind(path: &str) -> Option<ReadKind> {
    match path.strip_prefix(PEOPLE) {
        Some(call) => LOOKS.iter().find(|(look, _)| *look == call).map(|(_, kind)| *kind),
        // A conversation that ends, for a tool that wants to know the services.
        None if path == METRICS || path.starts_with(REFLECTION) => Some(ReadKind::Look),
        None => (path.starts_with("/grpc.") && path != OPEN).then_some(ReadKind::Watch),
    }
}

/// Lets a request through that may be made, whatever it asks for: services, metrics, reflection, health.
pub async fn guarded(State(guard): State<Guard>, mut request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Arc<Peer>>().cloned();
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let path = request.uri().path();
    let shown = CallCredentials { path, authorization, caller: peer.as_ref().map(|peer| &peer.caller) };
    let admitted = guard.admit(shown);
    if let (Ok(grant), Some(peer), true) = (&admitted, &peer, path != OPEN) {
        peer.attendance.rise(grant.standing());
    }
    match admitted {
        Ok(grant) => match read_kind(path) {
            Some(kind) => {
                // Who has no token to show is known by the address.
                let address = shown.caller.and_then(|caller| caller.address).map(|address| address.ip());
                let caller = match authorization {
                    Some(token) => guard.names.hash_one(token),
                    None => guard.names.hash_one(address),
                };
                let is_launcher = grant.scopes.iter().any(|scope| scope.grants(Scope::Worker));
                request.extensions_mut().insert(grant);
                guard.readers.serve(kind, ReadCaller { caller, is_launcher, peer }, request, next).await
            }
            None => next.run(request).await,
        },
        Err(refused) if path == METRICS => {
            let code = match refused.code() {
                tonic::Code::PermissionDenied => StatusCode::FORBIDDEN,
                _ => StatusCode::UNAUTHORIZED,
            };
            (code, format!("{}\n", refused.message())).into_response()
        }
        Err(refused) => refused.into_http(),
    }
}

#[cfg(test)]
mod tests {
    use coxswain_identity::Token;
    use tonic::Code;

    use super::*;

    const STATUS: &str = "/coxswain.v1.Control/GetStatus";
    const STOP: &str = "/coxswain.v1.Control/StopRun";
    const REGISTER: &str = "/coxswain.v1.Coordinator/Register";

    fn ask(guard: &Guard, path: &str, shown: Option<&str>, caller: Option<&Caller>) -> Result<(), Code> {
        let bearer = shown.map(|token| format!("Bearer {token}"));
        let shown = CallCredentials { path, authorization: bearer.as_deref(), caller };
        guard.admit(shown).map(drop).map_err(|status| status.code())
    }

    fn fresh(scope: Scope) -> Token {
        Token::fresh(scope).unwrap()
    }

    #[test]
    fn each_call_wants_its_scope() {
        let (refused, denied) = (Err(Code::Unauthenticated), Err(Code::PermissionDenied));
        for (scope, expected) in [
            (Scope::Read, [Ok(()), denied, denied, Ok(())]),
            (Scope::Control, [Ok(()), Ok(()), denied, Ok(())]),
            (Scope::Worker, [Ok(()), denied, Ok(()), Ok(())]),
            (Scope::All, [Ok(()); 4]),
        ] {
            let token = fresh(scope);
            let guard = Guard::new(Some(Tokens::one(token.clone())), Readers::default());
            let paths = [STATUS, STOP, REGISTER, METRICS];
            assert_eq!(paths.map(|path| ask(&guard, path, Some(token.secret()), None)), expected, "{scope}");
            let other = fresh(Scope::All);
            assert_eq!(paths.map(|path| ask(&guard, path, Some(other.secret()), None)), [refused; 4]);
            assert_eq!(paths.map(|path| ask(&guard, path, None, None)), [refused; 4]);
            assert_eq!(ask(&guard, OPEN, None, None), Ok(()));
        }
        assert_eq!(ask(&Guard::new(None, Readers::default()), STOP, None, None), Ok(()));
    }

    #[test]
    fn every_call_of_the_contract_has_a_scope_that_was_thought_of() {
        use prost::Message as _;
        let described =
            prost_types::FileDescriptorSet::decode(coxswain_proto::v1::FILE_DESCRIPTOR_SET).unwrap();
        let services = described.file.iter().flat_map(|file| &file.service);
        let people =
            services.filter(|service| service.name() == "Control").flat_map(|service| &service.method);
        let looks: Vec<_> = people
            .filter(|method| wanted(&format!("{PEOPLE}{}", method.name())) == Scope::Read)
            .map(|method| method.name())
            .collect();
        assert_eq!(looks.len(), LOOKS.len(), "a name on the list is no call: {looks:?}");
        assert!(looks.iter().all(|name| name.starts_with("Get") || *name == "Watch"), "{looks:?}");
    }

    #[test]
    fn a_certificate_grants_what_its_name_does_and_what_comes_in_clear_from_elsewhere_is_not_heard() {
        let token = fresh(Scope::All);
        let guard = Guard::new(Some(Tokens::one(token.clone())), Readers::default());
        let named = Caller { address: None, is_private: true, granted: vec![Scope::Control] };
        assert_eq!(ask(&guard, STOP, None, Some(&named)), Ok(()));
        assert_eq!(ask(&guard, REGISTER, None, Some(&named)), Err(Code::Unauthenticated));
        let in_clear = Caller { is_private: false, ..named };
        assert_eq!(ask(&guard, STATUS, Some(token.secret()), Some(&in_clear)), Err(Code::Unauthenticated));
        assert_eq!(ask(&guard, OPEN, None, Some(&in_clear)), Ok(()));
    }
}
