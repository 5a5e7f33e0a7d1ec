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
//! Every implementation passes the same suite ([`conformance`]).

mod carried;
pub mod conformance;
mod fabric;
mod mixture;
mod ring;
mod solo;

use std::{ops::Range, sync::Arc};

use coxswain_proto::ids::Rank;
use half::bf16;

pub use carried::{Brings, Carried, join};
pub use fabric::{Fabric, FabricError, FabricId, FabricSource, Movement, Offer, Place, Transfer};
pub use mixture::Computes;
pub(crate) use ring::PIECE;
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

/// A read-only buffer.
#[derive(Clone, Copy, Debug)]
pub enum Buf<'a> {
    /// Host memory, 2 bytes an element. Sums are rounded at every rank on the way.
    Bf16(&'a [bf16]),
    /// Host memory, 4 bytes an element.
    F32(&'a [f32]),
    /// Host memory, 8 bytes an element: votes and scalars.
    F64(&'a [f64]),
}

/// A buffer that an operation writes to.
#[derive(Debug)]
pub enum BufMut<'a> {
    /// Host memory, 2 bytes an element. Sums are rounded at every rank on the way.
    Bf16(&'a mut [bf16]),
    /// Host memory, 4 bytes an element.
    F32(&'a mut [f32]),
    /// Host memory, 8 bytes an element.
    F64(&'a mut [f64]),
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

/// The part of a buffer of `len` elements that belongs to `rank`: equal parts of `len / world` rounded up, the last ones cut
/// short (or empty) where the buffer ends. This is the partition of a buffer padded to a multiple of `world`, without the padding.
pub fn chunk(len: usize, world: usize, rank: usize) -> Range<usize> {
    let size = len.div_ceil(world);
    (size * rank).min(len)..(size * (rank + 1)).min(len)
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

/// What went wrong with a pair of buffers.
fn size_error(operation: &'static str, input: Buf<'_>, output: Buf<'_>) -> CollectiveError {
    let detail = format!(
        "{} elements of {} in, room for {} of {}",
        input.len(),
        input.element(),
        output.len(),
        output.element()
    );
    CollectiveError::Size { operation, detail }
}

/// Refuses a root that is no rank.
fn check_root(operation: &'static str, root: Rank, world: usize) -> Result<(), CollectiveError> {
    if (root.0 as usize) < world {
        return Ok(());
    }
    Err(CollectiveError::Size { operation, detail: format!("root {root} in a world of {world}") })
}

impl<'a> Buf<'a> {
    fn element(&self) -> &'static str {
        match self {
            Self::Bf16(_) => "bf16",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
        }
    }

    /// Some of its elements.
    fn part(self, at: Range<usize>) -> Buf<'a> {
        match self {
            Self::Bf16(x) => Buf::Bf16(&x[at]),
            Self::F32(x) => Buf::F32(&x[at]),
            Self::F64(x) => Buf::F64(&x[at]),
        }
    }

    /// Bytes of all elements.
    fn bytes(&self) -> usize {
        match self {
            Self::Bf16(x) => size_of_val(*x),
            Self::F32(x) => size_of_val(*x),
            Self::F64(x) => size_of_val(*x),
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Bf16(x) => x.len(),
            Self::F32(x) => x.len(),
            Self::F64(x) => x.len(),
        }
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl BufMut<'_> {
    /// The same buffer, to read.
    pub fn as_buf(&self) -> Buf<'_> {
        match self {
            Self::Bf16(x) => Buf::Bf16(x),
            Self::F32(x) => Buf::F32(x),
            Self::F64(x) => Buf::F64(x),
        }
    }

    /// The same buffer, lent to somebody else who writes to it.
    fn lent(&mut self) -> BufMut<'_> {
        match self {
            Self::Bf16(x) => BufMut::Bf16(x),
            Self::F32(x) => BufMut::F32(x),
            Self::F64(x) => BufMut::F64(x),
        }
    }

    /// Copies `from` to these elements; refuses other lengths and other elements.
    fn put(
        &mut self,
        operation: &'static str,
        at: Range<usize>,
        from: Buf<'_>,
    ) -> Result<(), CollectiveError> {
        match (&mut *self, from) {
            (Self::Bf16(to), Buf::Bf16(from)) if at.len() == from.len() => to[at].copy_from_slice(from),
            (Self::F32(to), Buf::F32(from)) if at.len() == from.len() => to[at].copy_from_slice(from),
            (Self::F64(to), Buf::F64(from)) if at.len() == from.len() => to[at].copy_from_slice(from),
            _ => return Err(size_error(operation, from, self.as_buf())),
        }
        Ok(())
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.as_buf().len()
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
