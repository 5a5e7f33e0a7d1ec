//! `cox pause`, `resume`, `checkpoint`, `drain`, `stop`: one call each, safe to repeat.

use clap::Args;
use coxswain_proto::v1::{
    CheckpointRequest, DrainNodeRequest, PauseRequest, ResumeRequest, RunPhase, StopRunRequest,
    drain_node_request::Node,
};

use super::runtime::block_on;
use crate::{
    control::prompt,
    endpoint::Target,
    exit::Outcome,
    render::{names, say},
};

/// Flags of `cox drain`.
#[derive(Args, Debug)]
pub struct DrainArgs {
    #[command(flatten)]
    target: Target,
    /// Node to remove, by its --node-rank
    #[arg(long, value_name = "N")]
    node: u32,
    /// Reason to record in the run's log
    #[arg(long, default_value = "requested with cox drain")]
    reason: String,
}

/// Flags of `cox stop`.
#[derive(Args, Debug)]
pub struct StopArgs {
    #[command(flatten)]
    target: Target,
    /// Reason to record in the run's log
    #[arg(long, default_value = "cox stop")]
    reason: String,
}

/// Stops at the next step boundary.
pub fn pause(target: &Target) -> Outcome {
    block_on(async {
        let access = target.access().await?;
        let answer = access.answer(async |mut people| people.pause(prompt(PauseRequest {})).await).await?;
        let phase = names::plain(&names::run_phase(answer.phase));
        match RunPhase::try_from(answer.phase) {
            Ok(RunPhase::Paused | RunPhase::Stopping) => say(phase),
            _ => say(format_args!("{phase}; pauses at the next step boundary")),
        };
        Ok(())
    })
}

/// Goes on.
pub fn resume(target: &Target) -> Outcome {
    block_on(async {
        let access = target.access().await?;
        let answer = access.answer(async |mut people| people.resume(prompt(ResumeRequest {})).await).await?;
        say(names::plain(&names::run_phase(answer.phase)));
        Ok(())
    })
}

/// Writes a checkpoint at the next step boundary.
pub fn checkpoint(target: &Target) -> Outcome {
    block_on(async {
        let access = target.access().await?;
        let request = prompt(CheckpointRequest {});
        access.answer(async |mut people| people.checkpoint(request).await).await?;
        say("a checkpoint will be written at the next step boundary");
        Ok(())
    })
}

/// Lets one node of an elastic world go.
pub fn drain(args: &DrainArgs) -> Outcome {
    block_on(async {
        let access = args.target.access().await?;
        let (node, reason) = (Some(Node::NodeRank(args.node)), args.reason.clone());
        let request = prompt(DrainNodeRequest { node, reason });
        let answer = access.answer(async |mut people| people.drain_node(request).await).await?;
        say(format_args!("node {} leaves at the next step boundary", answer.node_rank));
        Ok(())
    })
}

/// Ends the run in good order.
pub fn stop(args: &StopArgs) -> Outcome {
    block_on(async {
        let access = args.target.access().await?;
        let request = prompt(StopRunRequest { reason: args.reason.clone() });
        let answer = access.answer(async |mut people| people.stop_run(request).await).await?;
        say(names::plain(&names::run_phase(answer.phase)));
        Ok(())
    })
}
