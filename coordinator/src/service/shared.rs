//! What the handlers of both services share.

use std::sync::Arc;

use coxswain_proto::{document, run_spec::RunSpec, v1};
use tonic::Status;

use crate::{core::action::Reply, driver::Handle};

/// Most keys that a refusal names.
const NAMED: usize = 8;

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

impl Service {
    /// Refuses a launcher on `host` that was asked for another run: it would show figures of a run that there
    /// is not. The keys that differ are told there and here.
    pub(super) fn must_be_ours(&self, theirs: &v1::RunSpecDocument, host: &str) -> Result<(), Status> {
        let ours = &self.facts.document;
        if theirs.digest == ours.digest {
            return Ok(());
        }
        let keys = match (RunSpec::try_from(ours), RunSpec::try_from(theirs)) {
            (Ok(ours), Ok(theirs)) => {
                let differences = document::differences(&ours, &theirs);
                let named: Vec<_> = differences.iter().take(NAMED).map(ToString::to_string).collect();
                named.join(", ")
            }
            (Err(error), _) | (_, Err(error)) => error.to_string(),
        };
        let run = &self.facts.run_name;
        tracing::warn!(
            target: "coxswain::run",
            host,
            "refused a node on {host}, which was launched with another specification of run {run} (there: this coordinator, here: the node): {keys}"
        );
        Err(Status::invalid_argument(format!(
            "this node has another specification of run {run}: {keys}; launch all \
             nodes with the same run file and \
             overrides"
        )))
    }
}

/// The core answered another question: a defect.
pub(super) fn mismatch(reply: &Reply) -> Status {
    Status::internal(format!("unexpected reply of the coordinator's core: {reply:?}"))
}
