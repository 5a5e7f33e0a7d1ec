//! A command that is given a message, or a URL that is sent one, for a limited time.

use std::{process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde_json::Value;
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

/// How long it may take for one message.
const PATIENCE: Duration = Duration::from_secs(10);
/// Characters of what it says of a failure.
const TOLD: usize = 200;

/// Where messages go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Given the message on its standard input, by a shell.
    Shell(String),
    /// Sent the message as the body of a POST, by `curl`.
    Url(String),
}

impl Hook {
    /// A URL if it looks like one; a command otherwise.
    pub fn new(text: &str) -> Self {
        let is_url = ["http://", "https://"].iter().any(|scheme| text.starts_with(scheme));
        if is_url { Self::Url(text.to_owned()) } else { Self::Shell(text.to_owned()) }
    }

    fn command(&self, event: &str) -> Command {
        let mut command = match self {
            Self::Shell(line) => {
                let mut shell = Command::new("sh");
                shell.arg("-c").arg(line);
                shell
            }
            Self::Url(url) => {
                let mut curl = Command::new("curl");
                curl.args(["--silent", "--show-error", "--fail", "--output", "/dev/null", "--max-time", "9"]);
                curl.args(["--header", "Content-Type: application/json", "--data-binary", "@-", "--", url]);
                curl
            }
        };
        command.env("COX_EVENT", event);
        // A group of its own: what it starts ends with it, and a Ctrl-C is not for it.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.kill_on_drop(true);
        command
    }

    /// Hands over a message; what is wrong with the hook if it did not take it.
    pub async fn tell(&self, event: &str, message: &Value) -> Result<(), String> {
        let program = if matches!(self, Self::Url(_)) { "curl" } else { "the command" };
        let mut child =
            self.command(event).spawn().map_err(|error| format!("{program} cannot be started: {error}"))?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
        let stdin = child.stdin.take();
        let text = format!("{message}\n");
        let ended = timeout(PATIENCE, async {
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
                return Err(format!("{program} did not end within {} s and was killed", PATIENCE.as_secs()));
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
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(hook: &str) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(Hook::new(hook).tell("end", &json!({"text": "it's \"over\""})))
    }

    #[test]
    fn a_command_gets_the_message_and_its_failure_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let kept = dir.path().join("kept");
        told(&format!("cat > '{}'; echo $COX_EVENT >> '{0}'", kept.display())).unwrap();
        assert_eq!(std::fs::read_to_string(kept).unwrap(), "{\"text\":\"it's \\\"over\\\"\"}\nend\n");
        told("true").unwrap();
        let failed = told("echo no such channel >&2; exit 3").unwrap_err();
        assert_eq!(failed, "the command failed (exit status: 3): no such channel");
        assert_eq!(told("false").unwrap_err(), "the command failed (exit status: 1)");
    }

    #[test]
    fn a_url_is_posted_to_and_its_refusal_is_told_without_it() {
        let failed = told("http://127.0.0.1:9/secret").unwrap_err();
        assert!(failed.starts_with("curl ") && !failed.contains("secret"), "{failed}");
    }
}
