//! A look at the next collective from outside it: what has come in already, without taking it.
//!
//! A rank enters an all-gather by sending its header and its own share, whether or not the next rank is there
//! to read them, and while it waits it passes on what comes from the ranks before it. So what lies unread in
//! a lane says what they have brought, at no message's cost:
//!
//! ```text
//! rank 1: ... still computing                 unread: header | share of rank 0 | share of rank 3 | ...
//! ```
//!
//! It is a hint. What is not there yet may come a moment later, and everything that is seen is still to be
//! received by the collective itself, which also says what is wrong with a neighbour that is elsewhere.
//! Nothing of an older collective can be seen: it has been read.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, atomic::Ordering};

use coxswain_proto::ids::Rank;

use super::{
    element::Kind,
    lane::Inbound,
    wire::{HEADER, Header, Operation},
};
use crate::collective::Progress;

/// What the ranks before this one have brought to an all-gather that it has not entered.
#[derive(Debug)]
pub struct GatherPeek {
    previous: Arc<Mutex<Inbound>>,
    progress: Arc<Progress>,
    rank: usize,
    world: usize,
    /// Elements of the whole buffer.
    length: usize,
}

impl GatherPeek {
    pub(super) fn new(
        previous: Arc<Mutex<Inbound>>,
        progress: Arc<Progress>,
        rank: usize,
        world: usize,
        length: usize,
    ) -> Self {
        Self { previous, progress, rank, world, length }
    }

    /// The shares that are there in whole, with the ranks that brought them: the rank before this one first,
    /// then the one before that. None while a collective is under way, or if the next one is another.
    pub fn shares(&self) -> Vec<(Rank, Vec<f64>)> {
        let previous = match self.previous.try_lock() {
            Ok(previous) => previous,
            Err(TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
            Err(TryLockError::WouldBlock) => return Vec::new(),
        };
        let mut header = [0; HEADER];
        if previous.peek(&mut header) < HEADER || Header::decode(&header) != Some(self.expected()) {
            return Vec::new();
        }
        let size = self.length / self.world * size_of::<f64>();
        let mut bytes = vec![0; HEADER + size * (self.world - 1)];
        let count = previous.peek(&mut bytes).max(HEADER);
        let whole = bytes[HEADER..count].chunks_exact(size.max(1)).zip(1..);
        let rank = |behind: usize| Rank(((self.rank + self.world - behind) % self.world) as u32);
        whole.map(|(share, behind)| (rank(behind), floats(share))).collect()
    }

    /// How the collective begins.
    fn expected(&self) -> Header {
        Header {
            operation: Operation::AllGather,
            kind: Kind::F64,
            reduce: None,
            root: 0,
            world: self.world as u32,
            sequence: self.progress.entered.load(Ordering::Relaxed) + 1,
            length: self.length as u64,
        }
    }
}

/// The way in, for a collective. A rank looks ahead between collectives, and never waits for that.
pub(super) fn lock(previous: &Mutex<Inbound>) -> MutexGuard<'_, Inbound> {
    previous.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As they are on the wire, in the machine's own order.
fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(8).map(|word| f64::from_ne_bytes(std::array::from_fn(|at| word[at]))).collect()
}
