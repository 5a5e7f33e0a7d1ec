//! What ranks say to each other: the collectives, as a trait with three implementations.
//!
//! | | for |
//! |---|---|
//! | [`Solo`] | a world of one: every operation is the identity |
//! | [`Ring`] | ranks on CPUs: a ring of TCP connections, and of shared memory between ranks of one machine |
//! | [`Carried`] | ranks on cards: a ring for votes and control, a [`Fabric`] (NCCL, in a crate of its own) for everything large |
//!
//! All ranks call the same operations in the same order with the same sizes. Reductions add in an order that depends on the
//! world size and on an element's place in the buffer alone, so a repeated run gives the same bits. A communicator lives on
//! one thread; only its [`AbortHandle`] and its [`Progress`] may leave it.
//!
//! In-place operations and broadcasts take buffers in a device's memory, too ([`BufMut::Device`]): a fabric that can reach them works on them
//! where they lie, everything else on a copy in host memory.
//!
//! Every implementation passes the same suite ([`conformance`]).

mod buffer;
mod carried;
pub mod conformance;
mod fabric;
mod mixture;
mod ring;
mod solo;

use std::sync::Arc;

use coxswain_proto::ids::Rank;

pub use buffer::{Buf, BufMut};
use buffer::{size_error, through_host};
pub use carried::{Brings, Carried, join};
pub use coxswain_nn::params::chunk;
pub use fabric::{Cargo, Fabric, FabricError, FabricId, FabricSource, Movement, Offer, Place, Transfer};
pub use mixture::Computes;
pub use ring::{Ahead, JoinError, Membership, Ring, RingAbort, RingListener};
#[cfg(test)]
pub(crate) use ring::{loopback, loopback_over};
pub use solo::Solo;

/// How values of different ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Sum.
    Sum,
    /// Largest.
    Max,
}

/// Why a collective did not finish.
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    /// A neighbour's connection broke: this rank is a victim.
    #[error("rank {peer} is gone (collective {sequence}, {operation}): {source}")]
    PeerLost {
        /// The neighbour.
        peer: Rank,
        /// Which collective of this communicator's life.
        sequence: u64,
        /// `all_reduce`, `reduce_scatter`, ...
        operation: &'static str,
        /// What the socket said.
        source: std::io::Error,
    },
    /// [`AbortHandle::abort`] was called.
    #[error("collective {sequence} ({operation}) was aborted: {reason}")]
    Aborted {
        /// Which collective of this communicator's life.
        sequence: u64,
        /// Which operation.
        operation: &'static str,
        /// As given to `abort`.
        reason: String,
    },
    /// Ranks disagree on what they are doing: a programming error, or two versions in one ring.
    #[error("rank {peer} is in another collective: {detail}")]
    Mismatch {
        /// The neighbour.
        peer: Rank,
        /// What both sides said.
        detail: String,
    },
    /// The ring could not be formed.
    #[error("cannot connect the ring: {0}")]
    Connect(#[from] JoinError),
    /// What carries large buffers has failed in a collective.
    #[error("collective {sequence} ({operation}) failed: {detail}")]
    Fabric {
        /// Which collective of this communicator's life.
        sequence: u64,
        /// Which operation.
        operation: &'static str,
        /// What the library said.
        detail: String,
    },
    /// What was asked for to carry large buffers is not there on all ranks.
    #[error("launch.collectives nccl: {0}; use `auto` or `ring`, or make it available on every machine")]
    NoFabric(String),
    /// Some ranks compute on cards, and others would have.
    #[error(
        "{stranded} would compute on the CPU for want of a card, and {on_cards} on cards: everybody would wait for the CPU in every step; \
         `cox selftest --device cuda` on that machine says what is missing; if it is meant, start those workers with --device cpu \
         (or COX_DEVICE=cpu), or all with launch.device=cpu"
    )]
    MixedDevices {
        /// Ranks without a card.
        stranded: String,
        /// Ranks with one.
        on_cards: String,
    },
    /// A buffer has the wrong length.
    #[error("{operation}: {detail}")]
    Size {
        /// Which operation.
        operation: &'static str,
        /// Expected and given.
        detail: String,
    },
}

/// A communicator of one generation.
pub trait Collective {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Ranks in the communicator.
    fn world(&self) -> usize;

    /// Every rank ends with the reduction of all ranks' `buffer`.
    fn all_reduce(&mut self, buffer: BufMut<'_>, reduce: Reduce) -> Result<(), CollectiveError>;

    /// `input` is `world` equal chunks; rank `r` ends with the reduction of all ranks' chunk `r` in `output`.
    /// `input` is scratch afterwards: implementations may reduce in place to save a copy.
    fn reduce_scatter(
        &mut self,
        input: BufMut<'_>,
        output: BufMut<'_>,
        reduce: Reduce,
    ) -> Result<(), CollectiveError>;

    /// Every rank ends with all ranks' `shard`, in rank order, in `output`.
    fn all_gather(&mut self, shard: Buf<'_>, output: BufMut<'_>) -> Result<(), CollectiveError>;

    /// `buffer` is cut by [`chunk`]; rank `r` ends with the reduction of all ranks' chunk `r` in its place.
    /// The other chunks are scratch afterwards. No second buffer is needed, and the length need not divide by the world.
    fn reduce_scatter_in_place(&mut self, buffer: BufMut<'_>, reduce: Reduce) -> Result<(), CollectiveError>;

    /// `buffer` is cut by [`chunk`] and rank `r` brings chunk `r`; every rank ends with all of it.
    fn all_gather_in_place(&mut self, buffer: BufMut<'_>) -> Result<(), CollectiveError>;

    /// `buffer` is cut by [`chunk`] and rank `r` brings chunk `r`; every rank ends with the chunk of the rank before it in its
    /// place, too (rank 0 with that of the last). The first round of an all-gather: one neighbour's copy, not everyone's.
    fn shift_in_place(&mut self, buffer: BufMut<'_>) -> Result<(), CollectiveError>;

    /// Every rank ends with `root`'s `buffer`.
    fn broadcast(&mut self, buffer: BufMut<'_>, root: Rank) -> Result<(), CollectiveError>;

    /// Returns when every rank has called it.
    fn barrier(&mut self) -> Result<(), CollectiveError>;

    /// A look, from outside any collective, at an all-gather of `length` f64 that may be the next one: what the ranks before this one have
    /// brought already. None where that cannot be seen.
    fn ahead(&self, _length: usize) -> Option<Ahead> {
        None
    }

    /// A handle with which another thread ends whatever collective is in flight.
    fn abort_handle(&self) -> Arc<dyn AbortHandle>;

    /// Sequence numbers of the last collective entered and the last one finished.
    fn progress(&self) -> Arc<Progress>;

    /// Bytes of memory that this communicator holds for itself, in the process (what the kernel keeps for sockets not counted).
    fn buffer_bytes(&self) -> usize;
}

/// Ends a communicator from another thread, at once.
pub trait AbortHandle: Send + Sync {
    /// The collective in flight, and every later one, fails with [`CollectiveError::Aborted`].
    fn abort(&self, reason: &str);
}

/// How far a communicator has come, readable from any thread.
#[derive(Debug, Default)]
pub struct Progress {
    /// Sequence number of the last collective entered; they count from 1.
    pub entered: std::sync::atomic::AtomicU64,
    /// Sequence number of the last collective finished.
    pub finished: std::sync::atomic::AtomicU64,
    /// Nanoseconds spent in collectives so far, waiting for slower ranks included.
    pub busy_nanos: std::sync::atomic::AtomicU64,
}

/// Refuses a root that is no rank.
fn check_root(operation: &'static str, root: Rank, world: usize) -> Result<(), CollectiveError> {
    if (root.0 as usize) < world {
        return Ok(());
    }
    Err(CollectiveError::Size { operation, detail: format!("root {root} in a world of {world}") })
}
