//! How a process logs: to standard error, as text for people or JSON for collectors.

use clap::{Args, ValueEnum};
use coxswain_coordinator::log::Human;
use tracing_subscriber::{EnvFilter, fmt};

use crate::launch::inputs::process_env;

/// Flags of every subcommand.
#[derive(Args, Clone, Debug)]
pub struct LogFlags {
    /// Text for people, or one JSON object a line
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text, env = "COX_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// Least severity, or a filter such as info,coxswain_coordinator=debug
    #[arg(long, global = true, value_name = "FILTER", default_value = "info", env = "COX_LOG")]
    pub log: String,
}

/// Forms of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For collectors.
    Json,
}

impl LogFlags {
    /// The same flags for a child process.
    pub fn as_args(&self) -> [String; 4] {
        let format = match self.log_format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        ["--log-format".into(), format.into(), "--log".into(), self.log.clone()]
    }
}

/// Starts logging. Called once, by `main`; an unreadable filter falls back to `info`.
pub fn start(flags: &LogFlags) {
    let filter = EnvFilter::try_new(&flags.log).unwrap_or_else(|_| EnvFilter::new("info"));
    // A launcher shows its children's lines on a terminal; they themselves write to a pipe.
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr()) && process_env("NO_COLOR").is_none();
    let lines = fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    match flags.log_format {
        LogFormat::Text => lines.with_ansi(colours).event_format(Human).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}
