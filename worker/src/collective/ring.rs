//! The ring: collectives of ranks on CPUs, each connected to the next one and to the previous one, by TCP or, within a machine, by shared
//! memory.
//!
//! ```text
//! element, wire    numbers and headers
//! plan             each collective as spans of a buffer
//! pump             moves one stream out and one stream in, at the same time
//! ahead            what has come in of a collective that this rank has not entered yet
//! abort            ends a ring from another thread
//! control          the ring as the control line of something faster
//! handshake        who may join
//! join             how the ring is formed, in two halves: call and welcome; then offer
//! lane, shared     the way to a neighbour: a socket, or memory that both have mapped
//! ```
//!
//! **Bandwidth.** A buffer of `n` bytes is cut in `W` chunks. Reduce-scatter sends a chunk in each of `W - 1` rounds, adding what
//! comes in; all-gather passes the finished chunks round again; all-reduce is one after the other without a pause between them:
//!
//! ```text
//! bytes sent by each rank:  reduce-scatter, all-gather  n (W-1)/W        all-reduce  2 n (W-1)/W        broadcast  n
//! ```
//!
//! which is the least possible. Chunk `c` is reduced in the order of ranks `c+1, c+2, .., c`; this order depends on nothing else.
//!
//! **Latency.** A small all-reduce (a vote) passes everyone's values once around, `W - 1` hops instead of `2 (W - 1)`, and each
//! rank then reduces them in the order above, so that both paths give the same bits. Hops are linear in `W`: this ring is for
//! laptops, tests and a few nodes; GPU clusters have NCCL.
//!
//! **Failure.** The first error ends the ring: its sockets are shut down, so the neighbours fail too, and so on all the way round.
//! Whoever wants to go on forms the ring of the next generation.

mod abort;
mod ahead;
mod call;
mod control;
mod element;
mod handshake;
mod join;
mod lane;
mod offer;
mod plan;
mod pump;
mod shared;
mod welcome;
mod wire;

use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Instant,
};

use coxswain_proto::ids::Rank;

pub use abort::RingAbort;
pub use ahead::Ahead;
pub use join::{JoinError, Membership, RingListener};
use pump::PIECE;

use self::{
    ahead::lock,
    element::combine,
    lane::{Inbound, Outbound},
    plan::Plan,
    pump::{Broken, Pump},
    wire::Header,
};
pub(super) use self::{element::Element, wire::Operation};
use super::{
    AbortHandle, Buf, BufMut, Collective, CollectiveError, Progress, Reduce, check_root, chunk, size_error,
    through_host,
};

/// An all-reduce is small if everybody's values together have at most this many bytes.
const SMALL: usize = 32 << 10;

/// A rank's place in a ring.
#[derive(Debug)]
pub struct Ring {
    rank: usize,
    world: usize,
    /// To the next rank and from the previous one; none in a world of one.
    lanes: Option<(Outbound, Arc<Mutex<Inbound>>)>,
    abort: Arc<RingAbort>,
    progress: Arc<Progress>,
    scratch: Vec<u64>,
    /// Set by the first failure.
    failed: Option<String>,
}

impl Ring {
    /// Connects both neighbours. Blocks until that is done, `deadline` has passed, or `abort` is used.
    pub fn connect(
        listener: &RingListener,
        membership: &Membership<'_>,
        deadline: Instant,
        abort: &Arc<RingAbort>,
    ) -> Result<Self, CollectiveError> {
        let (rank, world) = (membership.rank.0 as usize, membership.world);
        if rank >= world {
            return Err(JoinError::Membership { rank: membership.rank, world }.into());
        }
        let mut ring = Self {
            rank,
            world,
            lanes: None,
            abort: abort.clone(),
            progress: Arc::default(),
            scratch: Vec::new(),
            failed: None,
        };
        if world > 1 {
            let neighbours = join::join(listener, membership, deadline, abort)?;
            let Some(join::Neighbours { sockets, next, previous }) = neighbours else {
                let reason = abort.reason().unwrap_or_default();
                return Err(CollectiveError::Aborted { sequence: 0, operation: "connect", reason });
            };
            sockets.iter().for_each(|socket| abort.watch(socket));
            ring.lanes = Some((next, Arc::new(Mutex::new(previous))));
            ring.scratch = vec![0; PIECE / size_of::<u64>()];
        }
        Ok(ring)
    }

    /// Runs one collective.
    fn run<T: Element>(&mut self, call: &Call, plan: &mut Plan<'_, T>) -> Result<(), CollectiveError> {
        let entered = self.enter::<T>(call)?;
        self.pump(&entered.header, call.reduce.unwrap_or(Reduce::Sum), plan)?;
        self.leave(&entered);
        Ok(())
    }

    /// Numbers a collective, if the ring is whole.
    fn enter<T: Element>(&mut self, call: &Call) -> Result<Entered, CollectiveError> {
        let operation = call.operation.name();
        let began = Instant::now();
        let sequence = self.progress.entered.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(reason) = self.abort.reason().or_else(|| self.failed.clone()) {
            return Err(CollectiveError::Aborted { sequence, operation, reason });
        }
        let header = Header {
            operation: call.operation,
            kind: T::KIND,
            reduce: call.reduce,
            root: call.root,
            world: self.world as u32,
            sequence,
            length: call.length as u64,
        };
        Ok(Entered { header, began })
    }

    /// Moves data around, if there is anybody else, and remembers a failure.
    fn pump<T: Element>(
        &mut self,
        header: &Header,
        reduce: Reduce,
        plan: &mut Plan<'_, T>,
    ) -> Result<(), CollectiveError> {
        let Some((next, previous)) = &mut self.lanes else { return Ok(()) };
        let ended = {
            let mut previous = lock(previous);
            Pump { next, previous: &mut previous, scratch: &mut self.scratch }.run(header, reduce, plan)
        };
        ended.map_err(|broken| self.fail(header, broken))
    }

    /// The collective is over.
    pub(in crate::collective) fn leave(&mut self, entered: &Entered) {
        self.progress.finished.store(entered.header.sequence, Ordering::Relaxed);
        let busy = entered.began.elapsed().as_nanos() as u64;
        self.progress.busy_nanos.fetch_add(busy, Ordering::Relaxed);
    }

    /// Leaves the ring for good.
    fn fail(&mut self, header: &Header, broken: Broken) -> CollectiveError {
        let (sequence, operation) = (header.sequence, header.operation.name());
        let next = Rank(((self.rank + 1) % self.world) as u32);
        let previous = Rank(((self.rank + self.world - 1) % self.world) as u32);
        let error = match (self.abort.reason(), broken) {
            (Some(reason), _) => CollectiveError::Aborted { sequence, operation, reason },
            (None, Broken::Next(source)) => {
                CollectiveError::PeerLost { peer: next, sequence, operation, source }
            }
            (None, Broken::Previous(source)) => {
                CollectiveError::PeerLost { peer: previous, sequence, operation, source }
            }
            (None, Broken::OtherCollective(other)) => {
                let theirs = other.map_or("bytes that are no header".to_owned(), |other| other.to_string());
                let detail = format!("it is in {theirs}, rank {} is in {header}", self.rank);
                CollectiveError::Mismatch { peer: previous, detail }
            }
        };
        self.failed = Some(format!("the ring has failed before: {error}"));
        self.abort.close();
        error
    }

    fn all_reduce_of<T: Element>(&mut self, buffer: &mut [T], reduce: Reduce) -> Result<(), CollectiveError> {
        let (rank, world, length) = (self.rank, self.world, buffer.len());
        let call = Call { operation: Operation::AllReduce, reduce: Some(reduce), root: 0, length };
        if size_of_val(buffer) * world > SMALL || world == 1 {
            return self.run(&call, &mut plan::all_reduce(buffer, world, rank));
        }
        let mut everyone = vec![T::zeroed(); length * world];
        everyone[length * rank..length * (rank + 1)].copy_from_slice(buffer);
        self.run(&call, &mut plan::all_gather(&mut everyone, world, rank))?;
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
        output: &mut [T],
        reduce: Reduce,
    ) -> Result<(), CollectiveError> {
        let (rank, world, length) = (self.rank, self.world, buffer.len());
        let call = Call { operation: Operation::ReduceScatter, reduce: Some(reduce), root: 0, length };
        if world == 1 && !output.is_empty() {
            output.copy_from_slice(buffer);
        }
        self.run(&call, &mut plan::reduce_scatter(buffer, output, world, rank))
    }

    fn all_gather_of<T: Element>(&mut self, buffer: &mut [T]) -> Result<(), CollectiveError> {
        let (rank, world, length) = (self.rank, self.world, buffer.len());
        let call = Call { operation: Operation::AllGather, reduce: None, root: 0, length };
        self.run(&call, &mut plan::all_gather(buffer, world, rank))
    }

    fn shift_of<T: Element>(&mut self, buffer: &mut [T]) -> Result<(), CollectiveError> {
        let (rank, world, length) = (self.rank, self.world, buffer.len());
        let call = Call { operation: Operation::Shift, reduce: None, root: 0, length };
        self.run(&call, &mut plan::shift(buffer, world, rank))
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
            "the whole has {} elements and a part {}; with {} ranks it must have {} times as many",
            whole.len(),
            part.len(),
            self.world,
            self.world
        );
        Err(CollectiveError::Size { operation, detail })
    }
}

/// What a collective is, apart from its buffers.
#[derive(Clone, Copy, Debug)]
pub(in crate::collective) struct Call {
    pub operation: Operation,
    pub reduce: Option<Reduce>,
    pub root: u32,
    /// Elements of the whole buffer.
    pub length: usize,
}

/// A collective that this rank is in.
pub(in crate::collective) struct Entered {
    header: Header,
    began: Instant,
}

impl Entered {
    /// Its number.
    pub(in crate::collective) fn sequence(&self) -> u64 {
        self.header.sequence
    }
}

/// Runs an operation on the elements of a buffer, whatever they are; on those of a device through host memory.
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

    fn reduce_scatter(
        &mut self,
        input: BufMut<'_>,
        output: BufMut<'_>,
        reduce: Reduce,
    ) -> Result<(), CollectiveError> {
        self.check("reduce_scatter", input.as_buf(), output.as_buf())?;
        match (input, output) {
            (BufMut::Bf16(input), BufMut::Bf16(output)) => self.reduce_scatter_of(input, output, reduce),
            (BufMut::F32(input), BufMut::F32(output)) => self.reduce_scatter_of(input, output, reduce),
            (BufMut::F64(input), BufMut::F64(output)) => self.reduce_scatter_of(input, output, reduce),
            (input, output) => Err(size_error("reduce_scatter", input.as_buf(), output.as_buf())),
        }
    }

    fn all_gather(&mut self, shard: Buf<'_>, mut output: BufMut<'_>) -> Result<(), CollectiveError> {
        self.check("all_gather", output.as_buf(), shard)?;
        output.put("all_gather", chunk(output.len(), self.world, self.rank), shard)?;
        self.all_gather_in_place(output)
    }

    fn reduce_scatter_in_place(&mut self, buffer: BufMut<'_>, reduce: Reduce) -> Result<(), CollectiveError> {
        of_elements!(self.reduce_scatter_in_place(buffer, reduce) => reduce_scatter_of(&mut [], reduce))
    }

    fn all_gather_in_place(&mut self, buffer: BufMut<'_>) -> Result<(), CollectiveError> {
        of_elements!(self.all_gather_in_place(buffer) => all_gather_of())
    }

    fn shift_in_place(&mut self, buffer: BufMut<'_>) -> Result<(), CollectiveError> {
        of_elements!(self.shift_in_place(buffer) => shift_of())
    }

    fn broadcast(&mut self, buffer: BufMut<'_>, root: Rank) -> Result<(), CollectiveError> {
        check_root("broadcast", root, self.world)?;
        of_elements!(self.broadcast(buffer, root) => broadcast_of(root))
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        // Everyone's token has come round: everyone is here.
        let mut tokens = vec![0.0f32; self.world];
        let call = Call { operation: Operation::Barrier, reduce: None, root: 0, length: self.world };
        let (world, rank) = (self.world, self.rank);
        self.run(&call, &mut plan::all_gather(&mut tokens, world, rank))
    }

    fn ahead(&self, length: usize) -> Option<Ahead> {
        let (_, previous) = self.lanes.as_ref()?;
        Some(Ahead::new(previous.clone(), self.progress.clone(), (self.rank, self.world), length))
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

impl Drop for Ring {
    /// Lets the neighbours know; what was sent still arrives.
    fn drop(&mut self) {
        self.abort.close();
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::{loopback, loopback_over};
