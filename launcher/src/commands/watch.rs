//! `cox watch`: events as they happen, until the run ends.

use clap::Args;
use coxswain_proto::v1::{RunPhase, WatchEvent, WatchRequest, watch_event::Kind};

use super::block_on;
use crate::{
    endpoint::Target,
    exit::{Exit, Failed, Outcome},
    render::{events, json, say},
    supervise::console::{Console, Terminal},
};

/// Flags of `cox watch`.
#[derive(Args, Debug)]
pub struct WatchArgs {
    #[command(flatten)]
    target: Target,
    /// One JSON object a line instead of text
    #[arg(long)]
    json: bool,
}

/// Follows a run. Ends when the run does; its failure is this command's failure.
pub fn execute(args: &WatchArgs) -> Outcome {
    block_on(async {
        let access = args.target.access()?;
        let stream = access.control().watch(WatchRequest {}).await.map_err(|s| access.explain(&s))?;
        let mut stream = stream.into_inner();
        let terminal = (!args.json).then(Terminal::new);
        let mut last = RunPhase::Unspecified;
        while let Some(event) = stream.message().await.map_err(|s| access.explain(&s))? {
            last = phase(&event).unwrap_or(last);
            match &terminal {
                Some(terminal) => show(terminal, &event),
                None if say(json::event(&event)) => {}
                None => return Ok(()),
            }
            if matches!(last, RunPhase::Finished | RunPhase::Failed) {
                break;
            }
        }
        if let Some(terminal) = terminal {
            terminal.finish();
        }
        match last {
            RunPhase::Failed => Err(Failed::silent(Exit::WorkerFailed)),
            RunPhase::Finished | RunPhase::Stopping => Ok(()),
            _ => Err(Failed::new(Exit::CoordinatorLost, "the coordinator ended before the run did")),
        }
    })
}

fn phase(event: &WatchEvent) -> Option<RunPhase> {
    match &event.kind {
        Some(Kind::Status(now)) => RunPhase::try_from(now.phase).ok(),
        Some(Kind::Phase(changed)) => RunPhase::try_from(changed.phase).ok(),
        _ => None,
    }
}

fn show(terminal: &Terminal, event: &WatchEvent) {
    match &event.kind {
        Some(Kind::Step(step)) if terminal.has_bar() => {
            terminal.progress(step.step + 1, step.total_steps, events::beside_bar(step));
        }
        _ => terminal.line(&events::line(event)),
    }
}
