//! The ring as the control line of something faster: who is here, in which collective, and who has left.

use coxswain_proto::ids::Rank;

use super::{Call, Element, Entered, Ring, lock, plan};
use crate::collective::{CollectiveError, Reduce};

impl Ring {
    /// Begins a collective whose data something else carries: its header goes round without data, so that all ranks have come to the
    /// same one, or somebody is told. Ends with [`Ring::leave`], or with [`Ring::give_up`].
    pub(in crate::collective) fn announce<T: Element>(
        &mut self,
        call: &Call,
    ) -> Result<Entered, CollectiveError> {
        let entered = self.enter::<T>(call)?;
        let mut tokens = vec![0.0f32; self.world];
        let (world, rank) = (self.world, self.rank);
        self.pump(&entered.header, Reduce::Sum, &mut plan::all_gather(&mut tokens, world, rank))?;
        Ok(entered)
    }

    /// Ends the ring because what carried the data of a collective has failed.
    pub(in crate::collective) fn give_up(&mut self, why: String) {
        self.failed = Some(why);
        self.abort.close();
    }

    /// Why the ring was aborted, if it was.
    pub(in crate::collective) fn aborted(&self) -> Option<String> {
        self.abort.reason()
    }

    /// A neighbour that has closed its side: it has left, or died.
    pub(in crate::collective) fn departed(&mut self) -> Option<Rank> {
        let (rank, world) = (self.rank, self.world);
        let (next, previous) = self.lanes.as_mut()?;
        let next = next.has_ended().then_some((rank + 1) % world);
        next.or_else(|| lock(previous).has_ended().then_some((rank + world - 1) % world))
            .map(|rank| Rank(rank as u32))
    }
}
