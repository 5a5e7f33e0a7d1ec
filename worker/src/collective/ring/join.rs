//! Forming a ring: every rank calls the next one and waits for the call of the previous one, at the same time.
//!
//! A rank that is not there yet is called again until the deadline; a rank that answers "another run" or "another version" is
//! not. Whoever else connects in the meantime is told why it is not welcome, and does not hold up the ring.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use coxswain_proto::ids::{Generation, Rank};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::{
    abort::RingAbort,
    handshake::{ANSWER, CONFIRM, HELLO, Hello, Verdict, decode_answer, encode_answer},
};

/// Kernel buffer of a connection in each direction. Room for the bytes in flight on a fast network (100 Gbit/s x 0.3 ms); the
/// kernel caps it at `net.core.{r,w}mem_max`.
const SOCKET_BUFFER: usize = 4 << 20;
/// Deadline, abort and the other half of the join are looked at this often.
const SLICE: Duration = Duration::from_millis(20);
/// A rank that cannot be reached is called again after this long, doubling up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// Connections that have not said yet who they are; more than this many strangers at once drop the oldest.
const MAX_GUESTS: usize = 64;

/// Why a ring could not be formed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The listening socket could not be opened.
    #[error("cannot listen on {address}: {source}; use a free port, or port 0 for any")]
    Listen {
        /// As given.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// The membership contradicts itself.
    #[error("rank {rank} in a world of {world} has no place in a ring")]
    Membership {
        /// This rank.
        rank: Rank,
        /// Addresses given.
        world: usize,
    },
    /// A neighbour answered that this rank does not belong there.
    #[error("rank {peer} at {address} (generation {generation}) refuses this rank: {reason}")]
    Refused {
        /// The neighbour.
        peer: Rank,
        /// Its address.
        address: String,
        /// The generation it is in.
        generation: Generation,
        /// Its reason.
        reason: String,
    },
    /// The next rank could not be reached in time.
    #[error(
        "rank {peer} at {address} did not answer within {waited:.1?} ({last}); is it running, and reachable from here?"
    )]
    NoAnswer {
        /// The neighbour.
        peer: Rank,
        /// Its address.
        address: String,
        /// How long it was called.
        waited: Duration,
        /// What the last attempt met.
        last: String,
    },
    /// The previous rank did not call in time.
    #[error(
        "rank {peer} did not call within {waited:.1?} ({refused} others were refused); is it running, and is {address} reachable from it?"
    )]
    NobodyCame {
        /// The neighbour.
        peer: Rank,
        /// Where this rank listens.
        address: String,
        /// How long it listened.
        waited: Duration,
        /// Connections turned away.
        refused: usize,
    },
    /// The sockets could not be waited for.
    #[error("cannot wait for sockets: {0}")]
    Wait(io::Error),
}

/// One membership, as one rank sees it.
#[derive(Clone, Copy, Debug)]
pub struct Membership<'a> {
    /// The run's id: keeps rings of different runs apart.
    pub run: &'a str,
    /// Keeps memberships of one run apart.
    pub generation: Generation,
    /// This rank.
    pub rank: Rank,
    /// Ring addresses of all ranks, in rank order.
    pub peers: &'a [String],
}

/// Where the previous rank calls. Opened before registration, because its address is what is registered; it outlives
/// generations.
#[derive(Debug)]
pub struct RingListener {
    listener: TcpListener,
    address: String,
}

impl RingListener {
    /// Listens on `address`, for example `10.0.0.5:0` for any free port of that interface.
    pub fn bind(address: &str) -> Result<Self, JoinError> {
        let open = || -> io::Result<TcpListener> {
            let mut last = io::Error::new(ErrorKind::InvalidInput, "the name has no address");
            for candidate in address.to_socket_addrs()? {
                match listen(candidate) {
                    Ok(listener) => return Ok(listener),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        let with_context = |source| JoinError::Listen { address: address.to_owned(), source };
        let listener = open().map_err(with_context)?;
        let address = listener.local_addr().map_err(with_context)?.to_string();
        Ok(Self { listener, address })
    }

    /// The address to register: the one bound to, with the port that was given.
    pub fn address(&self) -> &str {
        &self.address
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    // Before listening: the window that the handshake announces depends on it.
    set_buffers(&socket);
    socket.bind(&address.into())?;
    socket.listen(128)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Both neighbours, connected.
pub(super) struct Neighbours {
    pub next: Arc<TcpStream>,
    pub previous: Arc<TcpStream>,
}

/// Why waiting ended without what was waited for.
enum Stop {
    Deadline,
    /// Aborted, or the other half of the join has failed: nobody will read our reason.
    GivenUp,
    Broken(io::Error),
}

/// How long both halves of a join wait.
struct Patience<'a> {
    begin: Instant,
    deadline: Instant,
    abort: &'a RingAbort,
    given_up: AtomicBool,
}

/// Connects both neighbours of a world of at least two. `None` if it was aborted.
pub(super) fn join(
    listener: &RingListener,
    membership: &Membership<'_>,
    deadline: Instant,
    abort: &RingAbort,
) -> Result<Option<Neighbours>, JoinError> {
    let (rank, world) = (membership.rank.0 as usize, membership.peers.len());
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    let hello = Hello::new(membership.run, membership.generation, rank, next, world);
    let awaited = Hello::new(membership.run, membership.generation, previous, rank, world);
    let patience = Patience { begin: Instant::now(), deadline, abort, given_up: AtomicBool::new(false) };
    let (called, came) = std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let called = call(&membership.peers[next], Rank(next as u32), &hello, &patience);
            patience.note(&called);
            called
        });
        let came = await_call(listener, Rank(previous as u32), &awaited, &patience);
        patience.note(&came);
        (caller.join(), came)
    });
    let called = called.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    match (called, came) {
        (Err(Some(error)), _) | (_, Err(Some(error))) => Err(error),
        (Ok(next), Ok(previous)) => {
            Ok(Some(Neighbours { next: Arc::new(next), previous: Arc::new(previous) }))
        }
        _ => Ok(None),
    }
}

/// The outcome of half a join; `Err(None)` if it was given up for a reason known elsewhere.
type Half = Result<TcpStream, Option<JoinError>>;

impl Patience<'_> {
    fn note(&self, half: &Half) {
        if half.is_err() {
            self.given_up.store(true, Ordering::Relaxed);
        }
    }

    fn check(&self) -> Result<(), Stop> {
        if self.given_up.load(Ordering::Relaxed) || self.abort.reason().is_some() {
            return Err(Stop::GivenUp);
        }
        if Instant::now() >= self.deadline { Err(Stop::Deadline) } else { Ok(()) }
    }

    /// Waits for one of the sockets, at most `slice`.
    fn poll(&self, sockets: &mut [PollFd<'_>], slice: Duration) -> Result<(), Stop> {
        self.check()?;
        let left = self.deadline.saturating_duration_since(Instant::now()).min(slice);
        let timeout = PollTimeout::try_from(left.as_millis().max(1)).unwrap_or(PollTimeout::MAX);
        match poll(sockets, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(Stop::Broken(error.into())),
        }
    }

    /// Waits until the socket is ready.
    fn ready(&self, socket: BorrowedFd<'_>, flags: PollFlags) -> Result<(), Stop> {
        loop {
            let mut sockets = [PollFd::new(socket, flags)];
            self.poll(&mut sockets, SLICE)?;
            if sockets[0].any().unwrap_or(true) {
                return Ok(());
            }
        }
    }

    /// Lets time pass.
    fn pause(&self, pause: Duration) -> Result<(), Stop> {
        let until = Instant::now() + pause;
        while Instant::now() < until {
            self.poll(&mut [], until.saturating_duration_since(Instant::now()).min(SLICE))?;
        }
        Ok(())
    }
}

/// Why one call failed.
enum Missed {
    /// Worth another try.
    Again(String),
    /// Not.
    Refused(Verdict, Generation),
    Stop(Stop),
}

impl From<Stop> for Missed {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

impl From<io::Error> for Missed {
    fn from(error: io::Error) -> Self {
        Self::Again(error.to_string())
    }
}

/// Calls `peer` until it welcomes this rank.
fn call(address: &str, peer: Rank, hello: &Hello, patience: &Patience<'_>) -> Half {
    let (mut pause, mut last) = (FIRST_PAUSE, "no attempt was made".to_owned());
    let stopped = loop {
        match call_once(address, hello, patience) {
            Ok(socket) => return Ok(socket),
            Err(Missed::Refused(verdict, generation)) => {
                let (address, reason) = (address.to_owned(), verdict.to_string());
                return Err(Some(JoinError::Refused { peer, address, generation, reason }));
            }
            Err(Missed::Again(why)) => last = why,
            Err(Missed::Stop(stop)) => break stop,
        }
        if let Err(stop) = patience.pause(pause) {
            break stop;
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    };
    Err(match stopped {
        Stop::GivenUp => None,
        Stop::Broken(error) => Some(JoinError::Wait(error)),
        Stop::Deadline => {
            let waited = patience.begin.elapsed();
            Some(JoinError::NoAnswer { peer, address: address.to_owned(), waited, last })
        }
    })
}

fn call_once(address: &str, hello: &Hello, patience: &Patience<'_>) -> Result<TcpStream, Missed> {
    let mut missed = Missed::Again("the name has no address".into());
    for candidate in address.to_socket_addrs()? {
        match dial(candidate, patience) {
            Ok(socket) => return introduce(socket, hello, patience),
            Err(Missed::Again(why)) => missed = Missed::Again(why),
            Err(other) => return Err(other),
        }
    }
    Err(missed)
}

fn dial(address: SocketAddr, patience: &Patience<'_>) -> Result<TcpStream, Missed> {
    patience.check()?;
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    set_buffers(&socket);
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(nix::errno::Errno::EINPROGRESS as i32) => {
            patience.ready(socket.as_fd(), PollFlags::POLLOUT)?;
            if let Some(error) = socket.take_error()? {
                return Err(error.into());
            }
        }
        Err(error) => return Err(error.into()),
    }
    prepare(&socket)?;
    Ok(socket.into())
}

fn introduce(mut socket: TcpStream, hello: &Hello, patience: &Patience<'_>) -> Result<TcpStream, Missed> {
    // A few bytes on a fresh connection: the kernel takes them at once or the connection is broken.
    socket.write_all(&hello.encode())?;
    let (mut answer, mut filled) = ([0; ANSWER], 0);
    while filled < ANSWER {
        patience.ready(socket.as_fd(), PollFlags::POLLIN)?;
        match socket.read(&mut answer[filled..]) {
            Ok(0) => return Err(Missed::Again("it closed the connection".into())),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    match decode_answer(&answer) {
        Some((Verdict::Welcome, _)) => {
            socket.write_all(&CONFIRM)?;
            Ok(socket)
        }
        Some((verdict, generation)) if verdict.may_change() => {
            Err(Missed::Again(format!("it is still in generation {generation}")))
        }
        Some((verdict, generation)) => Err(Missed::Refused(verdict, generation)),
        None => Err(Missed::Again("something else than a rank listens there".into())),
    }
}

/// Listens until `peer` has called, turning others away.
fn await_call(listener: &RingListener, peer: Rank, awaited: &Hello, patience: &Patience<'_>) -> Half {
    let (mut guests, mut refused) = (Vec::<Guest>::new(), 0);
    let stopped = loop {
        while let Ok((socket, _)) = listener.listener.accept() {
            guests.extend(Guest::new(socket));
            if guests.len() > MAX_GUESTS {
                guests.remove(0);
                refused += 1;
            }
        }
        let mut at = 0;
        while at < guests.len() {
            match guests[at].advance(awaited) {
                Progress::Waiting => at += 1,
                Progress::Joined => return Ok(guests.swap_remove(at).socket),
                Progress::Left => {
                    guests.swap_remove(at);
                    refused += 1;
                }
            }
        }
        let mut sockets = vec![PollFd::new(listener.listener.as_fd(), PollFlags::POLLIN)];
        sockets.extend(guests.iter().map(|guest| PollFd::new(guest.socket.as_fd(), PollFlags::POLLIN)));
        if let Err(stop) = patience.poll(&mut sockets, SLICE) {
            break stop;
        }
    };
    Err(match stopped {
        Stop::GivenUp => None,
        Stop::Broken(error) => Some(JoinError::Wait(error)),
        Stop::Deadline => {
            let (waited, address) = (patience.begin.elapsed(), listener.address.clone());
            Some(JoinError::NobodyCame { peer, address, waited, refused })
        }
    })
}

/// A connection that has not been let in yet.
struct Guest {
    socket: TcpStream,
    bytes: [u8; HELLO],
    filled: usize,
    welcome: bool,
}

enum Progress {
    Waiting,
    Joined,
    Left,
}

impl Guest {
    fn new(socket: TcpStream) -> Option<Self> {
        let prepared = socket.set_nonblocking(true).and_then(|()| prepare(SockRef::from(&socket)));
        prepared.ok().map(|()| Self { socket, bytes: [0; HELLO], filled: 0, welcome: false })
    }

    fn advance(&mut self, awaited: &Hello) -> Progress {
        loop {
            let wanted = if self.welcome { CONFIRM.len() } else { HELLO };
            match self.socket.read(&mut self.bytes[self.filled..wanted]) {
                Ok(0) => return Progress::Left,
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Progress::Waiting,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Progress::Left,
            }
            if self.filled < wanted {
                continue;
            }
            if self.welcome {
                return if self.bytes[..wanted] == CONFIRM { Progress::Joined } else { Progress::Left };
            }
            if !self.answer(awaited) {
                return Progress::Left;
            }
            (self.welcome, self.filled) = (true, 0);
        }
    }

    /// Says what we make of it; true if it is welcome.
    fn answer(&mut self, awaited: &Hello) -> bool {
        let from = self.socket.peer_addr().map(|address| address.to_string()).unwrap_or_default();
        let Some(hello) = Hello::decode(&self.bytes) else {
            tracing::warn!(from, "a stranger called the ring's port and was refused");
            return false;
        };
        let verdict = awaited.judge(&hello);
        if verdict != Verdict::Welcome {
            tracing::warn!(from, rank = hello.rank, generation = %hello.generation, ?verdict, "a rank was refused");
        }
        let sent = self.socket.write_all(&encode_answer(verdict, awaited.generation));
        sent.is_ok() && verdict == Verdict::Welcome
    }
}

/// Buffers are a wish: a kernel that grants less makes the ring slower, not wrong.
fn set_buffers(socket: &Socket) {
    let granted =
        socket.set_send_buffer_size(SOCKET_BUFFER).and_then(|()| socket.set_recv_buffer_size(SOCKET_BUFFER));
    if let Err(error) = granted {
        tracing::debug!(%error, "socket buffers keep their default size");
    }
}

/// No delay, and keep-alive so that a machine that vanished is noticed on an idle connection after about a minute. There is no
/// user timeout on purpose: it would also end connections to a neighbour that is alive and busy.
fn prepare<'a>(socket: impl Into<SockRef<'a>>) -> io::Result<()> {
    let socket = socket.into();
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10))
        .with_retries(3);
    socket.set_tcp_keepalive(&keepalive)
}
