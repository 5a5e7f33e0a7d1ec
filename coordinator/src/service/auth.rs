//! The bearer token that guards both services and the metrics off loopback.

use tonic::{Request, Status, service::Interceptor};

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

impl Interceptor for Guard {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let presented = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        self.admit(presented).map_err(Status::unauthenticated)?;
        Ok(request)
    }
}

/// Compares without telling by its duration where the first difference is.
fn equal(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |sum, (l, r)| sum | (l ^ r)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(token: &str) -> Request<()> {
        let mut request = Request::new(());
        request.metadata_mut().insert("authorization", token.parse().unwrap());
        request
    }

    #[test]
    fn only_the_right_token_passes() {
        let mut guard = Guard::new(Some("secret"));
        assert!(guard.call(with("Bearer secret")).is_ok());
        assert!(guard.call(with("Bearer secreT")).is_err());
        assert!(guard.call(with("Bearer ")).is_err());
        assert!(guard.call(with("secret")).is_err());
        assert!(guard.call(Request::new(())).is_err());
        assert!(Guard::new(None).call(Request::new(())).is_ok());
    }
}
