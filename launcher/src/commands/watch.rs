//! `cox watch`: events as they happen, until the run ends.

use std::io::IsTerminal;

use clap::Args;
use coxswain_coordinator::log::time_of_day;
use coxswain_proto::{
    limits,
    v1::{GetStatusRequest, RunPhase, WatchEvent, watch_event::Kind},
};
use tokio::sync::mpsc;

use super::runtime::block_on;
use crate::{
    control::prompt,
    endpoint::Target,
    exit::{CliError, Exit, Outcome},
    render::{events, json, say},
    supervise::{
        console::{Console, LogWriter, Terminal},
        console_mode::{ConsoleFlags, Mode},
        watcher,
    },
};

/// Flags of `cox watch`.
#[derive(Args, Debug)]
pub struct WatchArgs {
    #[command(flatten)]
    target: Target,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Follows a run. Ends when the run does; its failure is this command's failure. A coordinator that dies is
/// looked for while it may be started again.
pub fn execute(args: &WatchArgs) -> Outcome {
    block_on(async {
        let access = args.target.access().await?;
        // A coordinator that cannot be reached at first is not waited for.
        access.look(|mut people| async move { people.get_status(prompt(GetStatusRequest {})).await }).await?;
        let (told, mut events) = mpsc::channel(limits::WATCH_QUEUE);
        let _watcher = watcher::follow(access, told, limits::COORDINATOR_PATIENCE);
        let view = if args.json { View::Json } else { View::text() };
        let mut end = End::default();
        // A run that stands still says nothing: its silence is no sign.
        while let Some(event) = events.recv().await {
            end.note(&event);
            if !view.show(&event) {
                // The reader of standard output is gone.
                return Ok(());
            }
            if end.is_reached() {
                break;
            }
        }
        view.finish();
        end.outcome()
    })
}

/// How events are shown: on standard output; how far the run is goes to a terminal at standard error, if
/// there is one.
enum View {
    Json,
    Text {
        terminal: Terminal,
        /// Standard output is the same terminal: lines are shown where they do not tear the block.
        above_block: bool,
    },
}

impl View {
    fn text() -> Self {
        let mode = Mode::of_stderr(&ConsoleFlags::default());
        let above_block = mode.living && std::io::stdout().is_terminal();
        Self::Text { terminal: Terminal::new(mode, LogWriter::new()), above_block }
    }

    /// False if there is no reader any more.
    fn show(&self, event: &WatchEvent) -> bool {
        let Self::Text { terminal, above_block } = self else { return say(json::event(event)) };
        terminal.watched(event);
        let line = || format!("{}  {}", time_of_day(event.unix_ms), events::line(event));
        match event.kind {
            _ if !above_block => return say(line()),
            Some(Kind::Step(_)) => {}
            _ => terminal.line(&line()),
        }
        true
    }

    fn finish(&self) {
        if let Self::Text { terminal, .. } = self {
            terminal.finish();
        }
    }
}

/// What has been heard of a run's end.
#[derive(Debug, Default)]
struct End {
    phase: RunPhase,
    /// The kind of the failure that ended it.
    cause: Option<i32>,
}

impl End {
    fn note(&mut self, event: &WatchEvent) {
        let (phase, failure) = match &event.kind {
            Some(Kind::Status(now)) => (Some(now.phase), now.first_failure.as_ref()),
            Some(Kind::Phase(changed)) => (Some(changed.phase), None),
            Some(Kind::Failure(failure)) => (None, Some(failure)),
            _ => (None, None),
        };
        self.phase = phase.and_then(|phase| RunPhase::try_from(phase).ok()).unwrap_or(self.phase);
        self.cause = failure.filter(|failure| failure.fatal).map(|failure| failure.kind).or(self.cause);
    }

    fn is_reached(&self) -> bool {
        matches!(self.phase, RunPhase::Finished | RunPhase::Failed)
    }

    fn outcome(&self) -> Outcome {
        match self.phase {
            RunPhase::Finished | RunPhase::Stopping => Ok(()),
            RunPhase::Failed => Err(CliError::silent(self.cause.map_or(Exit::WorkerFailed, Exit::of_cause))),
            _ => Err(CliError::new(Exit::CoordinatorLost, "the coordinator ended before the run did")),
        }
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{Failure, FailureKind, GetStatusResponse, PhaseChanged};

    use super::*;

    fn end(kinds: impl IntoIterator<Item = Kind>) -> Result<(), Exit> {
        let mut end = End::default();
        for kind in kinds {
            assert!(!end.is_reached());
            end.note(&WatchEvent { unix_ms: 0, kind: Some(kind) });
        }
        end.outcome().map_err(|failed| failed.exit)
    }

    fn failure(kind: FailureKind, fatal: bool) -> Failure {
        Failure { kind: kind.into(), fatal, ..Failure::default() }
    }

    fn phase(phase: RunPhase) -> Kind {
        Kind::Phase(PhaseChanged { phase: phase.into(), ..PhaseChanged::default() })
    }

    #[test]
    fn it_ends_as_the_run_does() {
        assert_eq!(end([phase(RunPhase::Training), phase(RunPhase::Finished)]), Ok(()));
        let survived = Kind::Failure(failure(FailureKind::WorkerLost, false));
        let fatal = Kind::Failure(failure(FailureKind::OutOfMemory, true));
        assert_eq!(end([survived.clone(), fatal, phase(RunPhase::Failed)]), Err(Exit::OutOfMemory));
        assert_eq!(end([survived, phase(RunPhase::Failed)]), Err(Exit::WorkerFailed));
        let status = GetStatusResponse {
            phase: RunPhase::Failed.into(),
            first_failure: Some(failure(FailureKind::BadInput, true)),
            ..GetStatusResponse::default()
        };
        assert_eq!(end([Kind::Status(status)]), Err(Exit::BadInput));
        assert_eq!(end([phase(RunPhase::Training)]), Err(Exit::CoordinatorLost));
    }
}
