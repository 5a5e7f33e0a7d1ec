//! What carries large buffers between the ranks of one generation, seen from above: NCCL, or in tests something that behaves like it.
//!
//! A fabric moves one buffer at a time and never waits: a transfer is started, asked after, and finished. It knows nothing of votes,
//! deadlines or lost ranks; that is what the ring beside it is for ([`Carried`](super::Carried)).

use std::time::Instant;

use coxswain_proto::ids::Rank;

use super::Reduce;

/// What happens to a buffer of `length` elements, cut by [`chunk`](super::chunk).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Movement {
    /// Every rank ends with the reduction of all.
    AllReduce(Reduce),
    /// Rank `r` ends with the reduction of all chunks `r` in its place; the other chunks are scratch.
    ReduceScatter(Reduce),
    /// Rank `r` brings chunk `r`; every rank ends with all.
    AllGather,
    /// Rank `r` brings chunk `r`; every rank ends with the chunk of the rank before it, too.
    Shift,
    /// Every rank ends with the buffer of this rank.
    Broadcast(Rank),
}

/// One transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// What happens.
    pub movement: Movement,
    /// Elements of the buffer, the same on all ranks.
    pub length: usize,
    /// Bytes of an element: 2 is bfloat16, 4 float32, 8 float64.
    pub width: usize,
}

/// What a fabric said when it failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FabricError(pub String);

/// Carries buffers. Lives on one thread.
pub trait Fabric {
    /// Takes what this rank brings from `bytes` and starts; does not wait for other ranks.
    fn start(&mut self, transfer: &Transfer, bytes: &[u8]) -> Result<(), FabricError>;

    /// Whether the transfer that was started has ended on this rank.
    fn poll(&mut self) -> Result<bool, FabricError>;

    /// Puts what this rank receives into `bytes`; after [`Fabric::poll`] has said true.
    fn finish(&mut self, transfer: &Transfer, bytes: &mut [u8]) -> Result<(), FabricError>;

    /// Ends the transfer in flight and the fabric, without waiting for anybody.
    fn abort(&mut self);

    /// Bytes of memory held for buffers, wherever it is.
    fn buffer_bytes(&self) -> usize;
}

/// What a rank could bring into a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Version of the library; ranks of different versions do not connect.
    pub version: u32,
    /// Names the card: ranks of one card are told.
    pub card: u32,
}

/// Made by one rank and handed to all others before they connect.
pub type FabricId = [u8; 128];

/// A rank's place in a fabric.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// This rank.
    pub rank: Rank,
    /// Ranks in all.
    pub world: usize,
    /// Made by rank 0.
    pub id: FabricId,
    /// How long to wait for the others.
    pub deadline: Instant,
}

/// Makes the fabric of each generation.
pub trait FabricSource: Send {
    /// What this rank could bring, or why it cannot.
    fn offer(&mut self) -> Result<Offer, FabricError>;

    /// A new id.
    fn id(&mut self) -> Result<FabricId, FabricError>;

    /// Connects all ranks that were handed the same id. While it waits it asks `go_on`, and gives up when that is false.
    fn connect(
        &mut self,
        place: &Place,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Fabric>, FabricError>;
}
