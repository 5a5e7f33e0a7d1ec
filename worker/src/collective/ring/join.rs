//! Forming a ring: every rank calls the next one and waits for the call of the previous one, at the same
//! time.
//!
//! The halves are `call` and `welcome`; `offer` and `echo` follow when both are done.

use std::{io::ErrorKind, net::TcpStream, sync::Arc, time::Instant};

use coxswain_proto::ids::{Generation, Rank};

use super::{
    abort::RingAbort,
    call::{Introduction, call},
    echo::{self, Links},
    handshake::Hello,
    lane::{Inbound, Outbound},
    offer::{self, LostNeighbour},
    patience::{Patience, Stop},
    sockets::RingListener,
    welcome::await_call,
};
use crate::collective::JoinError;

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
    /// The membership of `rank` in a ring whose ranks listen at `addresses`, in rank order. Panics if `rank`
    /// is not among them.
    pub fn among(run: &'a str, generation: Generation, rank: Rank, addresses: &'a [String]) -> Self {
        let next = &addresses[(rank.0 as usize + 1) % addresses.len()];
        Self { run, generation, rank, world: addresses.len(), next }
    }
}

/// Both neighbours, connected, and the ways to them.
pub(super) struct Neighbours {
    pub sockets: [Arc<TcpStream>; 2],
    pub next: Outbound,
    pub previous: Inbound,
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
    let ours = Introduction { hello, tokens: listener.tokens.as_ref() };
    let awaited = Hello::new(membership.run, membership.generation, previous, rank, world);
    let patience = Patience::new(deadline, abort);
    let (called, came) = std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let called = call(membership.next, Rank(next as u32), &ours, &patience);
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
                    let links = Links {
                        rank: membership.rank,
                        next: (Rank(next as u32), writer.is_none().then_some(&called)),
                        previous: (Rank(previous as u32), reader.is_none().then_some(&came)),
                    };
                    if echo::check(&links, echo::LIMIT, &patience)?.is_none() {
                        return Ok(None);
                    }
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
                LostNeighbour::Next(stop) => (next, stop),
                LostNeighbour::Previous(stop) => (previous, stop),
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
