//! What ranks say to each other: the collectives, as a trait with three implementations.
//!
//! | | for |
//! |---|---|
//! | [`Solo`] | a world of one: every operation is the identity |
//! | [`Ring`] | ranks on CPUs: a ring of TCP connections, and of shared memory between ranks of one machine |
//! | [`Carried`] | ranks on cards: a ring for votes and control, a [`Fabric`] (NCCL, in a crate of its own) for everything large |
//!
//! All ranks call the same operations in the same order with the same sizes. Reductions add in an order that depends on the
//! world size and on an element's place in the buffer alone, so a repeated run gives the same bits. A communicator lives on
//! one thread; only its [`AbortHandle`] and its [`Progress`] may leave it.
//!
//! In-place operations and broadcasts take buffers in a device's memory, too ([`BufMut::Device`]): a fabric that can reach them works on them
//! where they lie, everything else on a copy in host memory.
//!
//! Every implementation passes the same suite ([`conformance`]).

mod buffer;
mod carried;
mod communicator;
pub mod conformance;
mod error;
mod fabric;
mod handles;
mod mixture;
mod ring;
mod solo;

pub use buffer::{Buf, BufMut, Reduce};
use buffer::{size_error, through_host};
pub use carried::{Brings, Carried, join};
pub use communicator::Collective;
use communicator::check_root;
pub use coxswain_nn::params::chunk;
pub use error::{CollectiveError, JoinError};
pub use fabric::{Cargo, Fabric, FabricError, FabricId, FabricSource, Movement, Offer, Place, Transfer};
pub use handles::{AbortHandle, Progress};
pub use mixture::Computes;
pub use ring::{Ahead, Membership, Ring, RingAbort, RingListener};
#[cfg(test)]
pub(crate) use ring::{loopback, loopback_over};
pub use solo::Solo;
