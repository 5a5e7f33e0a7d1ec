//! A command that is given a message, or a URL that is sent one, for a limited time.

use std::time::Duration;

use coxswain_proto::human;
use serde_json::Value;
use tokio::process::Command;

use super::{hand_over::hand_over, post::Post};

/// How long it may take for one message.
const PATIENCE: Duration = Duration::from_secs(10);
/// Characters of a message's text in a variable: what a channel, a subject or a scheduler's comment takes.
const LINE: usize = 500;

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

    /// Hands over a message; what is wrong with the hook if it did not take it.
    pub async fn tell(&self, event: &str, message: &Value) -> Result<(), String> {
        match self {
            Self::Shell(line) => {
                let mut shell = Command::new("sh");
                shell.arg("-c").arg(line);
                let text = message["text"].as_str().unwrap_or_default();
                shell.env("COX_EVENT", event).env("COX_TEXT", in_a_line(text));
                hand_over(shell, "the command", &format!("{message}\n"), PATIENCE).await
            }
            Self::Url(url) => Post { url, headers: &[], ca_cert: None, message }.send(PATIENCE).await,
        }
    }
}

/// A text in one line, without what a variable or a terminal does not take.
fn in_a_line(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    human::start(&human::escaped(&words.join(" ")), LINE)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(hook: &str) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(Hook::new(hook).tell("end", &json!({"text": "it's \"over\"\n\0 now"})))
    }

    #[test]
    fn a_command_gets_the_message_and_its_failure_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let kept = dir.path().join("kept");
        told(&format!("cat > '{}'; echo \"$COX_EVENT: $COX_TEXT\" >> '{0}'", kept.display())).unwrap();
        let expected = "{\"text\":\"it's \\\"over\\\"\\n\\u0000 now\"}\nend: it's \"over\" \\u0000 now\n";
        assert_eq!(std::fs::read_to_string(kept).unwrap(), expected);
        told("true").unwrap();
        let failed = told("echo no such channel >&2; exit 3").unwrap_err();
        assert_eq!(failed, "the command failed (exit status: 3): no such channel");
        assert_eq!(told("false").unwrap_err(), "the command failed (exit status: 1)");
    }

    #[test]
    fn what_a_command_has_started_ends_with_it_where_it_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let kept = dir.path().join("kept");
        let script = format!("sleep 1000 & echo $! > '{0}.part'; mv '{0}.part' '{0}'; wait", kept.display());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let begun = async {
            while !kept.exists() {
                tokio::task::yield_now().await;
            }
        };
        let (hook, message) = (Hook::new(&script), json!({"text": "over"}));
        runtime.block_on(async {
            tokio::select! {
                ended = hook.tell("end", &message) => panic!("{ended:?}"),
                () = begun => {}
            }
        });
        let pid = std::fs::read_to_string(kept).unwrap();
        let lives = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
            // The process that has it now may not have asked for its end yet.
            stat.is_ok_and(|stat| !stat.contains(") Z "))
        };
        while lives() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_url_is_posted_to_and_its_refusal_is_told_without_it() {
        let failed = told("http://127.0.0.1:9/secret").unwrap_err();
        assert!(failed.starts_with("curl ") && !failed.contains("secret"), "{failed}");
    }
}
