//! How a process logs: to standard error, as text for people or JSON for collectors.

use std::io::Write;

use clap::{Args, ValueEnum};
use coxswain_coordinator::log::Human;
use tracing_subscriber::{EnvFilter, fmt, fmt::writer::BoxMakeWriter};

use crate::{launch::inputs::process_env, supervise::console::LogOutlet};

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

/// What is left to do for a process's log at its end.
#[derive(Default)]
pub struct Logging(Option<LogOutlet>);

impl Logging {
    /// Says why the process ends.
    pub fn last_word(mut self, message: &str) {
        let text = format!("error: {message}\n");
        match &mut self.0 {
            // Written whole, or dropped and counted.
            Some(outlet) => drop(outlet.write_all(text.as_bytes())),
            None => eprint!("{text}"),
        }
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        if let Some(outlet) = &self.0 {
            outlet.flush();
        }
    }
}

/// Starts logging. Called once, by `main`; an unreadable filter falls back to `info`. Whoever `steers` a run does not wait for a reader of its
/// log: what the reader does not take is dropped and counted.
pub fn start(flags: &LogFlags, steers: bool) -> Logging {
    let filter = EnvFilter::try_new(&flags.log).unwrap_or_else(|_| EnvFilter::new("info"));
    // A launcher shows its children's lines on a terminal; they themselves write to a pipe.
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr()) && process_env("NO_COLOR").is_none();
    let outlet = steers.then(LogOutlet::new);
    let writer = match outlet.clone() {
        Some(outlet) => BoxMakeWriter::new(move || outlet.clone()),
        None => BoxMakeWriter::new(std::io::stderr),
    };
    let lines = fmt().with_env_filter(filter).with_writer(writer).with_target(false);
    match flags.log_format {
        LogFormat::Text => lines.with_ansi(colours).event_format(Human).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    Logging(outlet)
}
