//! How a process logs: to standard error, as text for people or JSON for collectors; and where a collector of
//! traces is named, training's spans to it.

mod traces;

use std::io::Write;

use clap::{Args, ValueEnum};
use coxswain_coordinator::log::{Human, WithMetrics};
use coxswain_proto::human::escaped;
use tracing::{Subscriber, warn};
use tracing_subscriber::{
    EnvFilter, Layer, fmt,
    fmt::{
        time::{FormatTime, SystemTime},
        writer::BoxMakeWriter,
    },
    layer::SubscriberExt,
    registry,
    registry::LookupSpan,
    util::SubscriberInitExt,
};

use crate::{launch::inputs::process_env, supervise::console::LogWriter};

/// Flags of every subcommand.
#[derive(Args, Clone, Debug)]
pub struct LogFlags {
    /// Log as text, or as one JSON object a line
    #[arg(long, global = true, help_heading = "Logging", value_name = "text|json", default_value = "text", env = "COX_LOG_FORMAT", value_parser = format)]
    pub log_format: LogFormat,
    /// Log level, or a filter such as info,coxswain_coordinator=debug
    #[arg(long, global = true, help_heading = "Logging", value_name = "FILTER", default_value = "info", env = "COX_LOG", value_parser = filter)]
    pub log: String,
}

/// Forms of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines of text.
    Text,
    /// One JSON object a line.
    Json,
}

/// A form by its name; a variable that is empty is as good as none.
fn format(text: &str) -> Result<LogFormat, String> {
    if text.is_empty() {
        return Ok(LogFormat::Text);
    }
    LogFormat::from_str(text, true).map_err(|_| "expected text or json".to_owned())
}

/// Checks a filter; a variable that is empty is as good as none. A word alone would be a module of that name,
/// with everything else silent: it is taken for a level that does not exist.
fn filter(text: &str) -> Result<String, String> {
    let text = if text.trim().is_empty() { "info" } else { text };
    let mut parts = text.split(',').map(str::trim);
    if let Some(word) =
        parts.find(|part| !part.contains(['=', '[', ':']) && !LEVELS.contains(&part.to_lowercase().as_str()))
    {
        return Err(format!(
            "{word:?} is not one of {}; for a single module write MODULE=LEVEL",
            LEVELS.join(", ")
        ));
    }
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// A filter without its parts that name no level (`MODULE=`), and those parts: one that is nothing else would
/// silence the log.
fn understood(filter: &str) -> (String, Vec<&str>) {
    let (odd, known): (Vec<_>, Vec<_>) = filter.split(',').partition(|part| part.trim().ends_with('='));
    (if known.is_empty() { "info".to_owned() } else { known.join(",") }, odd)
}

/// Crates that log much that is of no use here, unless a filter names them: burn's autotuner tells every
/// product that it times, a device's thread warns of every order that fails after a refused allocation, which
/// is told once, and gRPC tells every frame at debug.
const QUIET: &str =
    "cubecl_runtime=warn,cubecl_common=error,h2=info,hyper=info,hyper_util=info,tonic=info,tower=info";

/// Severities that a filter may name.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

impl LogFlags {
    /// These flags as arguments for a child process.
    pub fn as_args(&self) -> [String; 4] {
        let format = match self.log_format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        ["--log-format".into(), format.into(), "--log".into(), understood(&self.log).0]
    }
}

/// Where a process's log goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// To standard error, whose reader is waited for.
    Stderr,
    /// To standard error; what its reader does not take is dropped and counted. A run stands still while the
    /// process does.
    Queue,
    /// Nowhere: the terminal is drawn on.
    Nowhere,
}

/// What is left to do for a process's log at its end.
pub struct Logging {
    format: LogFormat,
    log_writer: Option<LogWriter>,
    traces: Option<traces::Exporter>,
}

impl Logging {
    /// What the log is written with, if it is not waited for.
    pub fn writer(&self) -> Option<LogWriter> {
        self.log_writer.clone()
    }

    /// Says why the process ends, whatever the filter lets through.
    pub fn last_word(mut self, message: &str) {
        let text = match self.format {
            LogFormat::Text => format!("error: {}\n", escaped(message)),
            LogFormat::Json => error_record(message),
        };
        match &mut self.log_writer {
            // Written whole, or dropped and counted.
            Some(log_writer) => drop(log_writer.write_all(text.as_bytes())),
            // Without a reader of standard error only the exit code remains.
            None => drop(std::io::stderr().lock().write_all(text.as_bytes())),
        }
    }
}

/// An error as the log writes it in JSON.
fn error_record(message: &str) -> String {
    let mut timestamp = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut fmt::format::Writer::new(&mut timestamp));
    format!("{}\n", serde_json::json!({"timestamp": timestamp, "level": "ERROR", "message": message}))
}

impl Drop for Logging {
    fn drop(&mut self) {
        // First, for it may have something to say.
        drop(self.traces.take());
        if let Some(log_writer) = &self.log_writer {
            log_writer.flush();
        }
    }
}

/// Starts logging. Called once, by `main`.
pub fn start(flags: &LogFlags, destination: Destination) -> Logging {
    let (log, odd) = understood(&flags.log);
    let filter = EnvFilter::new(format!("{QUIET},{log}"));
    // A launcher shows its children's lines on a terminal; they themselves write to a pipe.
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr()) && process_env("NO_COLOR").is_none();
    let steers = destination == Destination::Queue;
    let log_writer = steers.then(LogWriter::new);
    let writer = match log_writer.clone() {
        Some(log_writer) => BoxMakeWriter::new(move || log_writer.clone()),
        None if destination == Destination::Nowhere => BoxMakeWriter::new(std::io::sink),
        None => BoxMakeWriter::new(std::io::stderr),
    };
    let (traces, exporter, problem) = match traces::to_collector(&process_env) {
        Ok(Some((layer, exporter))) => (Some(layer), Some(exporter), None),
        Ok(None) => (None, None, None),
        Err(problem) => (None, None, Some(problem)),
    };
    let lines = match flags.log_format {
        LogFormat::Text => text(writer, colours, steers),
        LogFormat::Json => json(writer),
    };
    registry().with(lines.with_filter(filter)).with(traces).init();
    if let Some(problem) = problem {
        warn!("{problem}");
    }
    for part in odd {
        warn!("--log or COX_LOG: {part:?} has no level and is ignored; write MODULE=LEVEL");
    }
    Logging { format: flags.log_format, log_writer, traces: exporter }
}

/// Lines for people.
fn text<S>(writer: BoxMakeWriter, colours: bool, steers: bool) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    // A line that cannot be written (a full disk, a pipe without a reader) is lost; telling standard error
    // about it would be a panic.
    let lines = fmt::layer().with_writer(writer).with_target(false).log_internal_errors(false);
    lines.with_ansi(colours).event_format(Human::new(steers && !colours)).boxed()
}

/// Lines for collectors.
fn json<S>(writer: BoxMakeWriter) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let lines = fmt::layer().with_writer(writer).with_target(false).log_internal_errors(false);
    lines.json().flatten_event(true).map_event_format(WithMetrics).boxed()
}

#[cfg(test)]
mod tests {
    use super::{LogFormat, error_record, filter, format, understood};

    #[test]
    fn the_last_word_is_a_record_like_any_other() {
        let record: serde_json::Value = serde_json::from_str(&error_record("no \"such\" file")).unwrap();
        assert_eq!((&record["level"], &record["message"]), (&"ERROR".into(), &"no \"such\" file".into()));
        assert!(record["timestamp"].as_str().is_some_and(|time| time.ends_with('Z')), "{record}");
    }

    #[test]
    fn what_names_no_level_is_left_out_of_a_filter() {
        assert_eq!(understood("nonsense="), ("info".to_owned(), vec!["nonsense="]));
        assert_eq!(understood("debug,a=,b=warn"), ("debug,b=warn".to_owned(), vec!["a="]));
        assert_eq!(understood("info"), ("info".to_owned(), Vec::new()));
    }

    #[test]
    fn a_filter_that_would_silence_the_log_is_refused() {
        for good in ["info", "WARN", "off", "info,coxswain_coordinator=debug", "coxswain_worker::train=trace"]
        {
            assert_eq!(filter(good).as_deref(), Ok(good));
        }
        for bad in ["verbose", "info,verbose", "info,", "coxswain_worker=loud"] {
            filter(bad).expect_err(bad);
        }
        assert_eq!(filter("").as_deref(), Ok("info"), "COX_LOG= is as unset");
        assert!(matches!(format(""), Ok(LogFormat::Text)) && matches!(format("json"), Ok(LogFormat::Json)));
        format("xml").expect_err("no form");
        assert!(
            filter("verbose")
                .is_err_and(|error| error.contains("is not one of off, error, warn, info, debug, trace"))
        );
    }
}
