//! What ranks say to each other: the collectives, as a trait with three implementations in view.
//!
//! | | for |
//! |---|---|
//! | [`Solo`] | a world of one: every operation is the identity |
//! | `ring` | ranks on CPUs, a TCP ring |
//! | NCCL | ranks on GPUs (not there yet) |
//!
//! All ranks call the same operations in the same order with the same sizes. Reductions add in an order that depends on the
//! world size alone, so a repeated run gives the same bits. A communicator lives on one thread; only its [`AbortHandle`] may
//! leave it.

use std::sync::Arc;

use coxswain_proto::ids::Rank;

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
    /// Host memory, 4 bytes an element.
    F32(&'a [f32]),
    /// Host memory, 8 bytes an element: votes and scalars.
    F64(&'a [f64]),
}

/// A buffer that an operation writes to.
#[derive(Debug)]
pub enum BufMut<'a> {
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
    Connect(String),
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

    /// Every rank ends with `root`'s `buffer`.
    fn broadcast(&mut self, buffer: BufMut<'_>, root: Rank) -> Result<(), CollectiveError>;

    /// Returns when every rank has called it.
    fn barrier(&mut self) -> Result<(), CollectiveError>;

    /// A handle with which another thread ends whatever collective is in flight.
    fn abort_handle(&self) -> Arc<dyn AbortHandle>;

    /// Sequence numbers of the last collective entered and the last one finished.
    fn progress(&self) -> Arc<Progress>;
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
}

/// A world of one.
#[derive(Debug, Default)]
pub struct Solo {
    progress: Arc<Progress>,
}

struct NothingToAbort;

impl AbortHandle for NothingToAbort {
    fn abort(&self, _reason: &str) {}
}

impl Collective for Solo {
    fn rank(&self) -> Rank {
        Rank(0)
    }

    fn world(&self) -> usize {
        1
    }

    fn all_reduce(&mut self, _buffer: BufMut<'_>, _reduce: Reduce) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn reduce_scatter(
        &mut self,
        input: BufMut<'_>,
        output: BufMut<'_>,
        _reduce: Reduce,
    ) -> Result<(), CollectiveError> {
        match (input, output) {
            (BufMut::F32(input), BufMut::F32(output)) if input.len() == output.len() => {
                output.copy_from_slice(input)
            }
            (BufMut::F64(input), BufMut::F64(output)) if input.len() == output.len() => {
                output.copy_from_slice(input)
            }
            (input, output) => return Err(size_error("reduce_scatter", input.len(), output.len())),
        }
        Ok(())
    }

    fn all_gather(&mut self, shard: Buf<'_>, output: BufMut<'_>) -> Result<(), CollectiveError> {
        match (shard, output) {
            (Buf::F32(shard), BufMut::F32(output)) if shard.len() == output.len() => {
                output.copy_from_slice(shard)
            }
            (Buf::F64(shard), BufMut::F64(output)) if shard.len() == output.len() => {
                output.copy_from_slice(shard)
            }
            (shard, output) => return Err(size_error("all_gather", shard.len(), output.len())),
        }
        Ok(())
    }

    fn broadcast(&mut self, _buffer: BufMut<'_>, _root: Rank) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        Arc::new(NothingToAbort)
    }

    fn progress(&self) -> Arc<Progress> {
        self.progress.clone()
    }
}

fn size_error(operation: &'static str, input: usize, output: usize) -> CollectiveError {
    CollectiveError::Size {
        operation,
        detail: format!("{input} elements in, room for {output}, or element types differ"),
    }
}

impl Buf<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
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
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F64(x) => x.len(),
        }
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
