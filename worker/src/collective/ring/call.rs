//! One half of forming a ring: calling the next rank until it welcomes this one.
//!
//! A rank that is not there yet, or still in an older generation, is called again until the deadline; one
//! that answers "another run", "another version" or "a newer generation" is not.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    os::fd::AsFd,
    time::Duration,
};

use coxswain_proto::ids::{Generation, Rank};
use nix::poll::PollFlags;
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    handshake::{ANSWER, Admission, CONFIRM, Hello, decode_answer},
    patience::{Half, Patience, Stop},
    sockets::prepare,
};
use crate::collective::JoinError;

/// A rank that cannot be reached is called again after this long, doubling up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// Why one call failed.
enum Missed {
    /// Worth another try.
    Again(String),
    /// Not.
    Refused(Admission, Generation),
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
pub(super) fn call(address: &str, peer: Rank, hello: &Hello, patience: &Patience<'_>) -> Half {
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
        Some((Admission::Welcome, _)) => {
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
