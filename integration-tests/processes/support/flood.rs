//! Readers that ask a coordinator without a pause: HTTP/2 by hand, a thread for each connection, as many
//! calls under way as the coordinator allows. What a load generator does, without one.

use std::{
    collections::HashSet,
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// HTTP/2's preface; settings with the largest window of a stream; the largest of the connection.
const OPENING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\
    \0\0\x06\x04\0\0\0\0\0\0\x04\x7f\xff\xff\xff\
    \0\0\x04\x08\0\0\0\0\0\x7f\xff\0\0";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const PROTOCOL_ERROR: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;
/// Between two looks at whether the flood is over.
const LOOK: Duration = Duration::from_millis(50);

/// What is asked for.
#[allow(dead_code, reason = "the bench asks all of it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    Status,
    Ledger,
    History,
    Memory,
    /// Memory, reported anew by all ranks.
    Fresh,
    Watch,
    Metrics,
    Reflection,
    Health,
    /// A status, whose request says that it is long and does not come.
    HalfSent,
    /// A description by reflection, whose request says that it is long and does not come.
    HalfDescribed,
    /// A status, whose path comes too late in its request: no call at all, for HTTP/2.
    Garbled,
}

impl Question {
    fn path(self) -> &'static str {
        match self {
            Self::Status | Self::HalfSent | Self::Garbled => "/coxswain.v1.Control/GetStatus",
            Self::Ledger => "/coxswain.v1.Control/GetLedger",
            Self::History => "/coxswain.v1.Control/GetHistory",
            Self::Memory | Self::Fresh => "/coxswain.v1.Control/GetMemory",
            Self::Watch => "/coxswain.v1.Control/Watch",
            Self::Metrics => "/metrics",
            Self::Reflection | Self::HalfDescribed => {
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
            }
            Self::Health => "/grpc.health.v1.Health/Watch",
        }
    }

    /// Message, and the head that says how long it is. One that is begun has a kilobyte of what its head
    /// says: 16 MiB, and the 4 MiB that tonic allows by itself.
    fn message(self) -> Vec<u8> {
        let begun = |high: u8| [&[0, 0, high, 0xff, 0xff][..], &[0; 1024]].concat();
        let message: &[u8] = match self {
            Self::HalfSent => return begun(0xff),
            Self::HalfDescribed => return begun(0x3f),
            // `refresh`, and `list_services`.
            Self::Fresh => &[0x08, 1],
            Self::Reflection => &[0x3a, 1, b'*'],
            _ => &[],
        };
        let head = [0, 0, 0, 0, u8::try_from(message.len()).expect("a short message")];
        [&head[..], message].concat()
    }

    fn is_begun(self) -> bool {
        matches!(self, Self::HalfSent | Self::HalfDescribed)
    }
}

/// Connections that ask until they are told to end.
pub struct Flood {
    over: Arc<AtomicBool>,
    connections: Vec<JoinHandle<u64>>,
}

impl Flood {
    /// Starts to ask the coordinator at `address`.
    pub fn start(address: &str, token: &str, question: Question, connections: usize, streams: usize) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let connection = |_| {
            let over = over.clone();
            let caller = Caller { address: address.to_owned(), token: token.to_owned(), question, streams };
            thread::Builder::new().stack_size(128 << 10).spawn(move || caller.ask(&over)).expect("a thread")
        };
        let connections = (0..connections).map(connection).collect();
        Self { over, connections }
    }

    /// Ends it; calls that were answered or refused.
    pub fn end(self) -> u64 {
        self.over.store(true, Ordering::Relaxed);
        self.connections.into_iter().map(|connection| connection.join().expect("it ends in order")).sum()
    }
}

struct Caller {
    address: String,
    token: String,
    question: Question,
    streams: usize,
}

/// One connection.
struct Line<'a> {
    caller: &'a Caller,
    socket: TcpStream,
    unsent: Vec<u8>,
    received: Vec<u8>,
    /// Streams that wait for an answer.
    open: HashSet<u32>,
    next: u32,
    most: usize,
    answered: u64,
}

impl Caller {
    /// One connection after the other until it is over.
    fn ask(&self, over: &AtomicBool) -> u64 {
        let mut answered = 0;
        while !over.load(Ordering::Relaxed) {
            let Some(mut line) = Line::open(self) else {
                thread::sleep(LOOK);
                continue;
            };
            while !over.load(Ordering::Relaxed) && line.exchange() {}
            answered += line.answered;
        }
        answered
    }

    /// The first request of a connection tells the names, later ones say which they were.
    fn request(&self, stream: u32) -> Vec<u8> {
        let path = self.question.path();
        let is_metrics = self.question == Question::Metrics;
        // POST or GET, http; then by their indexes, which the second request finds in the table.
        let mut names = vec![if is_metrics { 0x82 } else { 0x83 }, 0x86];
        if stream == 1 {
            let bearer = format!("Bearer {}", self.token);
            let known = [(0x44, path), (0x41, &self.address), (0x5f, "application/grpc"), (0x57, &bearer)];
            for (index, value) in known {
                names.extend([index, u8::try_from(value.len()).expect("a short value")]);
                names.extend(value.as_bytes());
            }
            names.extend(b"\x40\x02te\x08trailers");
        } else {
            // The newest name has the lowest index; path and authority come first.
            let mut known = [66, 65, 64, 63, 62];
            if self.question == Question::Garbled {
                known.reverse();
            }
            names.extend(known.map(|index| 0x80 | index));
        }
        if is_metrics {
            return frame(HEADERS, END_HEADERS | END_STREAM, stream, &names);
        }
        let mut request = frame(HEADERS, END_HEADERS, stream, &names);
        let flags = if self.question.is_begun() { 0 } else { END_STREAM };
        request.extend(frame(DATA, flags, stream, &self.question.message()));
        request
    }
}

impl<'a> Line<'a> {
    fn open(caller: &'a Caller) -> Option<Self> {
        let socket = TcpStream::connect(&caller.address).ok()?;
        socket.set_read_timeout(Some(LOOK)).ok()?;
        socket.set_write_timeout(Some(LOOK)).ok()?;
        Some(Self {
            caller,
            socket,
            unsent: OPENING.to_vec(),
            received: Vec::new(),
            open: HashSet::new(),
            next: 1,
            most: 0,
            answered: 0,
        })
    }

    /// Asks as often as may be, and takes what has come; false when the connection is over.
    fn exchange(&mut self) -> bool {
        while self.open.len() < self.most && self.unsent.len() < 1 << 16 && self.next < 1 << 30 {
            self.unsent.extend(self.caller.request(self.next));
            self.open.insert(self.next);
            self.next += 2;
        }
        if !self.unsent.is_empty() {
            match self.socket.write(&self.unsent) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if is_late(&error) => {}
                Err(_) => return false,
            }
        }
        let mut piece = [0; 1 << 14];
        match self.socket.read(&mut piece) {
            Ok(0) => return false,
            Ok(came) => self.received.extend(&piece[..came]),
            Err(error) if is_late(&error) => {}
            Err(_) => return false,
        }
        self.take() && self.next < 1 << 30
    }

    /// Takes whole frames.
    fn take(&mut self) -> bool {
        let mut at = 0;
        while let Some(head) = self.received.get(at..at + 9) {
            let size = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let (kind, flags) = (head[3], head[4]);
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & (u32::MAX >> 1);
            let Some(body) = self.received.get(at + 9..at + 9 + size) else { break };
            match kind {
                SETTINGS if flags & ACK == 0 => {
                    let asked = self.caller.streams;
                    let most = body.chunks_exact(6).find(|setting| setting[..2] == [0, 3]);
                    let most = most.map_or(asked, |most| {
                        u32::from_be_bytes([most[2], most[3], most[4], most[5]]) as usize
                    });
                    self.most = asked.min(most);
                    self.unsent.extend(frame(SETTINGS, ACK, 0, &[]));
                }
                PING if flags & ACK == 0 => {
                    let answer = frame(PING, ACK, 0, body);
                    self.unsent.extend(answer);
                }
                GOAWAY => return false,
                RESET if body.ends_with(&[PROTOCOL_ERROR]) && self.caller.question != Question::Garbled => {
                    panic!("the coordinator cannot read what is asked: {:?}", self.caller.question)
                }
                RESET | HEADERS | DATA if kind == RESET || flags & END_STREAM != 0 => {
                    self.answered += u64::from(self.open.remove(&stream));
                }
                _ => {}
            }
            at += 9 + size;
        }
        self.received.drain(..at);
        true
    }
}

fn is_late(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn frame(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len()).expect("a short frame").to_be_bytes();
    let mut frame = vec![size[1], size[2], size[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(body);
    frame
}
