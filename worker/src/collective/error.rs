//! Why ranks could not connect, and why a collective did not finish.

use std::{io, time::Duration};

use coxswain_proto::ids::{Generation, Rank};

/// Why a collective did not finish.
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    /// A neighbour's connection broke: this rank is a victim.
    #[error("rank {peer} is gone (collective {sequence}, {operation}): {source}")]
    PeerLost {
        /// The neighbour.
        peer: Rank,
        /// Which collective of this communicator's life.
        sequence: u64,
        /// `all_reduce`, `reduce_scatter`, ...
        operation: &'static str,
        /// What the socket said.
        source: io::Error,
    },
    /// [`AbortHandle::abort`] was called.
    #[error("collective {sequence} ({operation}) was aborted: {reason}")]
    Aborted {
        /// Which collective of this communicator's life.
        sequence: u64,
        /// Which operation.
        operation: &'static str,
        /// As given to `abort`.
        reason: String,
    },
    /// Ranks disagree on what they are doing: a programming error, or two versions in one ring.
    #[error("rank {peer} is in another collective: {detail}")]
    Mismatch {
        /// The neighbour.
        peer: Rank,
        /// What both sides said.
        detail: String,
    },
    /// A rank tells of itself what cannot be.
    #[error(
        "rank {peer} sent an impossible value: {detail}; check that it runs the same cox version, and test its memory"
    )]
    Implausible {
        /// The rank.
        peer: Rank,
        /// What it says.
        detail: String,
    },
    /// The ring could not be formed.
    #[error("cannot connect the ring: {0}")]
    Connect(#[from] JoinError),
    /// What carries large buffers has failed in a collective.
    #[error("collective {sequence} ({operation}) failed: {detail}")]
    Transport {
        /// Which collective of this communicator's life.
        sequence: u64,
        /// Which operation.
        operation: &'static str,
        /// What the library said.
        detail: String,
    },
    /// What was asked for to carry large buffers is not there on all ranks.
    #[error("launch.collectives nccl: {0}; use `auto` or `ring`, or make NCCL available on every node")]
    NoTransport(String),
    /// Some ranks compute on GPUs, and others would have.
    #[error(
        "{stranded} found no GPU and would compute on the CPU while {on_gpus} would use a GPU: every step \
         would wait for the CPU; run `cox selftest --device cuda` where no GPU was found to see what is \
         missing; if the mix is intended, start the workers without a GPU with --device cpu \
         (or COX_DEVICE=cpu); launch.device=cpu puts all workers on CPUs"
    )]
    MixedDevices {
        /// Ranks without a GPU.
        stranded: String,
        /// Ranks with one.
        on_gpus: String,
    },
    /// A buffer has the wrong length.
    #[error("{operation}: {detail}")]
    Size {
        /// Which operation.
        operation: &'static str,
        /// Expected and given.
        detail: String,
    },
}

/// Why a ring could not be formed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The listening socket could not be opened.
    #[error("cannot listen on {address}: {source}; use a local address and a free port (0 for any)")]
    Listen {
        /// As given.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// The membership contradicts itself.
    #[error("there is no rank {rank} in a world of {world}")]
    Membership {
        /// This rank.
        rank: Rank,
        /// Addresses given.
        world: usize,
    },
    /// A neighbour answered that this rank does not belong there.
    #[error("rank {peer} at {address} (generation {generation}) refuses this rank: {reason}")]
    Refused {
        /// The neighbour.
        peer: Rank,
        /// Address.
        address: String,
        /// The generation it is in.
        generation: Generation,
        /// Reason.
        reason: String,
    },
    /// The next rank could not be reached in time.
    #[error(
        "rank {peer} at {address} did not accept this rank within {waited:.1?} ({last}); check that it runs and is reachable from here"
    )]
    NoAnswer {
        /// The neighbour.
        peer: Rank,
        /// Address.
        address: String,
        /// How long it was called.
        waited: Duration,
        /// What the last attempt met.
        last: String,
    },
    /// The previous rank did not call in time.
    #[error(
        "rank {peer} did not connect within {waited:.1?} (other connections refused: {refused}); is it running, and is {address} reachable from it?"
    )]
    NobodyCame {
        /// The neighbour.
        peer: Rank,
        /// Where this rank listens.
        address: String,
        /// How long it listened.
        waited: Duration,
        /// Connections turned away.
        refused: usize,
    },
    /// What passes between two ranks is lost or changed.
    #[error("the link from rank {from} to rank {to} fails: {why}")]
    Link {
        /// Who has sent.
        from: Rank,
        /// To whom.
        to: Rank,
        /// What was seen.
        why: String,
    },
    /// A neighbour that had been found left again.
    #[error("rank {peer} left while the ring was formed: {source}")]
    Left {
        /// The neighbour.
        peer: Rank,
        /// How it was noticed.
        source: io::Error,
    },
    /// The sockets could not be waited for.
    #[error("cannot poll the sockets of the ring: {0}")]
    Wait(io::Error),
}
