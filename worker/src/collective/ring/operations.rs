//! The collectives of a ring, each as a plan of spans for the pump.

use std::sync::Arc;

use coxswain_proto::ids::Rank;

use super::{
    ahead::GatherPeek,
    connected::{Call, Ring},
    element::{Element, combine},
    plan,
    wire::Operation,
};
use crate::collective::{
    AbortHandle, Buf, BufMut, Collective, CollectiveError, Cuts, Progress, Reduce, check_distance,
    check_root, chunk, through_host,
};

/// An all-reduce is small if everybody's values together have at most this many bytes.
const SMALL: usize = 32 << 10;

impl Ring {
    fn all_reduce_of<T: Element>(&mut self, buffer: &mut [T], reduce: Reduce) -> Result<(), CollectiveError> {
        let (rank, world, length) = (self.rank, self.world, buffer.len());
        let call = Call { operation: Operation::AllReduce, reduce: Some(reduce), root: 0, length };
        if size_of_val(buffer) * world > SMALL || world == 1 {
            return self.run(&call, &mut plan::all_reduce(buffer, &Cuts::equal(length, world), rank));
        }
        let mut everyone = vec![T::zeroed(); length * world];
        everyone[length * rank..length * (rank + 1)].copy_from_slice(buffer);
        let cuts = Cuts::equal(everyone.len(), world);
        self.run(&call, &mut plan::all_gather(&mut everyone, &cuts, rank))?;
        for owner in 0..world {
            let part = chunk(length, world, owner);
            for step in 1..=world {
                let other = length * ((owner + step) % world);
                let other = &everyone[other + part.start..other + part.end];
                match step {
                    1 => buffer[part.clone()].copy_from_slice(other),
                    _ => combine(reduce, &mut buffer[part.clone()], other),
                }
            }
        }
        Ok(())
    }

    fn reduce_scatter_of<T: Element>(
        &mut self,
        buffer: &mut [T],
        cuts: &Cuts,
        reduce: Reduce,
    ) -> Result<(), CollectiveError> {
        let (rank, length) = (self.rank, buffer.len());
        let call = Call { operation: Operation::ReduceScatter, reduce: Some(reduce), root: 0, length };
        self.run(&call, &mut plan::reduce_scatter(buffer, cuts, rank))
    }

    fn all_gather_of<T: Element>(&mut self, buffer: &mut [T], cuts: &Cuts) -> Result<(), CollectiveError> {
        let (rank, length) = (self.rank, buffer.len());
        let call = Call { operation: Operation::AllGather, reduce: None, root: 0, length };
        self.run(&call, &mut plan::all_gather(buffer, cuts, rank))
    }

    fn shift_of<T: Element>(
        &mut self,
        buffer: &mut [T],
        cuts: &Cuts,
        distance: usize,
    ) -> Result<(), CollectiveError> {
        let (rank, length) = (self.rank, buffer.len());
        let call = Call { operation: Operation::Shift, reduce: None, root: distance as u32, length };
        self.run(&call, &mut plan::shift(buffer, cuts, rank, distance))
    }

    fn broadcast_of<T: Element>(&mut self, buffer: &mut [T], root: Rank) -> Result<(), CollectiveError> {
        let (rank, world, length) = (self.rank, self.world, buffer.len());
        let call = Call { operation: Operation::Broadcast, reduce: None, root: root.0, length };
        self.run(&call, &mut plan::broadcast(buffer, world, rank, root.0 as usize))
    }

    /// Refuses an out-of-place pair whose lengths do not belong together.
    fn check(&self, operation: &'static str, whole: Buf<'_>, part: Buf<'_>) -> Result<(), CollectiveError> {
        if part.len().checked_mul(self.world) == Some(whole.len()) {
            return Ok(());
        }
        let detail = format!(
            "the whole has {} elements and a part has {}; with {} ranks the whole must be {} times as long",
            whole.len(),
            part.len(),
            self.world,
            self.world
        );
        Err(CollectiveError::Size { operation, detail })
    }
}

/// Runs an operation on the elements of a buffer, whatever they are; on those of a device through host
/// memory.
macro_rules! of_elements {
    ($self:ident.$operation:ident($buffer:ident $(, $argument:expr)*) => $of:ident($($more:expr),*)) => {
        match $buffer {
            BufMut::Bf16(values) => $self.$of(values $(, $more)*),
            BufMut::F32(values) => $self.$of(values $(, $more)*),
            BufMut::F64(values) => $self.$of(values $(, $more)*),
            BufMut::Device(buffer) => through_host(buffer, |copy| $self.$operation(copy $(, $argument)*)),
        }
    };
}

impl Collective for Ring {
    fn rank(&self) -> Rank {
        Rank(self.rank as u32)
    }

    fn world(&self) -> usize {
        self.world
    }

    fn all_reduce(&mut self, buffer: BufMut<'_>, reduce: Reduce) -> Result<(), CollectiveError> {
        of_elements!(self.all_reduce(buffer, reduce) => all_reduce_of(reduce))
    }

    fn all_gather(&mut self, shard: Buf<'_>, mut output: BufMut<'_>) -> Result<(), CollectiveError> {
        self.check("all_gather", output.as_buf(), shard)?;
        output.put("all_gather", chunk(output.len(), self.world, self.rank), shard)?;
        self.all_gather_in_place(output)
    }

    fn reduce_scatter_parts(
        &mut self,
        buffer: BufMut<'_>,
        cuts: &Cuts,
        reduce: Reduce,
    ) -> Result<(), CollectiveError> {
        of_elements!(self.reduce_scatter_parts(buffer, cuts, reduce) => reduce_scatter_of(cuts, reduce))
    }

    fn all_gather_parts(&mut self, buffer: BufMut<'_>, cuts: &Cuts) -> Result<(), CollectiveError> {
        of_elements!(self.all_gather_parts(buffer, cuts) => all_gather_of(cuts))
    }

    fn shift_parts(
        &mut self,
        buffer: BufMut<'_>,
        cuts: &Cuts,
        distance: usize,
    ) -> Result<(), CollectiveError> {
        check_distance(distance, self.world)?;
        of_elements!(self.shift_parts(buffer, cuts, distance) => shift_of(cuts, distance))
    }

    fn broadcast(&mut self, buffer: BufMut<'_>, root: Rank) -> Result<(), CollectiveError> {
        check_root("broadcast", root, self.world)?;
        of_elements!(self.broadcast(buffer, root) => broadcast_of(root))
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        // Everyone's token has come round: everyone is here.
        let mut tokens = vec![0.0f32; self.world];
        let call = Call { operation: Operation::Barrier, reduce: None, root: 0, length: self.world };
        let (cuts, rank) = (Cuts::equal(self.world, self.world), self.rank);
        self.run(&call, &mut plan::all_gather(&mut tokens, &cuts, rank))
    }

    fn ahead(&self, length: usize) -> Option<GatherPeek> {
        let (_, previous) = self.lanes.as_ref()?;
        Some(GatherPeek::new(previous.clone(), self.progress.clone(), self.rank, self.world, length))
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        self.abort.clone()
    }

    fn progress(&self) -> Arc<Progress> {
        self.progress.clone()
    }

    fn buffer_bytes(&self) -> usize {
        size_of_val(self.scratch.as_slice())
    }
}
