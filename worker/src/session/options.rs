//! What a session is started with, and how it ends.

use std::{sync::Arc, time::Duration};

use coxswain_identity::{Address, Credentials, Whereabouts};
use coxswain_proto::{
    ids::{Bytes, Rank},
    limits,
};

use crate::{health::device::Driver, trainer::FailureKind};

/// What a session is started with: the launcher's environment variables, mostly.
#[derive(Clone)]
pub struct SessionOptions {
    /// Where the coordinator is.
    pub endpoint: Whereabouts,
    /// What this worker shows of itself, and by what it knows the coordinator.
    pub credentials: Credentials,
    /// `--rdzv-id`; empty accepts the coordinator's run.
    pub run_id: String,
    /// `RANK`.
    pub rank: Rank,
    /// `LOCAL_RANK`.
    pub local_rank: u32,
    /// `GROUP_RANK`.
    pub node_rank: u32,
    /// `WORLD_SIZE`; must be the coordinator's.
    pub world_size: u32,
    /// This machine, for people.
    pub host: String,
    /// `HOST:PORT` where this worker's listener accepts its ring neighbour.
    pub data_address: String,
    /// Bytes in use now, for heartbeats; called once a second from the session's thread.
    pub memory_in_use: Arc<dyn Fn() -> Bytes + Send + Sync>,
    /// Reads what drivers say of GPUs, where that is known.
    pub driver: Option<Arc<dyn Driver>>,
    /// How long to look for a coordinator that does not answer.
    pub patience: Duration,
}

impl SessionOptions {
    /// A worker of a world of one on this machine; fill in the rest.
    pub fn new(endpoint: &str) -> Self {
        Self {
            endpoint: Whereabouts::fixed(Address::parse(endpoint)),
            credentials: Credentials::default(),
            run_id: String::new(),
            rank: Rank(0),
            local_rank: 0,
            node_rank: 0,
            world_size: 1,
            host: "localhost".into(),
            data_address: String::new(),
            memory_in_use: Arc::new(|| Bytes(0)),
            driver: None,
            patience: limits::COORDINATOR_PATIENCE,
        }
    }
}

/// Why a session did not end in order.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The coordinator does not want this worker: rank taken, another version, another run, another data set.
    #[error("the coordinator at {endpoint} refused this worker: {reason}")]
    Refused {
        /// Where it listens.
        endpoint: String,
        /// What it said.
        reason: String,
    },
    /// There is no answer.
    #[error("no answer from the coordinator at {endpoint} for {waited:.1?}: {reason}")]
    Lost {
        /// Where it should listen.
        endpoint: String,
        /// How long it was looked for.
        waited: Duration,
        /// The last error.
        reason: String,
    },
    /// Something else ended the run; this rank is a victim.
    #[error("the run ended: {0}")]
    Aborted(String),
    /// This rank failed.
    #[error("{message}")]
    Failed {
        /// What kind; decides the exit code.
        kind: FailureKind,
        /// The error, with its sources.
        message: String,
    },
    /// The coordinator broke the contract.
    #[error("the coordinator at {endpoint} sent an invalid reply: {reason}")]
    Protocol {
        /// Where it listens.
        endpoint: String,
        /// Field and value.
        reason: String,
    },
}
