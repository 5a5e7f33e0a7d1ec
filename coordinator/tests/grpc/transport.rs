//! Reflection, health, tokens: what tools see before they know the protocol.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Bytes;
use coxswain_coordinator::{ConnectionBounds, ServeError};
use coxswain_identity::{CertificateFiles, Credentials, Token, Tokens};
use coxswain_proto::{
    calls,
    limits::{GREETING, MAX_CONTROL_REQUEST, MAX_READS_OF_CONNECTION, MAX_STREAMS},
    v1::{self, control_client::ControlClient, coordinator_client::CoordinatorClient, directive::Kind},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    task::JoinSet,
};
use tonic::{
    Code,
    codegen::{Service as _, http},
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

use crate::harness::{Sandbox, Scope, TEST_LIMIT, guarded, options, register, spec};

#[tokio::test]
async fn reflection_lists_both_services_and_describes_them() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 1)).await;
    let mut client = ServerReflectionClient::new(sandbox.channel().await);
    let ask = |message_request| ServerReflectionRequest {
        host: String::new(),
        message_request: Some(message_request),
    };
    let asked = tokio_stream::iter([
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol("coxswain.v1.Control".into())),
    ]);
    let mut answers = client.server_reflection_info(asked).await.unwrap().into_inner();
    let first = answers.message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = first else { panic!("{first:?}") };
    let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
    for service in ["coxswain.v1.Coordinator", "coxswain.v1.Control", "grpc.health.v1.Health"] {
        assert!(names.contains(&service), "{names:?}");
    }
    let second = answers.message().await.unwrap().unwrap().message_response.unwrap();
    assert!(matches!(second, MessageResponse::FileDescriptorResponse(_)), "{second:?}");
}

#[tokio::test]
async fn both_services_are_healthy() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 1)).await;
    let mut client = HealthClient::new(sandbox.channel().await);
    for service in ["", "coxswain.v1.Coordinator", "coxswain.v1.Control"] {
        let request = HealthCheckRequest { service: service.into() };
        let answer = client.check(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service}");
    }
}

#[tokio::test]
async fn an_open_port_needs_a_token() {
    let directory = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let options = options(spec(directory.path(), 10), 1);
    let refused = coxswain_coordinator::serve(listener, options, std::future::pending()).await;
    assert!(matches!(refused, Err(ServeError::Unprotected { .. })), "{refused:?}");
}

#[tokio::test]
async fn only_callers_with_the_token_are_heard() {
    let directory = tempfile::tempdir().unwrap();
    let (options, credentials) = guarded(options(spec(directory.path(), 10), 1), &[Scope::All]);
    let sandbox = Sandbox::start(options).await;
    let mut stranger = sandbox.people().await;
    let status = stranger.get_status(v1::GetStatusRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    let shown = credentials[0].for_scope(Scope::Read);
    let mut friend = ControlClient::with_interceptor(sandbox.channel().await, shown);
    friend.get_status(v1::GetStatusRequest {}).await.unwrap();
}

#[tokio::test]
async fn a_token_opens_what_its_scope_says() {
    let directory = tempfile::tempdir().unwrap();
    let scopes = [Scope::Read, Scope::Worker, Scope::Control];
    let (options, credentials) = guarded(options(spec(directory.path(), 10), 1), &scopes);
    let sandbox = Sandbox::start(options).await;
    let channel = sandbox.channel().await;
    for (scope, credentials) in scopes.into_iter().zip(&credentials) {
        // Whatever it asks for, it has this one token to show.
        let mut people = ControlClient::with_interceptor(channel.clone(), credentials.for_scope(scope));
        let mut workers = CoordinatorClient::with_interceptor(channel.clone(), credentials.for_scope(scope));
        people.get_status(v1::GetStatusRequest {}).await.unwrap();
        let paused = people.pause(v1::PauseRequest {}).await.err().map(|status| status.code());
        let registered = workers.register(register(0)).await;
        let stopped = people.stop_run(v1::StopRunRequest::default()).await;
        let denied = |status: Option<tonic::Status>| {
            let status = status.filter(|status| status.code() == Code::PermissionDenied)?;
            Some(status.message().to_owned())
        };
        assert_eq!(paused == Some(Code::PermissionDenied), scope != Scope::Control, "{scope}: {paused:?}");
        let stopped = denied(stopped.err());
        assert_eq!(stopped.is_some(), scope != Scope::Control, "{scope}: {stopped:?}");
        assert!(
            stopped
                .is_none_or(|why| why.contains(scope.name()) && why.contains("StopRun requires `control`"))
        );
        assert_eq!(denied(registered.err()).is_some(), scope != Scope::Worker, "{scope}");
    }
}

#[tokio::test]
async fn peaks_begin_anew_for_who_may_control_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let scopes = [Scope::Read, Scope::Worker, Scope::Control];
    let (options, credentials) = guarded(options(spec(directory.path(), 10), 1), &scopes);
    let sandbox = Sandbox::start(options).await;
    let channel = sandbox.channel().await;
    for (scope, credentials) in scopes.into_iter().zip(&credentials) {
        let mut people = ControlClient::with_interceptor(channel.clone(), credentials.for_scope(scope));
        people.get_memory(v1::GetMemoryRequest { refresh: true, reset: false }).await.unwrap();
        let reset = people.get_memory(v1::GetMemoryRequest { refresh: false, reset: true }).await;
        let refused = reset.err().map(|status| (status.code(), status.message().to_owned()));
        assert_eq!(refused.is_some(), scope != Scope::Control, "{scope}: {refused:?}");
        let is_told = |(code, why): (Code, String)| {
            code == Code::PermissionDenied && why.contains("GetMemory with `reset` requires `control`")
        };
        assert!(refused.is_none_or(is_told), "{scope}");
    }
}

#[tokio::test]
async fn who_reads_more_than_may_be_at_once_is_told_when_to_come_again() {
    let directory = tempfile::tempdir().unwrap();
    let (options, credentials) =
        guarded(options(spec(directory.path(), 10), 1), &[Scope::Read, Scope::Worker]);
    let sandbox = Sandbox::start(options).await;
    let shown = || credentials[0].for_scope(Scope::Read);
    let mut people = ControlClient::with_interceptor(sandbox.channel().await, shown());
    let mut watched = Vec::new();
    for _ in 0..MAX_READS_OF_CONNECTION {
        watched.push(people.watch(v1::WatchRequest {}).await.unwrap());
    }
    let refused = people.get_status(v1::GetStatusRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(calls::pushback(&refused).is_some_and(|pause| !pause.is_zero()), "{refused:?}");
    let mut other = ControlClient::with_interceptor(sandbox.channel().await, shown());
    other.get_status(v1::GetStatusRequest {}).await.expect("another connection has its own");
    drop(watched);
    while people.get_status(v1::GetStatusRequest {}).await.is_err() {}
}

#[tokio::test]
async fn a_request_of_people_is_short() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 1)).await;
    let reason = "!".repeat(MAX_CONTROL_REQUEST + 1);
    let refused = sandbox.people().await.stop_run(v1::StopRunRequest { reason }).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
}

#[tokio::test]
async fn a_coordinator_that_no_worker_could_come_to_does_not_start() {
    let directory = tempfile::tempdir().unwrap();
    let (options, _) = guarded(options(spec(directory.path(), 10), 1), &[Scope::Read, Scope::Control]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refused = coxswain_coordinator::serve(listener, options, std::future::pending()).await.unwrap_err();
    assert!(refused.to_string().contains("cox token --scope worker"), "{refused}");
}

#[tokio::test]
async fn a_stranger_may_ask_whether_a_service_is_healthy_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let (options, _) = guarded(options(spec(directory.path(), 10), 1), &[Scope::All]);
    let sandbox = Sandbox::start(options).await;
    let mut health = HealthClient::new(sandbox.channel().await);
    let request = HealthCheckRequest { service: String::new() };
    health.check(request.clone()).await.unwrap();
    let watched = health.watch(request).await.unwrap_err();
    assert_eq!(watched.code(), Code::Unauthenticated);
    let mut reflection = ServerReflectionClient::new(sandbox.channel().await);
    let asked = tokio_stream::iter([ServerReflectionRequest::default()]);
    let described = reflection.server_reflection_info(asked).await.unwrap_err();
    assert_eq!(described.code(), Code::Unauthenticated);
    assert!(described.message().contains("COX_TOKEN"), "{described}");
}

#[tokio::test]
async fn a_connection_may_open_a_bounded_number_of_streams() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 1)).await;
    let address = sandbox.endpoint.strip_prefix("http://").unwrap();
    let mut connection = tokio::net::TcpStream::connect(address).await.unwrap();
    // HTTP/2's preface with empty settings; the server's come first.
    connection.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut head = [0; 9];
    connection.read_exact(&mut head).await.unwrap();
    assert_eq!(head[3], 4, "a frame of settings");
    let mut settings = vec![0; usize::from(head[2])];
    connection.read_exact(&mut settings).await.unwrap();
    let streams = settings.chunks_exact(6).find(|setting| setting[..2] == [0, 3]).expect("a bound");
    assert_eq!(streams[2..], MAX_STREAMS.to_be_bytes());
}

#[tokio::test]
async fn a_world_of_nobody_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let options = options(spec(directory.path(), 10), 0);
    let refused = coxswain_coordinator::serve(listener, options, std::future::pending()).await;
    assert!(matches!(refused, Err(ServeError::World { .. })), "{refused:?}");
}

/// A coordinator for `most` connections, one of each kind of caller, and idle connections without a word.
async fn crowded(most: usize, first_call: Duration) -> (Sandbox, [Credentials; 2], tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let scopes = [Scope::Read, Scope::Worker];
    let (mut options, credentials) = guarded(options(spec(directory.path(), 10), 1), &scopes);
    options.connections = ConnectionBounds { most, first_call, ..Default::default() };
    // No worker here says that it lives.
    (options.patience.silence, options.patience.hang) = (TEST_LIMIT, TEST_LIMIT);
    let [read, worker] = credentials.try_into().expect("as many as scopes");
    (Sandbox::start(options).await, [read, worker], directory)
}

#[tokio::test]
async fn idle_connections_keep_no_worker_out_and_one_that_works_stays() {
    const MOST: usize = 8;
    let (sandbox, [read, worker], _directory) = crowded(MOST, Duration::from_secs(600)).await;
    let address = sandbox.endpoint.strip_prefix("http://").unwrap();
    let shown = worker.for_scope(Scope::Worker);
    let mut first = CoordinatorClient::with_interceptor(sandbox.channel().await, shown.clone());
    let worker_id = first.register(register(0)).await.unwrap().into_inner().worker_id;
    let incarnation = register(0).incarnation;
    let follow = v1::FollowRequest { worker_id, incarnation: incarnation.clone() };
    let mut line = first.follow(follow).await.unwrap().into_inner();
    let mut idle = Vec::new();
    for _ in 0..2 * MOST {
        idle.push(tokio::net::TcpStream::connect(address).await.unwrap());
    }
    let mut readers = Vec::new();
    for _ in 0..2 * MOST {
        let mut people =
            ControlClient::with_interceptor(sandbox.channel().await, read.for_scope(Scope::Read));
        readers.push((people.watch(v1::WatchRequest {}).await, people));
    }
    let mut successor = CoordinatorClient::with_interceptor(sandbox.channel().await, shown);
    let beat = v1::HeartbeatRequest {
        worker_id,
        incarnation: incarnation.clone(),
        phase: v1::WorkerPhase::Loading.into(),
        ..Default::default()
    };
    assert!(successor.heartbeat(beat).await.expect("it comes in").into_inner().known);
    for mut stranger in idle {
        let ended = tokio::time::timeout(TEST_LIMIT, stranger.read(&mut [0])).await.expect("it made room");
        assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    }
    let ready = v1::ReadyRequest { worker_id, incarnation, ..Default::default() };
    first.ready(ready).await.unwrap();
    let told = line.message().await.expect("the line that it had").and_then(|told| told.kind);
    assert!(matches!(told, Some(Kind::Assignment(_))), "{told:?}");
}

#[tokio::test]
async fn a_connection_without_a_call_is_closed_in_time() {
    let (sandbox, [read, _], _directory) = crowded(64, Duration::from_millis(500)).await;
    let address = sandbox.endpoint.strip_prefix("http://").unwrap();
    let mut people = ControlClient::with_interceptor(sandbox.channel().await, read.for_scope(Scope::Read));
    let mut watched = people.watch(v1::WatchRequest {}).await.unwrap().into_inner();
    let mut silent = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut refused = sandbox.people().await;
    let status = refused.get_status(v1::GetStatusRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    let ended = tokio::time::timeout(TEST_LIMIT, silent.read(&mut [0])).await.expect("it is closed");
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    // Who has made a call is there for longer, on the same connection.
    people.get_status(v1::GetStatusRequest {}).await.unwrap();
    tokio::select! {
        biased;
        news = watched.message() => assert!(matches!(news, Ok(Some(_))), "{news:?}"),
        () = std::future::ready(()) => {}
    }
}

/// Bytes of a connection up to the end of its first call's headers (RFC 9113, sections 3.4 and 4.1).
async fn first_call(listener: TcpListener) -> usize {
    const PREFACE: usize = 24;
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let (mut caller, _) = listener.accept().await.unwrap();
    caller.write_all(&SETTINGS).await.unwrap();
    caller.read_exact(&mut [0; PREFACE]).await.unwrap();
    let mut bytes = PREFACE;
    loop {
        let mut head = [0; SETTINGS.len()];
        caller.read_exact(&mut head).await.unwrap();
        let size = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        caller.read_exact(&mut vec![0; size]).await.unwrap();
        bytes += head.len() + size;
        let [.., kind, flags, _, _, _, _] = head;
        if kind == 1 && flags & 4 != 0 {
            return bytes;
        }
    }
}

#[tokio::test]
async fn a_workers_first_call_waits_for_no_reader_whatever_its_token_and_host() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    // Characters that have no shorter code (RFC 7541, appendix B).
    let token = Token::parse(&"&".repeat(256)).unwrap();
    let credentials = Credentials::new(Some(Tokens::one(token)), CertificateFiles::default());
    let name = vec!["X".repeat(63); 4].join(".");
    let host = format!("http://{}:65535", &name[..253]);
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = endpoint.origin(host.parse().unwrap()).connect_lazy();
    let mut worker = CoordinatorClient::with_interceptor(channel, credentials.for_scope(Scope::Worker));
    let call = worker.register(register(0));
    let counted = tokio::time::timeout(TEST_LIMIT, first_call(listener));
    let bytes = tokio::select! {
        _ = call => panic!("nobody answers"),
        bytes = counted => bytes.expect("it is made"),
    };
    assert!((512..=GREETING).contains(&bytes), "{bytes} bytes");
}

#[tokio::test]
async fn a_request_to_describe_the_services_is_short() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 10), 1)).await;
    let mut client = ServerReflectionClient::new(sandbox.channel().await);
    let host = "!".repeat(MAX_CONTROL_REQUEST + 1);
    let asked = tokio_stream::iter([ServerReflectionRequest { host, message_request: None }]);
    // A request that is taken is answered, this one by what it lacks; one that is too long ends the stream.
    let answer = match client.server_reflection_info(asked).await {
        Ok(answers) => answers.into_inner().message().await,
        Err(refused) => Err(refused),
    };
    let is_refused = match &answer {
        Ok(answer) => answer.is_none(),
        Err(refused) => refused.code() == Code::OutOfRange,
    };
    assert!(is_refused, "{answer:?}");
}

/// A request that says that it is long, and does not come.
struct UnfinishedBody(Option<Bytes>);

impl http_body::Body for UnfinishedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        self.0.take().map_or(Poll::Pending, |head| Poll::Ready(Some(Ok(http_body::Frame::data(head)))))
    }
}

async fn begin(mut channel: Channel, path: &str) -> http::Response<tonic::body::Body> {
    let head = Bytes::from_static(&[0, 0, 0, 0xff, 0xff]);
    let request = http::Request::post(path).header("content-type", "application/grpc");
    let request = request.body(tonic::body::Body::new(UnfinishedBody(Some(head)))).unwrap();
    std::future::poll_fn(|context| channel.poll_ready(context)).await.unwrap();
    tokio::time::timeout(TEST_LIMIT, channel.call(request)).await.expect("it is not waited for").unwrap()
}

#[tokio::test]
async fn a_read_that_does_not_come_to_its_end_is_given_up_and_its_place_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = options(spec(directory.path(), 10), 1);
    options.connections.read = Duration::from_millis(500);
    let sandbox = Sandbox::start(options).await;
    for path in ["/coxswain.v1.Control/GetStatus", "/grpc.health.v1.Health/Watch"] {
        let channel = sandbox.channel().await;
        let mut begun = JoinSet::new();
        (0..MAX_READS_OF_CONNECTION).for_each(|_| drop(begun.spawn(begin(channel.clone(), path))));
        while let Some(answer) = begun.join_next().await {
            let status = tonic::Status::from_header_map(answer.unwrap().headers());
            assert_eq!(status.map(|status| status.code()), Some(Code::DeadlineExceeded), "{path}");
        }
        let mut people = ControlClient::new(channel);
        people.get_status(v1::GetStatusRequest {}).await.expect("there are places again");
    }
    // This one answers at once, and its answers have an end.
    let described = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    let mut answers = std::pin::pin!(begin(sandbox.channel().await, described).await.into_body());
    let ended = std::future::poll_fn(|context| http_body::Body::poll_frame(answers.as_mut(), context));
    let ended = tokio::time::timeout(TEST_LIMIT, ended).await.expect("it is not waited for");
    assert!(matches!(ended, Some(Err(_))), "{ended:?}");
}
