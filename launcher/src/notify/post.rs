//! A message as the body of a POST, by `curl`. What it is told it reads from its standard input: the URL of a
//! webhook and a token are secrets, and arguments are for everybody who lists processes.

use std::{path::Path, time::Duration};

use serde_json::Value;
use tokio::process::Command;

use super::hand_over::hand_over;

/// What is sent, and where.
pub struct Post<'a> {
    /// Where to.
    pub url: &'a str,
    /// Beside the type of its content.
    pub headers: &'a [String],
    /// The certificate authority of the server, if it has one of its own.
    pub ca_cert: Option<&'a Path>,
    /// The body.
    pub message: &'a Value,
}

impl Post<'_> {
    /// Sends it; what went wrong if it was not taken within `patience`.
    pub async fn send(&self, patience: Duration) -> Result<(), String> {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--fail", "--output", "/dev/null", "--config", "-"]);
        hand_over(curl, "curl", &self.settings(patience), patience).await
    }

    /// As `curl` reads them. It gives up by itself a second before it is given up.
    fn settings(&self, patience: Duration) -> String {
        let limit = patience.saturating_sub(Duration::from_secs(1)).as_secs().to_string();
        let fixed = [
            ("url", self.url.to_owned()),
            ("max-time", limit),
            ("header", "Content-Type: application/json".to_owned()),
            ("data-raw", self.message.to_string()),
        ];
        let headers = self.headers.iter().map(|header| ("header", header.clone()));
        let ca_cert = self.ca_cert.map(|path| ("cacert", path.display().to_string()));
        let settings = fixed.into_iter().chain(headers).chain(ca_cert);
        settings.map(|(name, value)| format!("{name} = {}\n", quoted(&value))).collect()
    }
}

/// A value in `curl`'s settings.
fn quoted(value: &str) -> String {
    let mut text = String::from("\"");
    for c in value.chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            other => text.push(other),
        }
    }
    text + "\""
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_secret_is_on_curls_standard_input_with_all_else() {
        let message = json!({"a": "\"\n"});
        let headers = ["Authorization: Bearer abc".to_owned()];
        let (url, ca_cert) = ("https://hooks.example/T0/secret", Some(Path::new("/ca.pem")));
        let post = Post { url, headers: &headers, ca_cert, message: &message };
        let settings = post.settings(Duration::from_secs(6));
        for line in [
            r#"url = "https://hooks.example/T0/secret""#,
            r#"max-time = "5""#,
            r#"header = "Authorization: Bearer abc""#,
            r#"data-raw = "{\"a\":\"\\\"\\n\"}""#,
            r#"cacert = "/ca.pem""#,
        ] {
            assert!(settings.lines().any(|told| told == line), "{line} in {settings}");
        }
    }
}
