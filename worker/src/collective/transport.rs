//! What carries large buffers between the ranks of one generation, seen from above: NCCL, or in tests
//! something that behaves like it.
//!
//! A transport moves one buffer at a time and never waits: a transfer is started, asked after, and finished.
//! It knows nothing of votes, deadlines or lost ranks; that is what the ring beside it is for
//! ([`HybridCollective`](super::HybridCollective)). Buffers in a device's memory are offered to it as they
//! are; those that it cannot reach there come to it as copies in host memory.

use std::time::Instant;

use coxswain_proto::ids::Rank;

use super::Reduce;
use coxswain_nn::kernels::flat::DeviceBuffer;

/// What happens to a buffer of `length` elements, cut by [`chunk`](super::chunk).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferKind {
    /// Every rank ends with the reduction of all.
    AllReduce(Reduce),
    /// Rank `r` ends with the reduction of all chunks `r` in its place; the other chunks are scratch.
    ReduceScatter(Reduce),
    /// Rank `r` brings chunk `r`; every rank ends with all.
    AllGather,
    /// Rank `r` brings chunk `r`; every rank ends with the chunk of the rank so many before it, too.
    Shift(usize),
    /// Every rank ends with the buffer of this rank.
    Broadcast(Rank),
}

/// One transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// What happens.
    pub kind: TransferKind,
    /// Elements of the buffer, the same on all ranks.
    pub length: usize,
    /// Bytes of an element: 2 is bfloat16, 4 float32, 8 float64.
    pub width: usize,
}

/// What a transport said when it failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TransportError(pub String);

/// The buffer of a transfer.
#[derive(Debug)]
pub enum TransferBuffer<'a> {
    /// In host memory.
    Host(&'a mut [u8]),
    /// In a device's, where the transport [reaches](Transport::reaches) it.
    Device(&'a mut dyn DeviceBuffer),
}

/// Carries buffers. Lives on one thread.
pub trait Transport {
    /// Whether a transfer can be made on this buffer where it lies; how is the transport's own affair, ranks
    /// need not agree.
    fn reaches(&self, _transfer: &Transfer, _buffer: &dyn DeviceBuffer) -> bool {
        false
    }

    /// Takes what this rank brings from `buffer` and starts; does not wait for other ranks. What is in a
    /// device's memory must not be touched until [`Transport::poll`] has said true or [`Transport::abort`]
    /// has returned.
    fn start(&mut self, transfer: &Transfer, buffer: &mut TransferBuffer<'_>) -> Result<(), TransportError>;

    /// Whether the transfer that was started has ended on this rank.
    fn poll(&mut self) -> Result<bool, TransportError>;

    /// Puts what this rank receives into `buffer`; after [`Transport::poll`] has said true.
    fn finish(&mut self, transfer: &Transfer, buffer: &mut TransferBuffer<'_>) -> Result<(), TransportError>;

    /// Ends the transfer in flight and the transport, without waiting for other ranks.
    fn abort(&mut self);

    /// Bytes of memory held for buffers, wherever it is.
    fn buffer_bytes(&self) -> usize;
}

/// What a rank could bring into a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Version of the library; ranks of different versions do not connect.
    pub version: u32,
    /// Names the GPU: ranks of one GPU are told.
    pub gpu: u32,
}

/// Made by one rank and handed to all others before they connect.
pub type TransportId = [u8; 128];

/// A rank's place in a transport.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// This rank.
    pub rank: Rank,
    /// Ranks in all.
    pub world: usize,
    /// Made by rank 0.
    pub id: TransportId,
    /// How long to wait for the others.
    pub deadline: Instant,
}

/// Makes the transport of each generation.
pub trait TransportSource: Send {
    /// What this rank could bring, or why it cannot.
    fn offer(&mut self) -> Result<Offer, TransportError>;

    /// A new id.
    fn id(&mut self) -> Result<TransportId, TransportError>;

    /// Connects all ranks that were handed the same id. While it waits it asks `go_on`, and gives up when
    /// that is false.
    fn connect(
        &mut self,
        place: &Place,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Transport>, TransportError>;
}
