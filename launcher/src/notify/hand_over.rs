//! A message handed to a program of the user's, which gets a limited time for it.

use std::{process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

/// Characters of what it says of a failure.
const TOLD: usize = 200;

/// Starts `command`, writes the text to its standard input and waits for its end; what is wrong with it,
/// called `program`, if it did not take the text within `patience`.
pub async fn hand_over(
    mut command: Command,
    program: &str,
    text: &str,
    patience: Duration,
) -> Result<(), String> {
    // A group of its own: what it starts ends with it, and a Ctrl-C is not for it.
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.kill_on_drop(true);
    let mut child = command.spawn().map_err(|error| format!("{program} cannot be started: {error}"))?;
    let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
    let stdin = child.stdin.take();
    let ended = timeout(patience, async {
        if let Some(mut stdin) = stdin {
            // One that does not read its message has no need of it.
            let _ = stdin.write_all(text.as_bytes()).await;
        }
        child.wait_with_output().await
    });
    let output = match ended.await {
        Ok(output) => output.map_err(|error| format!("{program}: {error}"))?,
        Err(_) => {
            // The process itself has been killed where it was dropped; this is for what it has started.
            let _ = group.map(|group| killpg(group, Signal::SIGKILL));
            return Err(format!("{program} did not end within {} s and was killed", patience.as_secs()));
        }
    };
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let complaint = coxswain_proto::human::start(complaint.lines().next().unwrap_or_default(), TOLD);
    let separator = if complaint.is_empty() { "" } else { ": " };
    Err(format!("{program} failed ({}){separator}{complaint}", output.status))
}
