//! One half of forming a ring: calling the next rank until it welcomes this one.
//!
//! A rank that is not there yet, or still in an older generation, is called again until the deadline; one
//! that answers "another run", "another version" or "a newer generation" is not. An answer counts if it comes
//! with a proof that a rank of this ring has given it.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    os::fd::AsFd,
    time::Duration,
};

use coxswain_identity::{IdentityError, Tokens};
use coxswain_proto::ids::{Generation, Rank};
use nix::poll::PollFlags;
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    handshake::{ANSWER, Admission, CONFIRM, Hello, PROVEN_ANSWER, decode_answer},
    patience::{Half, Patience, Stop},
    sockets::prepare,
};
use crate::collective::{
    JoinError,
    proof::{NONCE, RingKey, Role, Transcript, nonce},
};

/// A rank that cannot be reached is called again after this long, doubling up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// Why one call failed.
enum Miss {
    /// Worth another try.
    Again(String),
    /// Not.
    Refused(Admission, Generation),
    Stop(Stop),
}

impl From<Stop> for Miss {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

impl From<io::Error> for Miss {
    fn from(error: io::Error) -> Self {
        Self::Again(error.to_string())
    }
}

impl From<IdentityError> for Miss {
    fn from(error: IdentityError) -> Self {
        Self::Again(error.to_string())
    }
}

/// What a rank says when it calls, and the tokens by which it is known.
pub(super) struct Introduction<'a> {
    pub hello: Hello,
    pub tokens: Option<&'a Tokens>,
}

/// Calls `peer` until it welcomes this rank.
pub(super) fn call(address: &str, peer: Rank, ours: &Introduction<'_>, patience: &Patience<'_>) -> Half {
    let (mut pause, mut last) = (FIRST_PAUSE, "no attempt was made".to_owned());
    let stopped = loop {
        match call_once(address, ours, patience) {
            Ok(socket) => return Ok(socket),
            Err(Miss::Refused(verdict, generation)) => {
                let (address, reason) = (address.to_owned(), verdict.to_string());
                return Err(Some(JoinError::Refused { peer, address, generation, reason }));
            }
            Err(Miss::Again(why)) => last = why,
            Err(Miss::Stop(stop)) => break stop,
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

fn call_once(address: &str, ours: &Introduction<'_>, patience: &Patience<'_>) -> Result<TcpStream, Miss> {
    let mut missed = Miss::Again("the name has no address".into());
    for candidate in address.to_socket_addrs()? {
        match dial(candidate, patience) {
            Ok(socket) => return introduce(socket, ours, patience),
            Err(Miss::Again(why)) => missed = Miss::Again(why),
            Err(other) => return Err(other),
        }
    }
    Err(missed)
}

fn dial(address: SocketAddr, patience: &Patience<'_>) -> Result<TcpStream, Miss> {
    patience.check()?;
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
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

fn introduce(
    mut socket: TcpStream,
    ours: &Introduction<'_>,
    patience: &Patience<'_>,
) -> Result<TcpStream, Miss> {
    // The token that is valid now, each time.
    let key = RingKey::to_call(ours.tokens);
    let opening = ours.hello.first_bytes(key.name, nonce()?);
    // Few bytes on a fresh connection: the kernel takes them at once or the connection is broken.
    socket.write_all(&opening)?;
    let challenge: [u8; NONCE] = hear(&socket, patience)?;
    let asked = Transcript { opening: &opening, challenge: &challenge, answer: &[] };
    socket.write_all(&key.prove(Role::Caller, &asked))?;
    let proven: [u8; PROVEN_ANSWER] = hear(&socket, patience)?;
    let answer: [u8; ANSWER] = std::array::from_fn(|i| proven[i]);
    let proof = std::array::from_fn(|i| proven[ANSWER + i]);
    if !key.proves(Role::Called, &Transcript { answer: &answer, ..asked }, proof) {
        return Err(Miss::Again("a program that is not a rank of this run listens there".into()));
    }
    match decode_answer(&answer) {
        Some((Admission::Welcome, _)) => {
            socket.write_all(&CONFIRM)?;
            Ok(socket)
        }
        Some((verdict, generation)) if verdict.may_change() => {
            Err(Miss::Again(format!("it is still in generation {generation}")))
        }
        Some((verdict, generation)) => Err(Miss::Refused(verdict, generation)),
        None => Err(Miss::Again("its answer is not understood; does it run the same cox version?".into())),
    }
}

fn hear<const N: usize>(mut socket: &TcpStream, patience: &Patience<'_>) -> Result<[u8; N], Miss> {
    let (mut bytes, mut filled) = ([0; N], 0);
    while filled < N {
        patience.ready(socket.as_fd(), PollFlags::POLLIN)?;
        match socket.read(&mut bytes[filled..]) {
            Ok(0) => {
                let why = "it closed the connection, perhaps because its COX_TOKEN or COX_TOKEN_FILE differs";
                return Err(Miss::Again(why.into()));
            }
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}
