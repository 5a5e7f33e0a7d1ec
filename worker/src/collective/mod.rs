//! What ranks say to each other: the collectives, as a trait with three implementations.
//!
//! | | for |
//! |---|---|
//! | [`Solo`] | a world of one: every operation is the identity |
//! | [`Ring`] | ranks on CPUs: a ring of TCP connections, and of shared memory between ranks of one machine |
//! | [`HybridCollective`] | ranks on GPUs: a ring for votes and control, a [`Transport`] for large buffers |
//!
//! All ranks call the same operations in the same order with the same sizes. Reductions add in an order that
//! depends on the world size and on an element's place in the buffer alone, so a repeated run gives the same
//! bits. A communicator lives on one thread; only its [`AbortHandle`] and its [`Progress`] may leave it.
//!
//! In-place operations and broadcasts take buffers in a device's memory, too ([`BufMut::Device`]): a
//! transport that can reach them works on them where they lie, everything else on a copy in host memory.
//!
//! Beside them [`parts`]: frozen weights asked of the rank that holds them, which no other takes part in.
//!
//! Every implementation passes the same suite ([`conformance`]).

mod buffer;
mod communicator;
pub mod conformance;
mod error;
mod handles;
mod hybrid;
mod mixture;
pub mod parts;
mod proof;
mod ring;
mod solo;
mod transport;

use buffer::through_host;
pub use buffer::{Buf, BufMut, Reduce};
pub use communicator::Collective;
use communicator::{check_distance, check_root};
pub use coxswain_nn::params::{Cuts, chunk};
pub use error::{CollectiveError, JoinError};
pub use handles::{AbortHandle, Progress};
pub use hybrid::{Brings, HybridCollective, join};
pub use mixture::Computes;
pub use ring::{GatherPeek, Membership, Ring, RingAbort, RingListener};
#[cfg(test)]
pub(crate) use ring::{loopback, loopback_over};
pub use solo::Solo;
pub use transport::{
    Offer, Place, Transfer, TransferBuffer, TransferKind, Transport, TransportError, TransportId,
    TransportSource,
};
