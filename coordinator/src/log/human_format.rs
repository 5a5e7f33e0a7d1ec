//! How the log looks on a terminal and in `coordinator.log`: time, a tag, a line.
//!
//! ```text
//! 14:03:44  day     2026-11-21 (Saturday, UTC+01:00)
//! 14:03:44  workers rank 1 joined from node-b (process 4711, cpu) (2 of 2)
//! 14:03:44  run     starting: generation 1 is complete and starts at step 0
//! 14:03:45  step      1/400  epoch 0  loss 0.81230  grad 1.2500  lr 1.00e-4 ...
//! 14:03:52  fail    warning: lost: rank 1 on node-b, last heard of in phase forward of step 12: killed
//! ```
//!
//! What a message brings from elsewhere cannot pass for a line of ours, nor do anything to the terminal:
//! control characters are shown as escapes, and its later lines are indented.
//!
//! A day's first line follows one with the date, for a log is written for days, and continued by the next
//! launch. Where there are no colours the severity is a word in front of the message.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
};

use coxswain_proto::human::escaped;
use jiff::{Zoned, civil::Date};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields, format::Writer},
    registry::{LookupSpan, Scope},
};

/// Formats events that name a tag of ours as `TIME  TAG  LINE`, and all others as
/// `TIME  LEVEL  LINE key=value`, with the fields of the spans that they were written in.
///
/// Colours follow the writer: `tracing_subscriber::fmt().with_ansi(..).event_format(Human::new(..))`.
#[derive(Debug)]
pub struct Human {
    /// The first line follows the date, too, not only that of another day.
    dated: bool,
    /// The date of the last line.
    day: Mutex<Option<Date>>,
}

impl Human {
    /// A format whose first line follows one with the date if it is `dated`.
    pub fn new(dated: bool) -> Self {
        Self { dated, day: Mutex::new(None) }
    }

    /// The line of the day in front of a line of `now`, if one is due.
    fn day(&self, now: &Zoned) -> Option<String> {
        let before = self.day.lock().unwrap_or_else(PoisonError::into_inner).replace(now.date());
        let due = before.map_or(self.dated, |before| before != now.date());
        due.then(|| now.strftime("%H:%M:%S  day     %Y-%m-%d (%A, UTC%:z)").to_string())
    }
}

const OURS: &str = "coxswain::";
const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";
/// Where the lines of a message but the first begin: below the tag, where none of ours does.
const LATER_LINE: &str = "\n          ";

impl<S, N> FormatEvent<S, N> for Human
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let meta = event.metadata();
        // A crate is called `coxswain`, too: what only says where it was written names no tag.
        let named = meta.module_path() != Some(meta.target());
        let ours = meta.target().strip_prefix(OURS).filter(|_| named);
        let tag = ours.unwrap_or(level_name(*meta.level()));
        let now = Zoned::now();
        if let Some(day) = self.day(&now) {
            writeln!(writer, "{day}")?;
        }
        let time = of_day(&now);
        let mut parts = Parts::default();
        event.record(&mut parts);
        let colour = colour(tag, *meta.level());
        if writer.has_ansi_escapes() {
            write!(writer, "{DIM}{time}{PLAIN}  {colour}{tag:<7}{PLAIN} {}", parts.message)?;
        } else {
            let severity = match *meta.level() {
                Level::ERROR if ours.is_some() => "error: ",
                Level::WARN if ours.is_some() => "warning: ",
                _ => "",
            };
            write!(writer, "{time}  {tag:<7} {severity}{}", parts.message)?;
        }
        if ours.is_none() {
            for (name, value) in &parts.fields {
                write!(writer, " {name}={value}")?;
            }
        }
        if ours.is_none() || *meta.level() >= Level::DEBUG {
            for span in ctx.event_scope().into_iter().flat_map(Scope::from_root) {
                if let Some(fields) = span.extensions().get::<FormattedFields<N>>() {
                    write!(writer, "  {fields}")?;
                }
            }
        }
        writeln!(writer)
    }
}

/// When something happened, as the log tells it: `14:03:44`, in this machine's time zone.
pub fn time_of_day(unix_ms: u64) -> String {
    let at = i64::try_from(unix_ms).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    of_day(&at.unwrap_or_default().to_zoned(jiff::tz::TimeZone::system()))
}

fn of_day(at: &Zoned) -> String {
    at.strftime("%H:%M:%S").to_string()
}

#[derive(Default)]
struct Parts {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Parts {
    fn put(&mut self, field: &Field, value: &str) {
        let value = escaped(value).replace('\n', LATER_LINE);
        match field.name() {
            "message" => self.message = value,
            name => self.fields.push((name, value)),
        }
    }
}

impl Visit for Parts {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.put(field, value),
            _ => self.record_debug(field, &value),
        }
    }
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    }
}

fn colour(tag: &str, level: Level) -> &'static str {
    match (tag, level) {
        (_, Level::ERROR) => "\x1b[1;31m",
        (_, Level::WARN) => "\x1b[33m",
        (_, Level::DEBUG | Level::TRACE) | ("memory", _) => DIM,
        ("step", _) => "\x1b[34m",
        ("save", _) => "\x1b[32m",
        ("workers", _) => "\x1b[36m",
        ("run", _) => "\x1b[1m",
        _ => PLAIN,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("one thread").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn written(emit: impl FnOnce()) -> String {
        written_as(Human::new(false), emit)
    }

    fn written_as(format: Human, emit: impl FnOnce()) -> String {
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .event_format(format)
            .finish();
        tracing::subscriber::with_default(subscriber, emit);
        String::from_utf8(sink.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn our_lines_carry_a_tag_and_no_fields() {
        let line = written(|| tracing::info!(target: "coxswain::workers", rank = 1, "rank 1 joined"));
        assert_eq!(&line[8..], "  workers rank 1 joined\n");
    }

    #[test]
    fn a_severity_is_a_word_where_there_are_no_colours() {
        let line = written(|| tracing::warn!(target: "coxswain::fail", rank = 1, "lost: rank 1"));
        assert_eq!(&line[8..], "  fail    warning: lost: rank 1\n");
        let line = written(|| tracing::error!(target: "coxswain::fail", "first cause: rank 1"));
        assert_eq!(&line[8..], "  fail    error: first cause: rank 1\n");
    }

    #[test]
    fn a_log_begins_with_the_date_and_says_when_it_changes() {
        let at = |text: &str| text.parse::<Zoned>().unwrap();
        let evening = at("2026-11-21T23:59:59[UTC]");
        let (dated, plain) = (Human::new(true), Human::new(false));
        assert_eq!(
            dated.day(&evening).as_deref(),
            Some("23:59:59  day     2026-11-21 (Saturday, UTC+00:00)")
        );
        assert_eq!((plain.day(&evening), dated.day(&evening)), (None, None));
        let morning = at("2026-11-22T00:00:03[UTC]");
        assert_eq!(plain.day(&morning).as_deref(), Some("00:00:03  day     2026-11-22 (Sunday, UTC+00:00)"));
        let lines = written_as(Human::new(true), || tracing::info!(target: "coxswain::run", "begins"));
        assert_eq!(lines.lines().count(), 2, "{lines}");
        assert!(lines[8..].starts_with("  day     20"), "{lines}");
    }

    #[test]
    fn lines_in_spans_say_where_they_were_written_unless_they_are_told_to_people() {
        let line = written(|| {
            let _run = tracing::info_span!("run", run = "demo").entered();
            let _step = tracing::info_span!("step", step = 7).entered();
            tracing::info!(target: "coxswain::run", "begins");
            tracing::warn!(count = 2, "odd");
        });
        let lines: Vec<_> = line.lines().map(|line| &line[8..]).collect();
        assert_eq!(lines, ["  run     begins", "  warning odd count=2  run=\"demo\"  step=7"]);
    }

    #[test]
    fn what_a_message_brings_from_elsewhere_forges_no_line_and_moves_no_cursor() {
        let host = "node\u{1b}[2J\n14:03:44  run     finished";
        let lines = written(|| {
            tracing::info!(target: "coxswain::run", "lost: {host}");
            tracing::warn!(target: "hyper", error = %host, "odd");
        });
        let told = "node\\u001b[2J\n          14:03:44  run     finished";
        let lines: Vec<_> = lines.split_inclusive("finished\n").map(|line| line[8..].trim_end()).collect();
        assert_eq!(lines, [format!("  run     lost: {told}"), format!("  warning odd error={told}")]);
    }

    #[test]
    fn other_lines_carry_their_level_and_fields() {
        let line = written(|| tracing::warn!(target: "hyper", count = 2, "odd"));
        assert_eq!(&line[8..], "  warning odd count=2\n");
    }
}
