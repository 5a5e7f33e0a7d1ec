//! Clients of a coordinator: connection, token, deadlines, and errors that say what to do.

use std::time::Duration;

use coxswain_identity::{Address, Credentials, Scope, ShowToken, Whereabouts, channel, refusal};
use coxswain_proto::{
    calls, limits,
    v1::{
        GetLedgerRequest, GetLedgerResponse, control_client::ControlClient,
        coordinator_client::CoordinatorClient,
    },
};
use tonic::{
    Code, Request, Response, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

use crate::{
    clock,
    exit::{CliError, Exit},
};

/// How long to wait for a connection: coordinators answer from memory.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// How often a silent connection is asked whether the other end is still there. A machine that lost its power
/// or its network closes nothing: a launcher that only listens, as with `FollowNode` and `Watch`, would wait
/// for ever. Workers ask as often; the answer may take 20 s, so that a coordinator which stands still for
/// seconds keeps its connections.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// See [`KEEP_ALIVE`].
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// For how long a coordinator that has too many readers is asked again.
const LOOK_PATIENCE: Duration = Duration::from_secs(30);

type Line = InterceptedService<Channel, ShowToken>;
/// What people ask.
pub type Control = ControlClient<Line>;
/// What launchers ask.
pub type Coordinator = CoordinatorClient<Line>;

/// Where a coordinator listens and what it wants to be shown. Connects when it is first called.
#[derive(Clone, Debug)]
pub struct Access {
    address: Address,
    /// On which a token for launchers is shown, and the coordinator is known by it.
    workers: Channel,
    /// The channel on which a token for people is shown, where it is another one.
    people: Channel,
    credentials: Credentials,
    /// What to say where there is no answer.
    advice: Option<&'static str>,
}

impl Access {
    /// Access to the coordinator at an [`Address`]. Needs a tokio runtime.
    pub fn new(address: Address, credentials: &Credentials) -> Result<Self, CliError> {
        Self::to(&Whereabouts::fixed(address), credentials)
    }

    /// Access to a coordinator that may move to another machine.
    pub fn to(whereabouts: &Whereabouts, credentials: &Credentials) -> Result<Self, CliError> {
        Self::keeping_alive(whereabouts, credentials, KEEP_ALIVE, KEEP_ALIVE_TIMEOUT)
    }

    fn keeping_alive(
        whereabouts: &Whereabouts,
        credentials: &Credentials,
        interval: Duration,
        timeout: Duration,
    ) -> Result<Self, CliError> {
        let address = whereabouts.first().clone();
        let endpoint = Endpoint::from_shared(format!("http://{}", address.host_port())).map_err(|error| {
            CliError::usage(format!("{address} is not HOST:PORT of a coordinator: {error}"))
        })?;
        let endpoint = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(interval)
            .keep_alive_timeout(timeout)
            .keep_alive_while_idle(true);
        // Each connects when it is first used.
        let [workers, people] =
            [Scope::Worker, Scope::Control].map(|scope| channel(&endpoint, whereabouts, credentials, scope));
        let (workers, people) = (workers?, people?);
        Ok(Self { address, workers, people, credentials: credentials.clone(), advice: None })
    }

    /// Prints this instead of the network's error where there is no answer.
    pub fn advising(self, advice: Option<&'static str>) -> Self {
        Self { advice, ..self }
    }

    /// `HOST:PORT`.
    pub fn address(&self) -> &str {
        self.address.host_port()
    }

    /// The service for people.
    pub fn control(&self) -> Control {
        let channel = match self.credentials.have_one_for(Scope::Worker, Scope::Control) {
            true => &self.workers,
            false => &self.people,
        };
        ControlClient::with_interceptor(channel.clone(), self.credentials.for_scope(Scope::Control))
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// The service for launchers and workers.
    pub fn coordinator(&self) -> Coordinator {
        CoordinatorClient::with_interceptor(self.workers.clone(), self.credentials.for_scope(Scope::Worker))
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// The answer to a question that changes nothing. A coordinator that has too many readers is asked again
    /// when it says so, for a while.
    pub async fn look<T, C>(&self, call: impl Fn(Control) -> C) -> Result<T, CliError>
    where
        C: Future<Output = Result<Response<T>, Status>>,
    {
        self.try_look(call).await.map_err(|status| self.explain(&status))
    }

    /// The answer to a question as [`look`](Self::look) gets it; what a refusal means is the caller's to say.
    pub async fn try_look<T, C>(&self, call: impl Fn(Control) -> C) -> Result<T, Status>
    where
        C: Future<Output = Result<Response<T>, Status>>,
    {
        let asked = clock::now();
        loop {
            let answer = call(self.control()).await;
            let pause = answer.as_ref().err().and_then(calls::pushback);
            match pause.filter(|pause| asked.elapsed() + *pause < LOOK_PATIENCE) {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return answer.map(Response::into_inner),
            }
        }
    }

    /// The answer to a person's order, or what its failure means for them.
    pub async fn answer<T>(
        &self,
        call: impl AsyncFnOnce(Control) -> Result<Response<T>, Status>,
    ) -> Result<T, CliError> {
        let answer = call(self.control()).await;
        answer.map(Response::into_inner).map_err(|status| self.explain(&status))
    }

    /// What a refused or failed call means for the user.
    pub fn explain(&self, status: &Status) -> CliError {
        let address = self.address();
        if let Some(distrust) = refusal(status) {
            return CliError::usage(distrust);
        }
        match status.code() {
            Code::Unauthenticated if self.credentials.tokens().is_none() => CliError::usage(format!(
                "the coordinator at {address} requires a token: name its run (--run DIR), or set COX_TOKEN or COX_TOKEN_FILE to what its \
                 launcher was given"
            )),
            // Nothing here answers with the last one: it stands for a connection that could not be made.
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown => CliError::new(
                Exit::CoordinatorLost,
                format!("no coordinator answers at {address}: {}", self.advice.unwrap_or(status.message())),
            ),
            Code::ResourceExhausted if calls::pushback(status).is_some() => CliError::new(
                Exit::CoordinatorLost,
                format!("the coordinator at {address} has too many readers: {}", status.message()),
            ),
            // What was asked for cannot be had: of this run, or any more.
            Code::FailedPrecondition
            | Code::NotFound
            | Code::InvalidArgument
            | Code::Unauthenticated
            | Code::PermissionDenied => {
                CliError::usage(format!("the coordinator at {address} refuses: {}", status.message()))
            }
            _ => CliError::new(
                Exit::Internal,
                format!("the coordinator at {address} refuses: {}", status.message()),
            ),
        }
    }
}

/// A page of the ledger, the largest there is. The coordinator may keep it back: what it reads for others is
/// rationed.
pub async fn ledger_page(access: &Access, first_step: u64) -> Result<GetLedgerResponse, CliError> {
    let page = GetLedgerRequest { first_step, limit: 0 };
    access
        .look(|mut people| async move { people.get_ledger(unhurried(page, limits::READ_TIMEOUT)).await })
        .await
}

/// A request that must be answered within [`limits::CALL_TIMEOUT`].
pub fn prompt<T>(message: T) -> Request<T> {
    unhurried(message, Duration::ZERO)
}

/// A request whose answer the coordinator may keep back for so long.
pub fn unhurried<T>(message: T, kept_back: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(kept_back + limits::CALL_TIMEOUT);
    request
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::WatchRequest;

    use super::*;

    #[tokio::test]
    async fn a_refusal_is_the_users_error_and_silence_is_the_coordinators() {
        let access = Access::new(Address::parse("127.0.0.1:1"), &Credentials::default()).unwrap();
        let explained = |code| access.explain(&Status::new(code, "why")).exit;
        for code in [
            Code::FailedPrecondition,
            Code::NotFound,
            Code::InvalidArgument,
            Code::Unauthenticated,
            Code::PermissionDenied,
        ] {
            assert_eq!(explained(code), Exit::Usage, "{code:?}");
        }
        assert_eq!(explained(Code::Unavailable), Exit::CoordinatorLost);
        assert_eq!(explained(Code::Internal), Exit::Internal);
    }

    #[tokio::test]
    async fn a_machine_that_is_gone_without_a_word_is_missed() {
        // A connection that is never served: nothing comes back, and nothing closes it.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let soon = Duration::from_millis(20);
        let gone = Whereabouts::fixed(Address::parse(&address));
        let access = Access::keeping_alive(&gone, &Credentials::default(), soon, soon).unwrap();
        let mut control = access.control();
        let watched = tokio::time::timeout(Duration::from_secs(60), control.watch(WatchRequest {})).await;
        let missed = watched.expect("it is not waited for without end").unwrap_err();
        assert!(calls::may_answer_later(missed.code()), "{missed}");
    }

    #[test]
    fn an_answer_that_is_kept_back_is_waited_for() {
        let timeout = |request: Request<()>| {
            request.metadata().get("grpc-timeout").unwrap().to_str().unwrap().to_owned()
        };
        assert_eq!(timeout(prompt(())), "10000000u");
        assert_eq!(timeout(unhurried((), limits::MEMORY_REFRESH_TIMEOUT)), "20000000u");
    }
}
