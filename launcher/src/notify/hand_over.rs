//! A message handed to a program of the user's, which gets a limited time for it.

use std::{process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{ChildStderr, Command},
    time::timeout,
};

/// Characters of what it says of a failure.
const TOLD: usize = 200;
/// Bytes of it that are kept until then.
const KEPT: u64 = 4 << 10;

/// Starts `command`, writes the text to its standard input and waits for its end; what is wrong with it,
/// called `program`, if it did not take the text within `patience`.
pub async fn hand_over(
    mut command: Command,
    program: &str,
    text: &str,
    patience: Duration,
) -> Result<(), String> {
    // A group of its own: what it starts ends with it where it is not waited for, and a Ctrl-C is not for it.
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.kill_on_drop(true);
    let mut child = command.spawn().map_err(|error| format!("{program} cannot be started: {error}"))?;
    let mut group = Group(child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw));
    let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
    let give = async {
        if let Some(mut stdin) = stdin {
            // One that does not read its message has no need of it.
            let _ = stdin.write_all(text.as_bytes()).await;
        }
    };
    let ended = timeout(patience, async { tokio::join!(child.wait(), complaint(stderr), give) });
    let (status, complaint) = match ended.await {
        Ok((status, complaint, ())) => (status.map_err(|error| format!("{program}: {error}"))?, complaint),
        Err(_) => {
            return Err(format!("{program} did not end within {} s and was killed", patience.as_secs()));
        }
    };
    group.0 = None;
    if status.success() {
        return Ok(());
    }
    let complaint = coxswain_proto::human::start(complaint.lines().next().unwrap_or_default(), TOLD);
    let separator = if complaint.is_empty() { "" } else { ": " };
    Err(format!("{program} failed ({status}){separator}{complaint}"))
}

/// A program and what it has started, as long as it is waited for: killed where that is given up.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        // Gone already.
        let _ = self.0.map(|group| killpg(group, Signal::SIGKILL));
    }
}

/// How it begins; the rest is read, so that the program can go on, and forgotten.
async fn complaint(stderr: Option<ChildStderr>) -> String {
    let mut begin = Vec::new();
    if let Some(mut stderr) = stderr {
        // Of a pipe that fails, what came until then.
        let _ = (&mut stderr).take(KEPT).read_to_end(&mut begin).await;
        let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
    }
    String::from_utf8_lossy(&begin).into_owned()
}
