//! The trait, apart from its implementations.

use std::sync::Arc;

use coxswain_proto::ids::Rank;

use super::{AbortHandle, Ahead, Buf, BufMut, CollectiveError, Progress, Reduce};

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

    /// `buffer` is cut by [`chunk`](super::chunk); rank `r` ends with the reduction of all ranks' chunk `r`
    /// in its place. The other chunks are scratch afterwards. No second buffer is needed, and the length need
    /// not divide by the world.
    fn reduce_scatter_in_place(&mut self, buffer: BufMut<'_>, reduce: Reduce) -> Result<(), CollectiveError>;

    /// `buffer` is cut by [`chunk`](super::chunk) and rank `r` brings chunk `r`; every rank ends with all of
    /// it.
    fn all_gather_in_place(&mut self, buffer: BufMut<'_>) -> Result<(), CollectiveError>;

    /// `buffer` is cut by [`chunk`](super::chunk) and rank `r` brings chunk `r`; every rank ends with the
    /// chunk of the rank `distance` before it in its place, too, counted around the ring: one rank's copy,
    /// not everyone's. The other chunks are scratch afterwards. The distance is at least 1, and less than the
    /// world.
    fn shift_in_place(&mut self, buffer: BufMut<'_>, distance: usize) -> Result<(), CollectiveError>;

    /// Every rank ends with `root`'s `buffer`.
    fn broadcast(&mut self, buffer: BufMut<'_>, root: Rank) -> Result<(), CollectiveError>;

    /// Returns when every rank has called it.
    fn barrier(&mut self) -> Result<(), CollectiveError>;

    /// A look, from outside any collective, at an all-gather of `length` f64 that may be the next one: what
    /// the ranks before this one have brought already. None where that cannot be seen.
    fn ahead(&self, _length: usize) -> Option<Ahead> {
        None
    }

    /// A handle with which another thread ends whatever collective is in flight.
    fn abort_handle(&self) -> Arc<dyn AbortHandle>;

    /// Sequence numbers of the last collective entered and the last one finished.
    fn progress(&self) -> Arc<Progress>;

    /// Bytes of memory that this communicator holds for itself, in the process (what the kernel keeps for
    /// sockets not counted).
    fn buffer_bytes(&self) -> usize;
}

/// Refuses a distance at which there is no other rank; in a world of one a shift does nothing.
pub(super) fn check_distance(distance: usize, world: usize) -> Result<(), CollectiveError> {
    if (1..world.max(2)).contains(&distance) {
        return Ok(());
    }
    let detail = format!("by {distance} in a world of {world}");
    Err(CollectiveError::Size { operation: "shift", detail })
}

/// Refuses a root that is no rank.
pub(super) fn check_root(operation: &'static str, root: Rank, world: usize) -> Result<(), CollectiveError> {
    if (root.0 as usize) < world {
        return Ok(());
    }
    Err(CollectiveError::Size { operation, detail: format!("root {root} in a world of {world}") })
}
