//! One connection to the coordinator: token, backoff, and what is worth another try.

use std::time::{Duration, Instant};

use coxswain_identity::{Scope, ShowToken, channel, refusal};
use coxswain_proto::{
    calls::{self, Pauses},
    limits,
    v1::coordinator_client::CoordinatorClient,
};
use tonic::{
    Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

use super::{SessionError, SessionOptions};
use crate::clock;

const PAUSES: Pauses = Pauses::new(Duration::from_millis(20), Duration::from_millis(500));

/// The generated client with our token on it.
pub(super) type Client = CoordinatorClient<InterceptedService<Channel, ShowToken>>;

/// A client that connects when it is first used, and again whenever the connection is gone.
pub(super) fn client(options: &SessionOptions) -> Result<Client, SessionError> {
    let refused = |reason: String| SessionError::Refused { endpoint: options.endpoint.to_string(), reason };
    let endpoint = Endpoint::from_shared(format!("http://{}", options.endpoint.first().host_port()))
        .map_err(|error| refused(format!("its address is not HOST:PORT: {error}")))?
        .connect_timeout(Duration::from_secs(5))
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_while_idle(true);
    let channel = channel(&endpoint, &options.endpoint, &options.credentials, Scope::Worker);
    let channel = channel.map_err(|error| refused(error.to_string()))?;
    Ok(CoordinatorClient::with_interceptor(channel, options.credentials.for_scope(Scope::Worker))
        .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(limits::MAX_MESSAGE_BYTES))
}

/// Pauses that grow, until patience ends.
pub(super) struct Backoff {
    began: Instant,
    patience: Duration,
    pauses: Pauses,
}

impl Backoff {
    pub fn new(patience: Duration) -> Self {
        Self { began: clock::now(), patience, pauses: PAUSES }
    }

    /// Sleeps before the next try; false when patience has ended.
    pub async fn pause(&mut self) -> bool {
        if self.began.elapsed() + self.pauses.upcoming() > self.patience {
            return false;
        }
        tokio::time::sleep(self.pauses.take()).await;
        true
    }

    pub fn waited(&self) -> Duration {
        self.began.elapsed()
    }
}

/// Calls until there is an answer; a refusal is an error.
pub(super) async fn persist<R, F>(
    options: &SessionOptions,
    call: impl FnMut() -> F,
) -> Result<R, SessionError>
where
    F: Future<Output = Result<tonic::Response<R>, Status>>,
{
    answer_or_refusal(options, call).await?.map_err(|status| refused(options, &status))
}

/// Calls until there is an answer or a refusal.
pub(super) async fn answer_or_refusal<R, F>(
    options: &SessionOptions,
    mut call: impl FnMut() -> F,
) -> Result<Result<R, Status>, SessionError>
where
    F: Future<Output = Result<tonic::Response<R>, Status>>,
{
    let mut backoff = Backoff::new(options.patience);
    loop {
        let status = match call().await {
            Ok(answer) => return Ok(Ok(answer.into_inner())),
            Err(status) => status,
        };
        if let Some(reason) = refusal(&status) {
            return Err(SessionError::Refused { endpoint: options.endpoint.to_string(), reason });
        }
        if !calls::may_answer_later(status.code()) {
            return Ok(Err(status));
        }
        if !backoff.pause().await {
            let (endpoint, reason) = (options.endpoint.to_string(), status.message().to_owned());
            return Err(SessionError::Lost { endpoint, waited: backoff.waited(), reason });
        }
    }
}

/// A refusal as this session's error.
pub(super) fn refused(options: &SessionOptions, status: &Status) -> SessionError {
    SessionError::Refused { endpoint: options.endpoint.to_string(), reason: status.message().to_owned() }
}
