//! The other half of forming a ring: listening until the previous rank has called.
//!
//! Any other process that connects in the meantime is told why it is refused, and does not hold up the ring:
//! connections that have yet to say who they are wait side by side.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    os::fd::AsFd,
};

use coxswain_proto::ids::Rank;
use nix::poll::{PollFd, PollFlags};
use socket2::SockRef;

use super::{
    handshake::{Admission, CONFIRM, HELLO, Hello, encode_answer},
    patience::{Half, Patience, SLICE, Stop},
    sockets::{RingListener, prepare},
};
use crate::collective::JoinError;

/// Connections that have not said yet who they are; more than this many strangers at once drop the oldest.
const MAX_GUESTS: usize = 64;

/// Listens until `peer` has called, turning others away.
pub(super) fn await_call(
    listener: &RingListener,
    peer: Rank,
    awaited: &Hello,
    patience: &Patience<'_>,
) -> Half {
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
                GuestProgress::Waiting => at += 1,
                GuestProgress::Joined => return Ok(guests.swap_remove(at).socket),
                GuestProgress::Left => {
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
            let (waited, address) = (patience.begin.elapsed(), listener.address().to_owned());
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

enum GuestProgress {
    Waiting,
    Joined,
    Left,
}

impl Guest {
    fn new(socket: TcpStream) -> Option<Self> {
        let prepared = socket.set_nonblocking(true).and_then(|()| prepare(SockRef::from(&socket)));
        prepared.ok().map(|()| Self { socket, bytes: [0; HELLO], filled: 0, welcome: false })
    }

    fn advance(&mut self, awaited: &Hello) -> GuestProgress {
        loop {
            let wanted = if self.welcome { CONFIRM.len() } else { HELLO };
            match self.socket.read(&mut self.bytes[self.filled..wanted]) {
                Ok(0) => return GuestProgress::Left,
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return GuestProgress::Waiting,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return GuestProgress::Left,
            }
            if self.filled < wanted {
                continue;
            }
            if self.welcome {
                return if self.bytes[..wanted] == CONFIRM {
                    GuestProgress::Joined
                } else {
                    GuestProgress::Left
                };
            }
            if !self.answer(awaited) {
                return GuestProgress::Left;
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
        if verdict != Admission::Welcome {
            tracing::warn!(from, rank = hello.rank, generation = %hello.generation, ?verdict, "a rank was refused");
        }
        let sent = self.socket.write_all(&encode_answer(verdict, awaited.generation));
        sent.is_ok() && verdict == Admission::Welcome
    }
}
