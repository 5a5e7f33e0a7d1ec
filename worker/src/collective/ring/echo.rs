//! Before a ring carries anything, each rank sends the next one a known message, which comes back.
//!
//! ```text
//! this rank  -> next        one byte, and once that is back, the rest of the message
//! next       -> this rank   what it has of it, as it comes
//! ```
//!
//! The handshake was a few bytes, which pass where packets of full size are lost (an MTU that is too large
//! for the way), or are changed by what is not sound. Such a link is named with both of its ranks. The first
//! byte says that the neighbour has come this far: what it waits for before is not this link's fault.
//!
//! What this does not do: measure how fast a link is. Shared memory is not tried.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use coxswain_proto::ids::Rank;
use nix::poll::{PollFd, PollFlags};

use super::patience::{Patience, SLICE, Stop};
use crate::clock;
use crate::collective::JoinError;

/// More than any packet, and than what is cut into packets at once.
const MESSAGE: usize = 64 << 10;
/// How long it may take there and back, once its first byte has.
pub(super) const LIMIT: Duration = Duration::from_secs(10);

/// Both links of a rank; those to be tried.
pub(super) struct Links<'a> {
    pub rank: Rank,
    pub next: (Rank, Option<&'a TcpStream>),
    pub previous: (Rank, Option<&'a TcpStream>),
}

/// Why a link is not tried to the end.
enum EchoFailure {
    Stop(Stop),
    Fails(String),
}

impl From<Stop> for EchoFailure {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// One direction of the message on one link: how far it has come, and since when it is there.
struct Way<'a> {
    socket: &'a TcpStream,
    sent: usize,
    heard: usize,
    began: Option<Instant>,
}

impl<'a> Way<'a> {
    fn from_socket(socket: &'a TcpStream) -> Self {
        Self { socket, sent: 0, heard: 0, began: None }
    }

    /// Sends up to `end` bytes of the message; whether any went.
    fn send(&mut self, end: usize, message: &[u8]) -> Result<bool, EchoFailure> {
        let rest = message.get(self.sent..end).unwrap_or_default();
        let mut socket = self.socket;
        let count = moved(rest.is_empty(), || socket.write(rest))?;
        self.sent += count;
        Ok(count > 0)
    }

    /// Hears more of the message; whether any came.
    fn hear(&mut self, message: &[u8]) -> Result<bool, EchoFailure> {
        let mut bytes = [0; 4096];
        let room = bytes.len().min(message.len() - self.heard);
        let mut socket = self.socket;
        let count = moved(room == 0, || match socket.read(&mut bytes[..room]) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            read => read,
        })?;
        let due = message.iter().skip(self.heard);
        if let Some(at) = bytes[..count].iter().zip(due).position(|(found, due)| found != due) {
            let (at, size) = (self.heard + at, message.len());
            return Err(EchoFailure::Fails(format!(
                "byte {at} of a test message of {size} bytes was corrupted in transit"
            )));
        }
        self.heard += count;
        if count > 0 {
            self.began.get_or_insert_with(clock::now);
        }
        Ok(count > 0)
    }

    /// How much of this rank's own message it may send: all of it once its first byte is back.
    fn may_send(&self) -> usize {
        if self.heard == 0 { 1 } else { MESSAGE }
    }

    /// What there is to wait for, where the message may be sent up to `end`.
    fn waits_for(&self, end: usize) -> PollFd<'_> {
        let out = if self.sent < end { PollFlags::POLLOUT } else { PollFlags::empty() };
        PollFd::new(self.socket.as_fd(), PollFlags::POLLIN | out)
    }

    fn whole(&self) -> bool {
        self.sent == MESSAGE && self.heard == MESSAGE
    }

    /// An error once it has been too long on its way.
    fn in_time(&self, limit: Duration) -> Result<(), EchoFailure> {
        match self.began {
            Some(began) if !self.whole() && began.elapsed() >= limit => Err(self.late(limit)),
            _ => Ok(()),
        }
    }

    fn late(&self, limit: Duration) -> EchoFailure {
        let (heard, seconds) = (self.heard, limit.as_secs_f64());
        EchoFailure::Fails(format!(
            "only {heard} of {MESSAGE} bytes of a test message arrived within {seconds:.1} s: are full-size packets lost \
             (MTU)?"
        ))
    }
}

/// Tries both links at the same time. `None` if it was given up for a reason known elsewhere.
pub(super) fn check(
    links: &Links<'_>,
    limit: Duration,
    patience: &Patience<'_>,
) -> Result<Option<()>, JoinError> {
    let message: Vec<u8> =
        (0..MESSAGE as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut next = links.next.1.map(Way::from_socket);
    let mut previous = links.previous.1.map(Way::from_socket);
    let all = |way: &Option<Way<'_>>| way.as_ref().is_none_or(Way::whole);
    while !(all(&next) && all(&previous)) {
        let out = next.as_mut().map_or(Ok(false), |way| there(way, &message, limit));
        let moved_out = match out {
            Ok(moved) => moved,
            Err(ended) => return told(ended, (links.rank, links.next.0), links.next.0),
        };
        let back = previous.as_mut().map_or(Ok(false), |way| and_back(way, &message, limit));
        let moved_back = match back {
            Ok(moved) => moved,
            Err(ended) => return told(ended, (links.previous.0, links.rank), links.previous.0),
        };
        if !moved_out && !moved_back {
            let out = next.as_ref().filter(|way| !way.whole()).map(|way| way.waits_for(way.may_send()));
            let back = previous.as_ref().filter(|way| !way.whole()).map(|way| way.waits_for(way.heard));
            let mut sockets: Vec<_> = [out, back].into_iter().flatten().collect();
            if let Err(stop) = patience.poll(&mut sockets, SLICE) {
                let (link, peer) = match all(&next) {
                    true => ((links.previous.0, links.rank), links.previous.0),
                    false => ((links.rank, links.next.0), links.next.0),
                };
                let way = if all(&next) { &previous } else { &next };
                let ended = match (stop, way) {
                    (Stop::Deadline, Some(way)) => way.late(patience.begin.elapsed()),
                    (stop, _) => stop.into(),
                };
                return told(ended, link, peer);
            }
        }
    }
    Ok(Some(()))
}

/// This rank's message, to the next one and back; whether anything moved.
fn there(way: &mut Way<'_>, message: &[u8], limit: Duration) -> Result<bool, EchoFailure> {
    let sent = way.send(way.may_send(), message)?;
    let heard = way.hear(message)?;
    way.in_time(limit)?;
    Ok(sent || heard)
}

/// The previous rank's message, which goes back as far as it has come.
fn and_back(way: &mut Way<'_>, message: &[u8], limit: Duration) -> Result<bool, EchoFailure> {
    let heard = way.hear(message)?;
    let sent = way.send(way.heard, message)?;
    way.in_time(limit)?;
    Ok(sent || heard)
}

/// What was moved; nothing where there is nothing to move, or no room for it now.
fn moved(idle: bool, mut operation: impl FnMut() -> std::io::Result<usize>) -> Result<usize, EchoFailure> {
    if idle {
        return Ok(0);
    }
    match operation() {
        Ok(count) => Ok(count),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(Stop::Broken(error).into()),
    }
}

fn told(ended: EchoFailure, link: (Rank, Rank), peer: Rank) -> Result<Option<()>, JoinError> {
    let (from, to) = link;
    match ended {
        EchoFailure::Stop(Stop::GivenUp) => Ok(None),
        EchoFailure::Stop(Stop::Broken(source)) => Err(JoinError::Left { peer, source }),
        EchoFailure::Stop(Stop::Deadline) => {
            Err(JoinError::Left { peer, source: ErrorKind::TimedOut.into() })
        }
        EchoFailure::Fails(why) => Err(JoinError::Link { from, to, why }),
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;
    use crate::collective::ring::abort::RingAbort;

    const SHORT: Duration = Duration::from_millis(200);

    fn pair() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let called = TcpStream::connect(listener.local_addr().expect("it listens")).expect("it listens");
        let came = listener.accept().expect("it was called").0;
        [called, came]
    }

    /// What rank 0 (`next` alone) and rank 1 (`previous` alone) say of a link that does this to what passes
    /// from 0 to 1: the bytes that are let through, each with its place.
    fn tried(pass: impl Fn(usize, u8) -> Option<u8> + Send) -> [Result<Option<()>, String>; 2] {
        let ([caller, mut entrance], [exit, called]) = (pair(), pair());
        caller.set_nonblocking(true).expect("a socket");
        called.set_nonblocking(true).expect("a socket");
        let ends = |rank, link| {
            let (abort, deadline) = (RingAbort::new(), clock::now() + Duration::from_secs(60));
            let links = match rank {
                0 => Links { rank: Rank(0), next: (Rank(1), Some(link)), previous: (Rank(1), None) },
                _ => Links { rank: Rank(1), next: (Rank(0), None), previous: (Rank(0), Some(link)) },
            };
            check(&links, SHORT, &Patience::new(deadline, &abort)).map_err(|error| error.to_string())
        };
        thread::scope(|scope| {
            let mut back = (exit.try_clone().expect("a socket"), entrance.try_clone().expect("a socket"));
            scope.spawn(move || std::io::copy(&mut back.0, &mut back.1));
            scope.spawn(move || {
                let (mut at, mut bytes) = (0, [0; 1000]);
                while let Ok(count @ 1..) = entrance.read(&mut bytes) {
                    let passed: Vec<u8> =
                        bytes[..count].iter().zip(at..).filter_map(|(byte, at)| pass(at, *byte)).collect();
                    at += count;
                    if (&exit).write_all(&passed).is_err() {
                        break;
                    }
                }
            });
            let other = scope.spawn(|| {
                let heard_of_it = ends(1, &called);
                drop(called.shutdown(std::net::Shutdown::Both));
                heard_of_it
            });
            let heard_of_it = ends(0, &caller);
            drop(caller.shutdown(std::net::Shutdown::Both));
            [heard_of_it, other.join().expect("it does not panic")]
        })
    }

    #[test]
    fn a_link_that_is_sound_is_no_news() {
        assert_eq!(tried(|_, byte| Some(byte)), [const { Ok(Some(())) }; 2]);
    }

    #[test]
    fn a_link_that_changes_a_byte_is_named_with_both_ranks() {
        let [_, called] = tried(|at, byte| Some(if at == 40_000 { byte ^ 4 } else { byte }));
        let told = called.expect_err("it has changed");
        assert!(told.contains("the link from rank 0 to rank 1") && told.contains("byte 40000 of"), "{told}");
    }

    #[test]
    fn a_link_on_which_full_packets_are_lost_is_named_with_both_ranks() {
        let heard_of_it = tried(|at, byte| (at < 512).then_some(byte));
        for told in heard_of_it.map(|heard_of_it| heard_of_it.expect_err("most is lost")) {
            let lost = told.contains("the link from rank 0 to rank 1") && told.contains("512 of 65536 bytes");
            assert!(lost || told.contains("left while"), "{told}");
        }
    }
}
