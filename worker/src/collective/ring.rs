//! The ring: collectives of ranks on CPUs, each connected to the next one and to the previous one, by TCP or,
//! within a machine, by shared memory.
//!
//! ```text
//! element, wire    numbers and headers
//! plan             each collective as spans of a buffer
//! pump             moves one stream out and one stream in, at the same time
//! ahead            what has come in of a collective that this rank has not entered yet
//! abort            ends a ring from another thread
//! handshake        who may join, which proof of a token decides (`super::proof`)
//! join             how the ring is formed, in two halves: call and welcome; then offer and echo
//! patience         how long both halves wait
//! lane, shared     the way to a neighbour: a socket, or memory that both have mapped
//! connected        a rank's place in a ring: one collective after the other, until the first failure
//! operations       what each collective makes of that
//! ```
//!
//! **Bandwidth.** A buffer of `n` bytes is cut in `W` chunks. Reduce-scatter sends a chunk in each of `W - 1`
//! rounds, adding what comes in; all-gather passes the finished chunks round again; all-reduce is one after
//! the other without a pause between them:
//!
//! ```text
//! bytes sent by each rank:  reduce-scatter, all-gather  n (W-1)/W    all-reduce  2 n (W-1)/W    broadcast  n
//! ```
//!
//! which is the least possible. Chunk `c` is reduced in the order of ranks `c+1, c+2, .., c`; this order
//! depends on nothing else.
//!
//! **Latency.** A small all-reduce (a vote) passes everyone's values once around, `W - 1` hops instead of `2
//! (W - 1)`, and each rank then reduces them in the order above, so that both paths give the same bits. Hops
//! are linear in `W`: this ring is for laptops, tests and a few nodes; GPU clusters have NCCL.
//!
//! **Failure.** The first error ends the ring: its sockets are shut down, so the neighbours fail too, and so
//! on all the way round. Ranks that go on form the ring of the next generation.

mod abort;
mod ahead;
mod call;
mod connected;
mod echo;
mod element;
mod handshake;
mod join;
mod lane;
mod offer;
mod operations;
mod patience;
mod plan;
mod pump;
mod shared;
mod sockets;
mod welcome;
mod wire;

pub use abort::RingAbort;
pub use ahead::GatherPeek;
pub use connected::Ring;
pub(super) use connected::{Call, Entry};
pub(super) use element::Element;
pub use join::Membership;
pub use sockets::RingListener;
pub(super) use sockets::{listen, prepare};
pub(super) use wire::Operation;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::{loopback, loopback_over};
