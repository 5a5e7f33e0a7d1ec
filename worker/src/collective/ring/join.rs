//! Forming a ring: every rank calls the next one and waits for the call of the previous one, at the same time.
//!
//! Here are what both halves share: the membership, the listening socket, how long to wait, and how sockets are set up. The halves
//! are `call` and `welcome`; `offer` follows when both are done.

use std::{
    io::{self, ErrorKind},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    os::fd::BorrowedFd,
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
    call::call,
    handshake::Hello,
    lane::{Inbound, Outbound},
    offer::{self, Lost},
    welcome::await_call,
};

/// Send buffer of a connection within one machine. What is in flight then stays in the L2 cache: measured on loopback, an
/// all-reduce takes half the processor time that it takes with 4 MiB. Less than three packets of the loopback device (64 KiB) must
/// not be: the sender would wait for delayed acknowledgements. The kernel doubles it for its bookkeeping.
const SAME_HOST_SEND_BUFFER: usize = 192 << 10;
/// Deadline, abort and the other half of the join are looked at this often.
pub(super) const SLICE: Duration = Duration::from_millis(20);
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
    /// A neighbour that had been found left again.
    #[error("rank {peer} left while the ring was formed: {source}")]
    Left {
        /// The neighbour.
        peer: Rank,
        /// How it was noticed.
        source: io::Error,
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
    /// Ranks in the ring.
    pub world: usize,
    /// Where the next rank listens.
    pub next: &'a str,
}

impl<'a> Membership<'a> {
    /// The membership of `rank` in a ring whose ranks listen at `addresses`, in rank order. Panics if `rank` is not among them.
    pub fn among(run: &'a str, generation: Generation, rank: Rank, addresses: &'a [String]) -> Self {
        let next = &addresses[(rank.0 as usize + 1) % addresses.len()];
        Self { run, generation, rank, world: addresses.len(), next }
    }
}

/// Where the previous rank calls. Opened before registration, because its address is what is registered; it outlives
/// generations.
#[derive(Debug)]
pub struct RingListener {
    pub(super) listener: TcpListener,
    address: String,
    shared_memory: bool,
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
        Ok(Self { listener, address, shared_memory: true })
    }

    /// Whether neighbours on the same machine may use shared memory; they do if this is not called.
    pub fn with_shared_memory(self, allowed: bool) -> Self {
        Self { shared_memory: allowed, ..self }
    }

    /// The address to register: the one bound to, with the port that was given.
    pub fn address(&self) -> &str {
        &self.address
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(128)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Both neighbours, connected, and the ways to them.
pub(super) struct Neighbours {
    pub sockets: [Arc<TcpStream>; 2],
    pub next: Outbound,
    pub previous: Inbound,
}

/// Why waiting ended without what was waited for.
pub(super) enum Stop {
    Deadline,
    /// Aborted, or the other half of the join has failed: nobody will read our reason.
    GivenUp,
    Broken(io::Error),
}

/// How long both halves of a join wait.
pub(super) struct Patience<'a> {
    pub begin: Instant,
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
    let (rank, world) = (membership.rank.0 as usize, membership.world);
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    let hello = Hello::new(membership.run, membership.generation, rank, next, world);
    let awaited = Hello::new(membership.run, membership.generation, previous, rank, world);
    let patience = Patience { begin: Instant::now(), deadline, abort, given_up: AtomicBool::new(false) };
    let (called, came) = std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let called = call(membership.next, Rank(next as u32), &hello, &patience);
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
        (Ok(called), Ok(came)) => {
            let lost = match offer::agree(&called, &came, listener.shared_memory, &patience) {
                Ok((writer, reader)) => {
                    let (called, came) = (Arc::new(called), Arc::new(came));
                    return Ok(Some(Neighbours {
                        sockets: [called.clone(), came.clone()],
                        next: Outbound::new(called, writer),
                        previous: Inbound::new(came, reader),
                    }));
                }
                Err(lost) => lost,
            };
            let (peer, stop) = match lost {
                Lost::Next(stop) => (next, stop),
                Lost::Previous(stop) => (previous, stop),
            };
            let peer = Rank(peer as u32);
            match stop {
                Stop::GivenUp => Ok(None),
                Stop::Broken(source) => Err(JoinError::Left { peer, source }),
                Stop::Deadline => Err(JoinError::Left { peer, source: ErrorKind::TimedOut.into() }),
            }
        }
        _ => Ok(None),
    }
}

/// The outcome of half a join; `Err(None)` if it was given up for a reason known elsewhere.
pub(super) type Half = Result<TcpStream, Option<JoinError>>;

impl Patience<'_> {
    fn note(&self, half: &Half) {
        if half.is_err() {
            self.given_up.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn check(&self) -> Result<(), Stop> {
        if self.given_up.load(Ordering::Relaxed) || self.abort.reason().is_some() {
            return Err(Stop::GivenUp);
        }
        if Instant::now() >= self.deadline { Err(Stop::Deadline) } else { Ok(()) }
    }

    /// Waits for one of the sockets, at most `slice`.
    pub(super) fn poll(&self, sockets: &mut [PollFd<'_>], slice: Duration) -> Result<(), Stop> {
        self.check()?;
        let left = self.deadline.saturating_duration_since(Instant::now()).min(slice);
        let timeout = PollTimeout::try_from(left.as_millis().max(1)).unwrap_or(PollTimeout::MAX);
        match poll(sockets, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(Stop::Broken(error.into())),
        }
    }

    /// Waits until the socket is ready.
    pub(super) fn ready(&self, socket: BorrowedFd<'_>, flags: PollFlags) -> Result<(), Stop> {
        loop {
            let mut sockets = [PollFd::new(socket, flags)];
            self.poll(&mut sockets, SLICE)?;
            if sockets[0].any().unwrap_or(true) {
                return Ok(());
            }
        }
    }

    /// Lets time pass.
    pub(super) fn pause(&self, pause: Duration) -> Result<(), Stop> {
        let until = Instant::now() + pause;
        while Instant::now() < until {
            self.poll(&mut [], until.saturating_duration_since(Instant::now()).min(SLICE))?;
        }
        Ok(())
    }
}

/// No delay, and keep-alive so that a machine that vanished is noticed on an idle connection after about a minute. There is no
/// user timeout on purpose: it would also end connections to a neighbour that is alive and busy. Buffers between machines are
/// left to the kernel, which grows them as the network needs.
pub(super) fn prepare<'a>(socket: impl Into<SockRef<'a>>) -> io::Result<()> {
    let socket = socket.into();
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10))
        .with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    let ip = |address: socket2::SockAddr| address.as_socket().map(|address| address.ip());
    let (ours, theirs) = (ip(socket.local_addr()?), ip(socket.peer_addr()?));
    if ours == theirs || theirs.is_some_and(|ip| ip.is_loopback()) {
        socket.set_send_buffer_size(SAME_HOST_SEND_BUFFER)?;
    }
    Ok(())
}
