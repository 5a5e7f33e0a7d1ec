//! The bearer token that guards all that the port answers off loopback.

use axum::{
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tonic::Status;

/// Where the metrics are.
pub const METRICS: &str = "/metrics";
/// What needs no token.
const OPEN: &str = "/grpc.health.v1.Health/Check";

/// Lets calls through that carry the token; all of them when there is none.
#[derive(Clone)]
pub struct Guard {
    token: Option<std::sync::Arc<str>>,
}

impl Guard {
    /// A guard for this token.
    pub fn new(token: Option<&str>) -> Self {
        Self { token: token.map(Into::into) }
    }

    /// Whether a caller with this `authorization` header may pass; if not, what to do.
    pub fn admit(&self, authorization: Option<&str>) -> Result<(), &'static str> {
        let Some(token) = &self.token else { return Ok(()) };
        match authorization.and_then(|value| value.strip_prefix("Bearer ")) {
            Some(presented) if equal(presented.as_bytes(), token.as_bytes()) => Ok(()),
            Some(_) => Err("the token is not this coordinator's; check COX_TOKEN"),
            None => Err("this coordinator wants `authorization: Bearer TOKEN`; set COX_TOKEN"),
        }
    }
}

/// Lets a request through that carries the token, whatever it asks for: services, metrics, reflection,
/// health's `Watch`. Only `Check` of health is open, which probes of schedulers call without a token.
pub async fn guarded(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let presented = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    match guard.admit(presented) {
        Err(_) if request.uri().path() == OPEN => next.run(request).await,
        Err(refused) if request.uri().path() == METRICS => {
            (StatusCode::UNAUTHORIZED, format!("{refused}\n")).into_response()
        }
        Err(refused) => Status::unauthenticated(refused).into_http(),
        Ok(()) => next.run(request).await,
    }
}

/// Compares without telling by its duration where the first difference is.
fn equal(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |sum, (l, r)| sum | (l ^ r)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_token_passes() {
        let guard = Guard::new(Some("secret"));
        assert!(guard.admit(Some("Bearer secret")).is_ok());
        for wrong in [Some("Bearer secreT"), Some("Bearer "), Some("secret"), None] {
            assert!(guard.admit(wrong).is_err(), "{wrong:?}");
        }
        assert!(Guard::new(None).admit(None).is_ok());
    }
}
