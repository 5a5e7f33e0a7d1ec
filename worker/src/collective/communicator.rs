//! The trait, apart from its implementations.

use std::sync::Arc;

use coxswain_proto::ids::Rank;

use super::{AbortHandle, Buf, BufMut, CollectiveError, GatherPeek, Progress, Reduce};
use coxswain_nn::params::Cuts;

/// A communicator of one generation.
pub trait Collective {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Ranks in the communicator.
    fn world(&self) -> usize;

    /// Every rank ends with the reduction of all ranks' `buffer`.
    fn all_reduce(&mut self, buffer: BufMut<'_>, reduce: Reduce) -> Result<(), CollectiveError>;

    /// Every rank ends with all ranks' `shard`, in rank order, in `output`.
    fn all_gather(&mut self, shard: Buf<'_>, output: BufMut<'_>) -> Result<(), CollectiveError>;

    /// `buffer` is cut into the parts of `cuts`, which are of its length and for this world; rank `r` ends
    /// with the reduction of all ranks' part `r` in its place. The other parts are scratch afterwards. No
    /// second buffer is needed.
    fn reduce_scatter_parts(
        &mut self,
        buffer: BufMut<'_>,
        cuts: &Cuts,
        reduce: Reduce,
    ) -> Result<(), CollectiveError>;

    /// `buffer` is cut into the parts of `cuts` and rank `r` brings part `r`; every rank ends with all of it.
    fn all_gather_parts(&mut self, buffer: BufMut<'_>, cuts: &Cuts) -> Result<(), CollectiveError>;

    /// `buffer` is cut into the parts of `cuts` and rank `r` brings part `r`; every rank ends with the part
    /// of the rank `distance` before it in its place, too, counted around the ring: one rank's copy, not
    /// everyone's. The other parts are scratch afterwards. The distance is at least 1, and less than the
    /// world.
    fn shift_parts(
        &mut self,
        buffer: BufMut<'_>,
        cuts: &Cuts,
        distance: usize,
    ) -> Result<(), CollectiveError>;

    /// [`Self::reduce_scatter_parts`] of equal parts ([`chunk`](super::chunk)).
    fn reduce_scatter_in_place(&mut self, buffer: BufMut<'_>, reduce: Reduce) -> Result<(), CollectiveError> {
        let cuts = Cuts::equal(buffer.len(), self.world());
        self.reduce_scatter_parts(buffer, &cuts, reduce)
    }

    /// [`Self::all_gather_parts`] of equal parts.
    fn all_gather_in_place(&mut self, buffer: BufMut<'_>) -> Result<(), CollectiveError> {
        let cuts = Cuts::equal(buffer.len(), self.world());
        self.all_gather_parts(buffer, &cuts)
    }

    /// [`Self::shift_parts`] of equal parts.
    fn shift_in_place(&mut self, buffer: BufMut<'_>, distance: usize) -> Result<(), CollectiveError> {
        let cuts = Cuts::equal(buffer.len(), self.world());
        self.shift_parts(buffer, &cuts, distance)
    }

    /// Every rank ends with `root`'s `buffer`.
    fn broadcast(&mut self, buffer: BufMut<'_>, root: Rank) -> Result<(), CollectiveError>;

    /// Returns when every rank has called it.
    fn barrier(&mut self) -> Result<(), CollectiveError>;

    /// A look, from outside any collective, at an all-gather of `length` f64 that may be the next one: what
    /// the ranks before this one have brought already. None where that cannot be seen.
    fn ahead(&self, _length: usize) -> Option<GatherPeek> {
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
    let detail = format!("distance {distance} is not possible in a world of {world}");
    Err(CollectiveError::Size { operation: "shift", detail })
}

/// Refuses a root that is no rank.
pub(super) fn check_root(operation: &'static str, root: Rank, world: usize) -> Result<(), CollectiveError> {
    if (root.0 as usize) < world {
        return Ok(());
    }
    Err(CollectiveError::Size { operation, detail: format!("there is no root {root} in a world of {world}") })
}
