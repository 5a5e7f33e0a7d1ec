//! `cox top`: runs on a full screen, until the user leaves.

use std::{
    io::{IsTerminal, stdin, stdout},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use ratatui_core::terminal::Terminal;
use ratatui_termion::{
    TermionBackend,
    termion::{event::Key, input::TermRead, raw::IntoRawMode, screen::IntoAlternateScreen},
};
use tokio::sync::mpsc;

use super::runtime::block_on;
use crate::{
    clock, endpoint,
    endpoint::Target,
    exit::{CliError, Exit, Outcome},
    launch::inputs::process_env,
    run_dir::RunDir,
    supervise::signals,
    top::{
        app::{App, ControlRequest, Intent},
        draw::draw,
        follow::Follower,
        theme::Theme,
    },
    view::Update,
};

/// Flags of `cox top`.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// Output directories of runs, active or finished [default: the active ones below runs/]
    #[arg(value_name = "RUN_DIR", conflicts_with = "endpoint")]
    runs: Vec<PathBuf>,
    /// Coordinator's HOST:PORT; repeatable [env: COX_COORDINATOR]
    #[arg(long, value_name = "HOST:PORT")]
    endpoint: Vec<String>,
}

/// What is learned waits for the screen in here.
const UPDATES: usize = 256;
/// Orders and keys that wait.
const WAITING: usize = 16;
/// The least time between two drawings, and how soon a change of the terminal's size is seen: over a slow
/// line each costs bytes.
const FRAME: Duration = Duration::from_millis(250);
/// From the first that is known of a run to its drawing: what comes with it is drawn, too.
const FIRST: Duration = Duration::from_millis(20);

/// Follows runs on a full screen. They do not notice.
pub fn execute(args: &TopArgs) -> Outcome {
    let targets = targets(args)?;
    if !stdin().is_terminal() || !stdout().is_terminal() {
        return Err(CliError::usage("cox top needs a terminal; `cox status` and `cox watch` can be piped"));
    }
    block_on(show(targets))
}

fn targets(args: &TopArgs) -> Result<Vec<Target>, CliError> {
    if let Some(stranger) = args.runs.iter().find(|dir| !RunDir::is_run(dir)) {
        return Err(CliError::usage(format!(
            "{}: not the output directory of a run (there is no run.json)",
            stranger.display()
        )));
    }
    if !args.runs.is_empty() {
        return Ok(args.runs.iter().cloned().map(Target::of_dir).collect());
    }
    if !args.endpoint.is_empty() {
        return Ok(args.endpoint.iter().cloned().map(Target::of_address).collect());
    }
    match process_env("COX_COORDINATOR") {
        Some(address) => Ok(vec![Target::of_address(address)]),
        None => Ok(endpoint::active(Path::new(endpoint::RUNS))?.into_iter().map(Target::of_dir).collect()),
    }
}

async fn show(targets: Vec<Target>) -> Outcome {
    let unusable = |error| CliError::new(Exit::Internal, format!("the terminal cannot be used: {error}"));
    let mut app = App::new(targets.iter().map(label));
    let theme = Theme::new(process_env("NO_COLOR").is_none());
    let mut signals = signals::catch().map_err(unusable)?;
    let (told, mut updates) = mpsc::channel(UPDATES);
    let orders: Vec<_> = targets.into_iter().enumerate().map(|of| follow(of.0, of.1, told.clone())).collect();
    let mut keys = keys();
    // The terminal is as before when this is dropped, whatever the reason.
    let screen = stdout().into_raw_mode().and_then(IntoAlternateScreen::into_alternate_screen);
    let mut terminal =
        screen.and_then(|screen| Terminal::new(TermionBackend::new(screen))).map_err(unusable)?;
    terminal.hide_cursor().map_err(unusable)?;
    let mut next_frame = clock::now();
    loop {
        tokio::select! {
            biased;
            _ = signals.next() => break,
            key = keys.recv() => match key.map(|key| app.key(key)) {
                None | Some(Some(Intent::Quit)) => break,
                Some(Some(Intent::Give(run, order))) => {
                    // An order beyond so many that nobody has taken is one of a user who presses on.
                    let _ = orders[run].try_send(order);
                }
                Some(None) => next_frame = clock::now(),
            },
            () = tokio::time::sleep_until(next_frame.into()) => {
                // A terminal that is gone ends this, and nothing else.
                if terminal.draw(|frame| draw(frame, &app, theme)).is_err() {
                    break;
                }
                next_frame = clock::now() + FRAME;
            }
            Some((run, update)) = updates.recv() => {
                let is_first = matches!(update, Update::Status(_)) && app.runs[run].status.run_id.is_empty();
                app.apply(run, update);
                if is_first {
                    next_frame = clock::now() + FIRST;
                }
            }
        }
    }
    let _ = terminal.show_cursor();
    Ok(())
}

fn label(target: &Target) -> String {
    let dir = target.run_dir().map(|run| run.display().to_string());
    dir.or_else(|| target.endpoint.clone()).unwrap_or_default()
}

fn follow(
    number: usize,
    target: Target,
    updates: mpsc::Sender<(usize, Update)>,
) -> mpsc::Sender<ControlRequest> {
    let (give, orders) = mpsc::channel(WAITING);
    tokio::spawn(Follower { number, target, updates, orders }.follow());
    give
}

/// Keys, read by a thread that ends with the process.
fn keys() -> mpsc::Receiver<Key> {
    let (pressed, keys) = mpsc::channel(WAITING);
    let read = move || {
        for key in stdin().keys().map_while(Result::ok) {
            if pressed.blocking_send(key).is_err() {
                return;
            }
        }
    };
    // Without a thread no key is read, and the screen ends at once.
    let _ = std::thread::Builder::new().name("keys".into()).spawn(read);
    keys
}
