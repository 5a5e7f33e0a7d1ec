//! Clients of a coordinator: connection, token, deadlines, and errors that say what to do.

use std::time::Duration;

use coxswain_proto::{
    limits,
    v1::{control_client::ControlClient, coordinator_client::CoordinatorClient},
};
use tonic::{
    Code, Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint},
};

use crate::exit::{Exit, Failed};

/// How long to wait for a connection: coordinators answer from memory.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long to wait for an answer to a call that is not a stream.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Adds `authorization: Bearer TOKEN` to every call.
#[derive(Clone, Debug)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

type Line = InterceptedService<Channel, Bearer>;
/// What people ask.
pub type Control = ControlClient<Line>;
/// What launchers ask.
pub type Coordinator = CoordinatorClient<Line>;

/// Where a coordinator listens and what it wants to be shown. Connects when it is first called.
#[derive(Clone, Debug)]
pub struct Access {
    address: String,
    channel: Channel,
    bearer: Bearer,
}

impl Access {
    /// Access to the coordinator at `HOST:PORT`. Needs a tokio runtime.
    pub fn new(address: &str, token: Option<&str>) -> Result<Self, Failed> {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| {
            Failed::usage(format!("{address} is not HOST:PORT of a coordinator: {error}"))
        })?;
        let bearer = token
            .map(|token| format!("Bearer {token}").parse())
            .transpose()
            .map_err(|_| Failed::usage("COX_TOKEN: a token consists of visible ASCII characters"))?;
        let channel = endpoint.connect_timeout(CONNECT_TIMEOUT).connect_lazy();
        Ok(Self { address: address.to_owned(), channel, bearer: Bearer(bearer) })
    }

    /// `HOST:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The service for people.
    pub fn control(&self) -> Control {
        ControlClient::with_interceptor(self.channel.clone(), self.bearer.clone())
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// The service for launchers and workers.
    pub fn coordinator(&self) -> Coordinator {
        CoordinatorClient::with_interceptor(self.channel.clone(), self.bearer.clone())
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// What a refused or failed call means for the user.
    pub fn explain(&self, status: &Status) -> Failed {
        let address = &self.address;
        match status.code() {
            Code::Unauthenticated => Failed::usage(format!(
                "the coordinator at {address} wants a token: set COX_TOKEN to the one its launcher was given"
            )),
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => Failed::new(
                Exit::CoordinatorLost,
                format!("no coordinator answers at {address}: {}", status.message()),
            ),
            _ => Failed::new(
                Exit::Internal,
                format!("the coordinator at {address} refuses: {}", status.message()),
            ),
        }
    }
}

/// A request that must be answered within [`CALL_TIMEOUT`].
pub fn prompt<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL_TIMEOUT);
    request
}
