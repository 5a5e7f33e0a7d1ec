//! Metrics in a log for programs.
//!
//! A log event has the fields that its line in the source names, and each is a number or a text; which
//! metrics a step has is known only when it is logged. So they travel in one field as a text that is JSON,
//! and where the log itself is JSON that text becomes what it says:
//!
//! ```text
//! {"timestamp":"..","level":"INFO","message":"..","step":3,..,
//!  "metrics":[{"name":"time/vision","unit":"s","value":0.0079}]}
//! ```

use std::fmt;

use coxswain_proto::report::Metric;
use serde::de::IgnoredAny;
use tracing::{Event, Subscriber};
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    registry::LookupSpan,
};

const FIELD: &str = "metrics";

/// Metrics as the value of a field.
pub(super) fn packed(metrics: &[Metric]) -> String {
    serde_json::to_string(metrics).expect("metrics are names and numbers")
}

/// A JSON format whose metrics are no text:
/// `tracing_subscriber::fmt().json().map_event_format(WithMetrics)`.
#[derive(Clone, Copy, Debug)]
pub struct WithMetrics<F>(pub F);

impl<S, N, F> FormatEvent<S, N> for WithMetrics<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if event.metadata().fields().field(FIELD).is_none() {
            return self.0.format_event(ctx, writer, event);
        }
        let mut line = String::new();
        self.0.format_event(ctx, Writer::new(&mut line), event)?;
        match unpacked(&line) {
            Some(record) => writer.write_str(&record),
            None => writer.write_str(&line),
        }
    }
}

/// The line with the field's text as what it says. The rest stays as it was written, to the last digit of its
/// numbers.
fn unpacked(line: &str) -> Option<String> {
    // Not within another text: there the quotation marks have backslashes before them.
    let key = format!("\"{FIELD}\":");
    let start = line.find(&key)? + key.len();
    let mut texts = serde_json::Deserializer::from_str(&line[start..]).into_iter::<String>();
    let metrics = texts.next()?.ok()?;
    serde_json::from_str::<Vec<IgnoredAny>>(&metrics).ok()?;
    let rest = &line[start + texts.byte_offset()..];
    Some([&line[..start], &metrics, rest].concat())
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use serde_json::{Value, json};

    use super::*;

    fn written(emit: impl FnOnce()) -> Value {
        let file = tempfile::NamedTempFile::new().unwrap();
        let writer = Arc::new(file.reopen().unwrap());
        let lines = tracing_subscriber::fmt().with_writer(writer).json().flatten_event(true);
        tracing::subscriber::with_default(lines.map_event_format(WithMetrics).finish(), emit);
        serde_json::from_slice(&fs::read(file.path()).unwrap()).expect("one record")
    }

    #[test]
    fn a_metric_that_no_line_of_this_program_names_is_logged_as_json() {
        let metrics = packed(&[Metric::same("made_up/thing", 0.5), Metric::same("hollow", f64::NAN)]);
        let record = written(|| tracing::info!(step = 3, metrics, "a line"));
        assert_eq!((&record["step"], &record["message"]), (&json!(3), &json!("a line")));
        let wanted = json!([
            {"name": "made_up/thing", "unit": "1", "value": 0.5},
            {"name": "hollow", "unit": "1", "value": null},
        ]);
        assert_eq!(record["metrics"], wanted);
    }

    #[test]
    fn what_is_no_metric_stays_as_it_is() {
        assert_eq!(written(|| tracing::info!(metrics = "no json", "a line"))["metrics"], "no json");
        assert_eq!(written(|| tracing::info!(metrics = 3, "a line"))["metrics"], 3);
        assert_eq!(written(|| tracing::info!("a line"))["message"], "a line");
    }
}
