//! What the handlers of both services share.

use std::sync::Arc;

use coxswain_proto::v1;
use tonic::Status;

use crate::{core::action::Reply, driver::Handle};

/// What both services say of the run itself.
#[derive(Clone, Debug)]
pub struct RunFacts {
    /// Names the run among runs.
    pub run_id: String,
    /// `run.name`.
    pub run_name: String,
    /// What workers are given.
    pub document: v1::RunSpecDocument,
    /// This binary's.
    pub version: String,
    /// Workers wanted.
    pub world: u32,
    /// `run.output_dir`.
    pub output_dir: String,
    /// The launcher whose child this coordinator is.
    pub hosted_by: Option<String>,
    /// The number of its claim to the coordinator's role.
    pub claim: Option<u64>,
}

/// What every handler needs.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) handle: Handle,
    pub(super) facts: Arc<RunFacts>,
}

/// The core answered another question: a defect.
pub(super) fn mismatch(reply: &Reply) -> Status {
    Status::internal(format!("the core answered another question: {reply:?}"))
}
