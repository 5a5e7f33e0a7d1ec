//! What a signal to a launcher asks of the coordinator.
//!
//! ```text
//! the machine is to go, and the coordinator is elsewhere ─▶ DrainNode ─▶ its workers leave, the rest trains
//! on
//!                                                 │ the world is fixed, or too few would remain
//! anything else ──────────────────────────────────┴──────▶ StopRun ─▶ the whole run ends with a checkpoint
//! ```
//!
//! SIGTERM, USR1 and the like are what a scheduler sends before it takes a machine away: that is one node's
//! affair. Ctrl-C is a person's, who means the run; and where the coordinator is ours, the run cannot outlive
//! this launcher.

use std::time::Duration;

use coxswain_proto::{
    calls,
    v1::{DrainNodeRequest, StopRunRequest, drain_node_request::Node},
};
use tonic::{Code, Status};

use crate::control::{Access, prompt};

/// Before a call without an answer is made again: a coordinator that died is back within a second.
const RETRY: Duration = Duration::from_millis(250);
/// Calls until the workers are sent the signal instead.
const TRIES: u32 = 20;

/// What is asked.
#[derive(Clone, Debug)]
pub struct ShutdownRequest {
    /// For the run's log.
    pub reason: String,
    /// The launcher as it joined, if its node alone is to go.
    pub node_id: Option<String>,
}

/// What is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalGrant {
    /// This node leaves.
    Drained,
    /// The run ends.
    Stopping,
}

/// Asks until it is answered; the error says why it is not granted. Safe to repeat, as both calls are.
pub async fn ask(access: &Access, request: &ShutdownRequest) -> Result<SignalGrant, String> {
    let mut tries = 0;
    loop {
        match ask_once(access, request).await {
            Ok(granted) => return Ok(granted),
            Err(status) if calls::may_answer_later(status.code()) && tries < TRIES => tries += 1,
            Err(status) => return Err(status.message().to_owned()),
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn ask_once(access: &Access, request: &ShutdownRequest) -> Result<SignalGrant, Status> {
    let reason = request.reason.clone();
    if let Some(node_id) = request.node_id.clone() {
        let request = DrainNodeRequest { node: Some(Node::NodeId(node_id)), reason: reason.clone() };
        match access.control().drain_node(prompt(request)).await {
            Ok(_) => return Ok(SignalGrant::Drained),
            // It cannot go by itself: then all do.
            Err(status) if matches!(status.code(), Code::FailedPrecondition | Code::NotFound) => {}
            Err(status) => return Err(status),
        }
    }
    access.control().stop_run(prompt(StopRunRequest { reason })).await.map(|_| SignalGrant::Stopping)
}
