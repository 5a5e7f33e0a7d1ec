//! `cox watch`: events as they happen, until the run ends.

use clap::Args;
use coxswain_proto::{
    limits,
    v1::{GetStatusRequest, RunPhase, WatchEvent, watch_event::Kind},
};
use tokio::sync::mpsc;

use super::block_on;
use crate::{
    control::prompt,
    endpoint::Target,
    exit::{Exit, Failed, Outcome},
    render::{events, json, say},
    supervise::{
        console::{Console, Terminal},
        watcher,
    },
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

/// Follows a run. Ends when the run does; its failure is this command's failure. A coordinator that dies is looked for while it may be
/// started again.
pub fn execute(args: &WatchArgs) -> Outcome {
    block_on(async {
        let access = args.target.access()?;
        // Whoever cannot be reached at first is not waited for.
        access.answer(async |mut people| people.get_status(prompt(GetStatusRequest {})).await).await?;
        let (told, mut events) = mpsc::channel(limits::WATCH_QUEUE);
        let _watcher = watcher::follow(access, told, limits::COORDINATOR_PATIENCE);
        let terminal = (!args.json).then(Terminal::new);
        let last = follow(&mut events, terminal.as_ref()).await;
        if let Some(terminal) = terminal {
            terminal.finish();
        }
        match last {
            None | Some(RunPhase::Finished | RunPhase::Stopping) => Ok(()),
            Some(RunPhase::Failed) => Err(Failed::silent(Exit::WorkerFailed)),
            Some(_) => Err(Failed::new(Exit::CoordinatorLost, "the coordinator ended before the run did")),
        }
    })
}

/// Shows events to the run's end, or until the coordinator has been away for too long; nothing if nobody wants to see more.
async fn follow(events: &mut mpsc::Receiver<WatchEvent>, terminal: Option<&Terminal>) -> Option<RunPhase> {
    let mut last = RunPhase::Unspecified;
    // A run that stands still says nothing: its silence is no sign.
    while let Some(event) = events.recv().await {
        last = phase(&event).unwrap_or(last);
        match terminal {
            Some(terminal) => show(terminal, &event),
            None if say(json::event(&event)) => {}
            None => return None,
        }
        if matches!(last, RunPhase::Finished | RunPhase::Failed) {
            break;
        }
    }
    Some(last)
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
