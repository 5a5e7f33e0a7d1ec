//! How a process logs: to standard error, as text for people or JSON for collectors.

use std::fmt::Write as _;

use clap::{Args, ValueEnum};
use tracing::{Event, Level, Subscriber, field::Field};
use tracing_subscriber::{
    EnvFilter,
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer, time::FormatTime, time::SystemTime},
    registry::LookupSpan,
};

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
    let lines =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    match flags.log_format {
        LogFormat::Text => lines.with_ansi(colours).event_format(People).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}

/// Lines for people: time, severity, sentence. The coordinator's sentences (targets `coxswain::…`) say all that their fields say, so
/// those are left to `--log-format json`; elsewhere fields follow the sentence.
struct People;

impl<S, N> FormatEvent<S, N> for People
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let mut stamp = String::new();
        SystemTime.format_time(&mut Writer::new(&mut stamp))?;
        // "2026-01-31T12:34:56.123456Z": seconds are enough beside a step number.
        let clock = stamp.get(11..19).unwrap_or(&stamp);
        let level = *event.metadata().level();
        let (on, off) = match (writer.has_ansi_escapes(), level) {
            (true, Level::ERROR) => ("\x1b[31m", "\x1b[0m"),
            (true, Level::WARN) => ("\x1b[33m", "\x1b[0m"),
            _ => ("", ""),
        };
        write!(writer, "{clock} {on}{level:>5}{off} ")?;
        let mut line = Line { sentence: String::new(), fields: String::new() };
        event.record(&mut line);
        writer.write_str(&line.sentence)?;
        if !event.metadata().target().starts_with("coxswain::") {
            writer.write_str(&line.fields)?;
        }
        writeln!(writer)
    }
}

/// One event, taken apart.
struct Line {
    sentence: String,
    fields: String,
}

impl tracing::field::Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.sentence, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
