//! The server as clients see it, with a responder that adds numbers.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

use coxswain_task::{
    BadRequest, NamedValues, RequestReader, Responder, Sample, TaskError, Value, answers::SEED,
};
use tungstenite::{Message, WebSocket, client::IntoClientRequest, protocol::frame::coding::CloseCode};

use crate::{
    Door, Model, Port, ServeError, Server,
    clock::Stopwatch,
    decode::decode_answer,
    encode::encode_flat,
    limits::{AUTHENTICATION, MAX_CLIENTS, MAX_STRANGERS},
};

mod tls;

/// A number to add to, and the number of its request.
#[derive(Clone, Debug, PartialEq)]
struct Term {
    number: f32,
    seed: i64,
}

impl Sample for Term {
    fn index(&self) -> u64 {
        self.seed as u64
    }
}

struct Terms;

impl RequestReader for Terms {
    fn describe(&self) -> serde_json::Value {
        serde_json::json!({"policy": "adds", "inputs": {"number": [1]}})
    }

    fn example(&self) -> NamedValues {
        number(0.0)
    }

    fn read(&self, request: &NamedValues) -> Result<Box<dyn Sample>, BadRequest> {
        let seed = match request.get(SEED) {
            Some(Value::Integer(seed)) => *seed,
            _ => 0,
        };
        match request.get("number") {
            Some(Value::Numbers(array)) if array.values.len() == 1 => {
                Ok(Box::new(Term { number: array.values[0], seed }))
            }
            _ => Err(BadRequest::new("number", "missing")),
        }
    }
}

/// Adds one; panics at 13, fails at 14. Tells how many it was given, and waits for a permit before each pass
/// if it has a source of them.
struct Adds {
    passes: Sender<usize>,
    permits: Option<Receiver<()>>,
}

impl Responder for Adds {
    fn reader(&self) -> Arc<dyn RequestReader> {
        Arc::new(Terms)
    }

    fn answer(&self, requests: &[Box<dyn Sample>]) -> Result<Vec<NamedValues>, TaskError> {
        self.permits.iter().for_each(|permits| permits.recv().expect("the test lives"));
        let terms: Vec<&Term> = requests.iter().map(|request| request.content()).collect();
        if terms.iter().any(|term| term.number == 14.0) {
            return Err(TaskError::bad_input("unlucky"));
        }
        assert!(terms.iter().all(|term| term.number != 13.0), "a panic of the policy");
        self.passes.send(requests.len()).expect("the test lives");
        let answer = |term: &&Term| {
            let mut answer = number(term.number + 1.0);
            answer.insert("seed".into(), Value::Integer(term.seed));
            answer
        };
        Ok(terms.iter().map(answer).collect())
    }
}

fn number(value: f32) -> NamedValues {
    [("number".to_owned(), Value::numbers(vec![1], vec![value]))].into()
}

/// A server and the sizes of its passes, those of its warm-up taken out.
fn start(token: Option<&str>, permits: Option<Receiver<()>>) -> (Server, Receiver<usize>) {
    start_behind(Door { token: token.map(str::to_owned), tls: None }, permits)
}

fn start_behind(door: Door, permits: Option<Receiver<()>>) -> (Server, Receiver<usize>) {
    let (passes, sizes) = channel();
    let permits = Mutex::new(permits);
    let make = move || -> Result<Box<dyn Responder>, ServeError> {
        let permits = permits.into_inner().expect("not poisoned");
        Ok(Box::new(Adds { passes, permits }))
    };
    let model = Model::start(4, make).unwrap();
    assert_eq!(sizes.try_iter().collect::<Vec<_>>(), [1, 1, 4, 4]);
    let port = Port::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    (Server::start(port, model, door).unwrap(), sizes)
}

/// As many permits as the warm-up takes, and a hand that gives more.
fn permits() -> (Sender<()>, Receiver<()>) {
    let (give, permits) = channel();
    (0..4).for_each(|_| give.send(()).unwrap());
    (give, permits)
}

struct Client<S = TcpStream>(WebSocket<S>);

impl Client {
    fn connect(address: SocketAddr) -> Self {
        Self::with_token(address, None).unwrap_or_else(|status| panic!("{status}"))
    }

    fn with_token(address: SocketAddr, token: Option<&str>) -> Result<Self, u16> {
        Self::over(TcpStream::connect(address).unwrap(), token)
    }
}

impl<S: Read + Write> Client<S> {
    fn over(stream: S, token: Option<&str>) -> Result<Self, u16> {
        let mut request = "ws://localhost/".into_client_request().unwrap();
        if let Some(token) = token {
            request.headers_mut().insert("authorization", format!("Api-Key {token}").parse().unwrap());
        }
        match tungstenite::client(request, stream) {
            Ok((mut socket, _)) => {
                assert!(matches!(socket.read(), Ok(Message::Binary(_))), "metadata comes first");
                Ok(Self(socket))
            }
            Err(tungstenite::HandshakeError::Failure(tungstenite::Error::Http(response))) => {
                Err(response.status().as_u16())
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn ask(&mut self, named: &NamedValues) -> Result<f32, String> {
        self.send(named);
        self.hear()
    }

    fn send(&mut self, named: &NamedValues) {
        self.0.send(Message::binary(encode_flat(named))).unwrap();
    }

    fn hear(&mut self) -> Result<f32, String> {
        match self.0.read().unwrap() {
            Message::Binary(bytes) => match &decode_answer(&bytes)["number"] {
                Value::Numbers(array) => Ok(array.values[0]),
                other => panic!("{other:?}"),
            },
            Message::Text(text) => Err(text.to_string()),
            other => panic!("{other}"),
        }
    }
}

fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn observations_are_answered_in_turn_and_counted() {
    let (server, _sizes) = start(None, None);
    let mut client = Client::connect(server.address());
    for value in 0..3 {
        assert_eq!(client.ask(&number(value as f32)), Ok(value as f32 + 1.0));
    }
    assert!(get(server.address(), "/healthz").ends_with("\r\n\r\nOK\n"));
    let metrics = get(server.address(), "/metrics");
    assert!(metrics.contains("cox_serve_latency_seconds_count 3\n"), "{metrics}");
    assert!(metrics.contains("cox_serve_clients 1\n"), "{metrics}");
    assert_eq!(server.stop(), 0);
}

#[test]
fn nonsense_is_refused_in_words_and_the_same_client_goes_on() {
    let (server, _sizes) = start(None, None);
    let (mut client, mut other) = (Client::connect(server.address()), Client::connect(server.address()));
    for (message, wanted) in [
        (Message::binary(&b"\xc1"[..]), "not msgpack"),
        (Message::binary(&b"\x80"[..]), "number: missing"),
        (Message::text("{}"), "msgpack in binary frames"),
        (Message::binary(encode_flat(&number(13.0))), "the policy failed"),
        (Message::binary(encode_flat(&number(14.0))), "unlucky"),
    ] {
        client.0.send(message).unwrap();
        let refused = client.hear().unwrap_err();
        assert!(refused.contains(wanted), "{refused}");
        assert_eq!(other.ask(&number(1.0)), Ok(2.0));
    }
    assert_eq!(client.ask(&number(5.0)), Ok(6.0));
    assert!(get(server.address(), "/metrics").contains("cox_serve_errors_total 5\n"));
    assert_eq!(server.stop(), 0);
}

#[test]
fn a_huge_observation_is_refused_in_words_and_hurts_no_other_client() {
    let (server, _sizes) = start(None, None);
    let (mut client, mut other) = (Client::connect(server.address()), Client::connect(server.address()));
    let huge = vec![0; 65 << 20];
    client.0.send(Message::binary(huge)).unwrap();
    let refused = client.hear().unwrap_err();
    assert!(refused.contains("at most 67108864"), "{refused}");
    assert_eq!(other.ask(&number(1.0)), Ok(2.0));
    drop(client);
    assert_eq!(server.stop(), 0);
}

#[test]
fn observations_that_wait_together_share_a_pass_up_to_the_largest_batch() {
    let (give, permits) = permits();
    let (server, sizes) = start(None, Some(permits));
    let mut clients: Vec<_> = (0..6).map(|_| Client::connect(server.address())).collect();
    let (first, others) = clients.split_first_mut().unwrap();
    // The pass of the first stands still; the others arrive meanwhile, each shown by its own next read.
    first.send(&number(0.0));
    others.iter_mut().for_each(|client| client.send(&number(2.0)));
    // One permit a pass; which pass has which size depends on who came when, the bounds do not.
    (0..6).for_each(|_| give.send(()).unwrap());
    assert_eq!(first.hear(), Ok(1.0));
    others.iter_mut().for_each(|client| assert_eq!(client.hear(), Ok(3.0)));
    let sizes: Vec<_> = sizes.try_iter().collect();
    assert_eq!(sizes.iter().sum::<usize>(), 6);
    assert!(sizes.iter().all(|size| *size <= 4), "{sizes:?}");
    assert_eq!(server.stop(), 0);
}

#[test]
fn one_that_cannot_be_answered_does_not_take_its_batch_along() {
    let (give, permits) = permits();
    let (server, _sizes) = start(None, Some(permits));
    let mut clients: Vec<_> = (0..4).map(|_| Client::connect(server.address())).collect();
    for (client, value) in clients.iter_mut().zip([1.0, 13.0, 14.0, 2.0]) {
        client.send(&number(value));
    }
    // Enough for one pass each, and for one together before.
    (0..8).for_each(|_| give.send(()).unwrap());
    let answers: Vec<_> = clients.iter_mut().map(|client| client.hear().ok()).collect();
    assert_eq!(answers, [Some(2.0), None, None, Some(3.0)]);
    assert_eq!(server.stop(), 0);
}

#[test]
fn strangers_stay_outside() {
    let (server, _sizes) = start(Some("secret"), None);
    let address = server.address();
    assert_eq!(Client::with_token(address, None).err(), Some(401));
    assert_eq!(Client::with_token(address, Some("guess!")).err(), Some(401));
    assert!(get(address, "/metrics").starts_with("HTTP/1.1 401"));
    assert!(get(address, "/healthz").starts_with("HTTP/1.1 200"));
    let mut client = Client::with_token(address, Some("secret")).unwrap_or_else(|status| panic!("{status}"));
    assert_eq!(client.ask(&number(1.0)), Ok(2.0));
    assert_eq!(server.stop(), 0);
}

#[test]
fn strangers_keep_no_robot_out_and_robots_stay() {
    let (server, _sizes) = start(Some("secret"), None);
    let address = server.address();
    let robot = || Client::with_token(address, Some("secret")).unwrap_or_else(|status| panic!("{status}"));
    let mut first = robot();
    let mut strangers = Vec::new();
    for count in 0..4 * MAX_STRANGERS {
        let mut stranger = TcpStream::connect(address).unwrap();
        if count % 2 == 0 {
            stranger.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        }
        strangers.push(stranger);
    }
    // Who has no token is told so beside them, and who has one comes in.
    assert_eq!(Client::with_token(address, Some("guess!")).err(), Some(401));
    let mut robots: Vec<_> = (0..MAX_CLIENTS - 1).map(|_| robot()).collect();
    assert_eq!(Client::with_token(address, Some("secret")).err(), Some(503), "as many as may be");
    for robot in robots.iter_mut().step_by(50).chain([&mut first]) {
        assert_eq!(robot.ask(&number(1.0)), Ok(2.0));
    }
    let ends = strangers.iter_mut().map(|stranger| matches!(stranger.read(&mut [0]), Ok(0) | Err(_)));
    let cut = ends.filter(|is_cut| *is_cut);
    assert!(cut.take(3 * MAX_STRANGERS).count() == 3 * MAX_STRANGERS, "those that came first");
    drop((first, robots));
    assert_eq!(server.stop(), 0);
}

#[test]
fn strangers_that_drip_keep_no_robot_out_and_are_cut_in_time() {
    let (server, _sizes) = start(Some("secret"), None);
    let address = server.address();
    let ask_as_a_robot = || {
        let mut robot =
            Client::with_token(address, Some("secret")).unwrap_or_else(|status| panic!("{status}"));
        assert_eq!(robot.ask(&number(1.0)), Ok(2.0));
    };
    let strangers = |count: usize| (0..count).map(|_| TcpStream::connect(address).unwrap()).collect();
    let drip = |stranger: &mut TcpStream| stranger.write_all(b"G").is_ok();
    // More than there are places for: each robot takes that of one of them.
    let mut many: Vec<_> = strangers(4 * MAX_STRANGERS);
    for _ in 0..25 {
        many.retain_mut(drip);
        ask_as_a_robot();
    }
    drop(many);
    // So few that nobody needs their places, and never silent.
    let (mut few, since): (Vec<_>, _) = (strangers(MAX_STRANGERS / 2), Stopwatch::start());
    while !few.is_empty() {
        few.retain_mut(drip);
        ask_as_a_robot();
        assert!(since.elapsed() < 6 * AUTHENTICATION, "{} are still there", few.len());
        thread::park_timeout(AUTHENTICATION / 500);
    }
    assert!(since.elapsed() > AUTHENTICATION / 2, "they had the time that everybody has");
    assert_eq!(server.stop(), 0);
}

#[test]
fn a_client_that_vanishes_hurts_no_other() {
    let (server, _sizes) = start(None, None);
    let mut client = Client::connect(server.address());
    let mut gone = Client::connect(server.address());
    gone.send(&number(1.0));
    drop(gone);
    // Half a frame.
    let mut torn = Client::connect(server.address());
    torn.0.get_mut().write_all(b"\x82\xff\x00").unwrap();
    drop(torn);
    assert_eq!(client.ask(&number(1.0)), Ok(2.0));
    assert_eq!(server.stop(), 0);
}

#[test]
fn a_ping_during_a_pass_is_answered_and_so_is_what_comes_behind_it() {
    let (give, permits) = permits();
    let (server, _sizes) = start(None, Some(permits));
    let mut client = Client::connect(server.address());
    client.send(&number(1.0));
    client.0.send(Message::Ping("alive?".into())).unwrap();
    // No pass ends before it is permitted.
    assert_eq!(client.0.read().unwrap(), Message::Pong("alive?".into()));
    client.send(&number(2.0));
    (0..2).for_each(|_| give.send(()).unwrap());
    assert_eq!((client.hear(), client.hear()), (Ok(2.0), Ok(3.0)));
    // One that leaves while it waits is answered in the same way as one that leaves before.
    client.send(&number(3.0));
    client.0.close(None).unwrap();
    give.send(()).unwrap();
    while client.0.read().is_ok() {}
    assert_eq!(server.stop(), 0);
}

#[test]
fn stopping_answers_what_is_under_way() {
    let (give, permits) = permits();
    let (server, sizes) = start(None, Some(permits));
    let mut client = Client::connect(server.address());
    client.send(&number(1.0));
    let stopping = thread::spawn(move || server.stop());
    give.send(()).unwrap();
    // Whether the observation was read before the end or not, its client is not left waiting.
    match client.0.read() {
        Ok(Message::Binary(_)) => assert_eq!(sizes.try_iter().collect::<Vec<_>>(), [1]),
        Ok(Message::Close(told)) => {
            assert_eq!(told.map(|told| told.code), Some(CloseCode::Away));
            assert_eq!(sizes.try_iter().count(), 0);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(stopping.join().unwrap(), 0);
}

#[test]
fn clients_hear_that_the_server_ends() {
    let (server, _sizes) = start(None, None);
    let mut client = Client::connect(server.address());
    assert_eq!(client.ask(&number(1.0)), Ok(2.0));
    assert_eq!(server.stop(), 0);
    match client.0.read() {
        Ok(Message::Close(Some(told))) => assert_eq!(told.code, CloseCode::Away),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_policy_that_does_not_answer_opens_no_port() {
    let make = || -> Result<Box<dyn Responder>, ServeError> {
        let (passes, _) = channel();
        Ok(Box::new(Adds { passes, permits: None }))
    };
    // Nothing receives what it tells of its passes: it panics.
    let refused = Model::start(2, make).err().map(|error| error.to_string());
    assert!(refused.is_some_and(|refused| refused.contains("does not answer")));
}

#[test]
fn a_port_that_is_taken_is_known_before_the_policy_is_loaded() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let refused = Port::bind(taken.local_addr().unwrap()).unwrap_err().to_string();
    assert!(refused.contains("--listen"), "{refused}");
}
