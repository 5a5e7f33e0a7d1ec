//! The other half of forming a ring: listening until the previous rank has called.
//!
//! Any other process that connects in the meantime does not hold up the ring: connections that have yet to
//! prove who they are wait side by side. A rank in the wrong place is told why it is refused; who has no
//! token of this ring's is told nothing.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    os::fd::AsFd,
};

use coxswain_identity::Tokens;
use coxswain_proto::ids::Rank;
use nix::poll::{PollFd, PollFlags};
use socket2::SockRef;

use super::{
    handshake::{Admission, CONFIRM, Hello, OPENING, encode_answer},
    patience::{Half, Patience, SLICE, Stop},
    sockets::{RingListener, prepare},
};
use crate::collective::{
    JoinError,
    proof::{NONCE, PROOF, RingKey, Role, Transcript, nonce},
};

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
            match guests[at].advance(awaited, listener.tokens.as_ref()) {
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
    bytes: [u8; OPENING],
    filled: usize,
    stage: Stage,
}

/// What is waited for.
enum Stage {
    Opening,
    /// Proof, after the challenge.
    Proof(Box<GuestHandshake>),
    Confirm,
}

/// What a guest said, and what it was asked.
struct GuestHandshake {
    hello: Hello,
    key: RingKey,
    opening: [u8; OPENING],
    challenge: [u8; NONCE],
}

enum GuestProgress {
    Waiting,
    Joined,
    Left,
}

impl Guest {
    fn new(socket: TcpStream) -> Option<Self> {
        let prepared = socket.set_nonblocking(true).and_then(|()| prepare(SockRef::from(&socket)));
        prepared.ok().map(|()| Self { socket, bytes: [0; OPENING], filled: 0, stage: Stage::Opening })
    }

    fn advance(&mut self, awaited: &Hello, tokens: Option<&Tokens>) -> GuestProgress {
        loop {
            let wanted = match self.stage {
                Stage::Opening => OPENING,
                Stage::Proof(_) => PROOF,
                Stage::Confirm => CONFIRM.len(),
            };
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
            let next = match &self.stage {
                Stage::Opening => self.challenge(tokens),
                Stage::Proof(opened) => self.answer(opened, awaited).then_some(Stage::Confirm),
                Stage::Confirm if self.bytes[..wanted] == CONFIRM => return GuestProgress::Joined,
                Stage::Confirm => None,
            };
            let Some(next) = next else { return GuestProgress::Left };
            (self.stage, self.filled) = (next, 0);
        }
    }

    /// Asks it to prove who it is; nothing for one that speaks another language, or names no key of ours.
    fn challenge(&self, tokens: Option<&Tokens>) -> Option<Stage> {
        let Some((hello, name)) = Hello::opened(&self.bytes) else {
            tracing::warn!(
                from = self.from(),
                "rejected a connection to the ring's port: not a rank of this run"
            );
            return None;
        };
        let Some(key) = RingKey::named(name, tokens) else {
            tracing::warn!(
                from = self.from(),
                "rejected a connection to the ring's port: it did not present a token of this run \
                 (another run, another COX_TOKEN?)"
            );
            return None;
        };
        let challenge = nonce().ok()?;
        (&self.socket).write_all(&challenge).ok()?;
        Some(Stage::Proof(Box::new(GuestHandshake { hello, key, opening: self.bytes, challenge })))
    }

    /// Says what we make of it, if it has proved that it is one of ours; true if it is welcome.
    fn answer(&self, opened: &GuestHandshake, awaited: &Hello) -> bool {
        let GuestHandshake { hello, key, opening, challenge } = opened;
        let heard = Transcript { opening, challenge, answer: &[] };
        if !key.proves(Role::Caller, &heard, std::array::from_fn(|i| self.bytes[i])) {
            tracing::warn!(
                from = self.from(),
                "rejected a connection to the ring's port: the caller names a token of this run, \
                 but did not prove that it has it"
            );
            return false;
        }
        let verdict = awaited.judge(hello);
        if verdict != Admission::Welcome {
            tracing::warn!(
                from = self.from(), rank = hello.rank, generation = %hello.generation, ?verdict, "rejected a rank that connected to the ring"
            );
        }
        let answer = encode_answer(verdict, awaited.generation);
        let proof = key.prove(Role::Called, &Transcript { answer: &answer, ..heard });
        let sent = (&self.socket).write_all(&[&answer[..], &proof[..]].concat());
        sent.is_ok() && verdict == Admission::Welcome
    }

    fn from(&self) -> String {
        self.socket.peer_addr().map(|address| address.to_string()).unwrap_or_default()
    }
}
