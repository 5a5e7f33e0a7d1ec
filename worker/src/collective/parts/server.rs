//! Answers for the parts that this rank holds: a thread that accepts, and one for each rank that calls.
//!
//! It outlives generations. What it hands out is whatever cut this rank holds now; a caller that means
//! another one is told that it is not here. Bytes go from where they are held to the socket, without a copy.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, ErrorKind, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use coxswain_identity::Tokens;
use coxswain_nn::sharded::{Cut, HeldParts};
use coxswain_proto::limits::ACCEPT_PAUSE;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::wire::{ANSWER, Greeting, GreetingReply, NOT_HERE, OPENING, encode_answer, hear};
use crate::collective::{
    proof::{NONCE, PROOF, RingKey, Role, Transcript, nonce},
    ring::{listen, prepare},
};

/// For a caller to say who it is, and to take what it has asked for.
const PATIENCE: Duration = Duration::from_secs(10);
/// Callers at a time that have not proved yet to be ranks: each is a thread. The one that is there for
/// longest makes room for the next.
pub(super) const STRANGERS: usize = 64;

/// What is answered for, and to whom.
struct Answers {
    parts: Arc<dyn HeldParts>,
    run: [u8; 32],
    blocks: [u8; 32],
    tokens: Option<Tokens>,
    callers: Mutex<Callers>,
}

/// Connections, to be closed with the server. A rank has one to each other rank.
#[derive(Default)]
struct Callers {
    next: u64,
    strangers: BTreeMap<u64, TcpStream>,
    ranks: HashMap<u64, TcpStream>,
    closed: bool,
}

/// Answers for this rank's parts until it is dropped.
pub struct PartServer {
    address: SocketAddr,
    answers: Arc<Answers>,
    /// Ends the thread that accepts.
    wake: UnixStream,
    accepting: Option<JoinHandle<()>>,
}

impl PartServer {
    /// Listens on any port of `ip` for ranks of `run` that prove one of `tokens`.
    pub fn start(
        ip: IpAddr,
        run: [u8; 32],
        parts: Arc<dyn HeldParts>,
        tokens: Option<Tokens>,
    ) -> io::Result<Self> {
        let listener = listen(SocketAddr::new(ip, 0))?;
        let address = listener.local_addr()?;
        let (wake, woken) = UnixStream::pair()?;
        let blocks = parts.digest();
        let answers = Arc::new(Answers { parts, run, blocks, tokens, callers: Mutex::default() });
        let ours = Arc::clone(&answers);
        let body = move || accept(&listener, &woken, &ours);
        let accepting = Some(thread::Builder::new().name("parts".into()).spawn(body)?);
        Ok(Self { address, answers, wake, accepting })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for PartServer {
    fn drop(&mut self) {
        let mut callers = self.answers.callers();
        callers.closed = true;
        let sockets = callers.strangers.values().chain(callers.ranks.values());
        sockets.for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
        drop(callers);
        let _ = self.wake.shutdown(Shutdown::Both);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

/// Accepts until the other end of `woken` is closed.
fn accept(listener: &TcpListener, woken: &UnixStream, answers: &Arc<Answers>) {
    loop {
        let is_full = match listener.accept() {
            Ok((socket, _)) => {
                welcome(socket, answers);
                continue;
            }
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        };
        let ready = PollFlags::POLLIN;
        let mut sources = [PollFd::new(woken.as_fd(), ready), PollFd::new(listener.as_fd(), ready)];
        let (sources, timeout) = match is_full {
            true => (&mut sources[..1], PollTimeout::try_from(ACCEPT_PAUSE).unwrap_or(PollTimeout::ZERO)),
            false => (&mut sources[..], PollTimeout::NONE),
        };
        let polled = poll(sources, timeout);
        let is_over = sources[0].revents().is_some_and(|events| !events.is_empty());
        if is_over || polled.is_err_and(|errno| errno != nix::errno::Errno::EINTR) {
            return;
        }
    }
}

/// Answers a caller on a thread of its own, if there is room for one.
fn welcome(socket: TcpStream, answers: &Arc<Answers>) {
    let Ok(closing) = socket.try_clone() else { return };
    let Some(number) = answers.callers().enter(closing) else { return };
    let ours = Arc::clone(answers);
    let body = move || {
        if let Err(error) = ours.serve(&socket, number) {
            tracing::debug!(%error, "a rank that reads this rank's frozen weights has disconnected");
        }
        ours.callers().leave(number);
    };
    if thread::Builder::new().name("part".into()).spawn(body).is_err() {
        answers.callers().leave(number);
    }
}

impl Callers {
    fn enter(&mut self, socket: TcpStream) -> Option<u64> {
        if self.closed {
            return None;
        }
        let longest = (self.strangers.len() >= STRANGERS).then(|| self.strangers.pop_first()).flatten();
        if let Some((_, stranger)) = longest {
            // Its thread finds the end of its stream.
            let _ = stranger.shutdown(Shutdown::Both);
        }
        self.next += 1;
        self.strangers.insert(self.next, socket);
        Some(self.next)
    }

    /// A stranger has proved to be a rank; false if it has made room for another one.
    fn admit(&mut self, number: u64) -> bool {
        let socket = self.strangers.remove(&number);
        let is_there = socket.is_some();
        self.ranks.extend(socket.map(|socket| (number, socket)));
        is_there
    }

    fn leave(&mut self, number: u64) {
        self.strangers.remove(&number);
        self.ranks.remove(&number);
    }
}

impl Answers {
    fn callers(&self) -> MutexGuard<'_, Callers> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears a caller out until it closes the connection.
    fn serve(&self, mut socket: &TcpStream, number: u64) -> io::Result<()> {
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        prepare(socket)?;
        let Some(hello) = self.admit(socket)? else { return Ok(()) };
        if !self.callers().admit(number) {
            return Ok(());
        }
        // Between passes nothing is asked, however long that takes.
        socket.set_read_timeout(None)?;
        let cut = Cut { rank: hello.to as usize, world: hello.world as usize };
        loop {
            let block = u32::from_le_bytes(hear(socket)?) as usize;
            match self.parts.part(block, cut) {
                Some(part) => {
                    let bytes: &[u8] = (*part).as_ref();
                    socket.write_all(&(bytes.len() as u64).to_le_bytes())?;
                    socket.write_all(bytes)?;
                }
                None => socket.write_all(&NOT_HERE.to_le_bytes())?,
            }
        }
    }

    /// Who calls, if it is a rank of this run.
    fn admit(&self, mut socket: &TcpStream) -> io::Result<Option<Greeting>> {
        let opening: [u8; OPENING] = hear(socket)?;
        let known = Greeting::opened(&opening).and_then(|(hello, name)| {
            let key = RingKey::named(name, self.tokens.as_ref())?;
            Some((hello, key))
        });
        let Some((hello, key)) = known else {
            tracing::warn!(
                "rejected a connection to this rank's port for frozen weights: not from this run (another \
                 run, another COX_TOKEN?)"
            );
            return Ok(None);
        };
        let challenge: [u8; NONCE] = nonce().map_err(io::Error::other)?;
        socket.write_all(&challenge)?;
        let proof: [u8; PROOF] = hear(socket)?;
        let heard = Transcript { opening: &opening, challenge: &challenge, answer: &[] };
        if !key.proves(Role::Caller, &heard, proof) {
            tracing::warn!(
                "rejected a connection to this rank's port for frozen weights: the caller names a token \
                 of this run, but did not prove that it has it"
            );
            return Ok(None);
        }
        let verdict = hello.judge(&self.run, &self.blocks);
        let answer: [u8; ANSWER] = encode_answer(verdict);
        socket.write_all(&answer)?;
        socket.write_all(&key.prove(Role::Called, &Transcript { answer: &answer, ..heard }))?;
        Ok((verdict == GreetingReply::Welcome).then_some(hello))
    }
}
