//! A rank's place in a ring: it enters one collective after the other, until the first failure ends it.
//!
//! A collective moves its data itself ([`Ring::run`]), or only its header, where something faster carries the
//! data ([`Ring::announce`]).

use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Instant,
};

use coxswain_proto::ids::Rank;

use super::{
    abort::RingAbort,
    ahead::lock,
    element::Element,
    join::{self, Membership},
    lane::{Inbound, Outbound},
    plan::{self, Plan},
    pump::{PIECE, Pump, PumpError},
    sockets::RingListener,
    wire::{Header, Operation},
};
use crate::clock;
use crate::collective::{CollectiveError, Cuts, JoinError, Progress, Reduce};

/// What a collective is, apart from its buffers.
#[derive(Clone, Copy, Debug)]
pub(in crate::collective) struct Call {
    pub operation: Operation,
    pub reduce: Option<Reduce>,
    /// How far a shift goes.
    pub root: u32,
    /// Elements of the whole buffer.
    pub length: usize,
}

/// A collective that this rank is in.
pub(in crate::collective) struct Entry {
    header: Header,
    began: Instant,
}

impl Entry {
    /// Number.
    pub(in crate::collective) fn sequence(&self) -> u64 {
        self.header.sequence
    }
}

/// A rank's place in a ring.
#[derive(Debug)]
pub struct Ring {
    pub(super) rank: usize,
    pub(super) world: usize,
    /// To the next rank and from the previous one; none in a world of one.
    pub(super) lanes: Option<(Outbound, Arc<Mutex<Inbound>>)>,
    pub(super) abort: Arc<RingAbort>,
    pub(super) progress: Arc<Progress>,
    pub(super) scratch: Vec<u64>,
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
    pub(super) fn run<T: Element>(
        &mut self,
        call: &Call,
        plan: &mut Plan<'_, T>,
    ) -> Result<(), CollectiveError> {
        let entered = self.enter::<T>(call)?;
        self.pump(&entered.header, call.reduce.unwrap_or(Reduce::Sum), plan)?;
        self.leave(&entered);
        Ok(())
    }

    /// Numbers a collective, if the ring is whole.
    fn enter<T: Element>(&mut self, call: &Call) -> Result<Entry, CollectiveError> {
        let operation = call.operation.name();
        let began = clock::now();
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
        Ok(Entry { header, began })
    }

    /// Moves data around, if there are other ranks, and remembers a failure.
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
    pub(in crate::collective) fn leave(&mut self, entered: &Entry) {
        self.progress.finished.store(entered.header.sequence, Ordering::Relaxed);
        let busy = entered.began.elapsed().as_nanos() as u64;
        self.progress.busy_nanos.fetch_add(busy, Ordering::Relaxed);
    }

    /// Leaves the ring for good.
    fn fail(&mut self, header: &Header, broken: PumpError) -> CollectiveError {
        let (sequence, operation) = (header.sequence, header.operation.name());
        let next = Rank(((self.rank + 1) % self.world) as u32);
        let previous = Rank(((self.rank + self.world - 1) % self.world) as u32);
        let error = match (self.abort.reason(), broken) {
            (Some(reason), _) => CollectiveError::Aborted { sequence, operation, reason },
            (None, PumpError::Next(source)) => {
                CollectiveError::PeerLost { peer: next, sequence, operation, source }
            }
            (None, PumpError::Previous(source)) => {
                CollectiveError::PeerLost { peer: previous, sequence, operation, source }
            }
            (None, PumpError::OtherCollective(other)) => {
                let theirs =
                    other.map_or("an unknown one (no valid header)".to_owned(), |other| other.to_string());
                let detail = format!("it is in {theirs}, but rank {} is in {header}", self.rank);
                CollectiveError::Mismatch { peer: previous, detail }
            }
        };
        self.failed = Some(format!("the ring has failed before: {error}"));
        self.abort.close();
        error
    }

    /// Begins a collective whose data something else carries: its header goes round without data, so that all
    /// ranks have come to the same one, or somebody is told. Ends with [`Ring::leave`], or with
    /// [`Ring::give_up`].
    pub(in crate::collective) fn announce<T: Element>(
        &mut self,
        call: &Call,
    ) -> Result<Entry, CollectiveError> {
        let entered = self.enter::<T>(call)?;
        let mut tokens = vec![0.0f32; self.world];
        let (cuts, rank) = (Cuts::equal(self.world, self.world), self.rank);
        self.pump(&entered.header, Reduce::Sum, &mut plan::all_gather(&mut tokens, &cuts, rank))?;
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

impl Drop for Ring {
    /// Lets the neighbours know; what was sent still arrives.
    fn drop(&mut self) {
        self.abort.close();
    }
}
