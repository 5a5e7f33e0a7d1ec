//! What happened in a run and when, from its coordinator's log, as text or as JSON.

use std::{fs::File, io::Read, path::Path};

use jiff::{Timestamp, civil::Date, civil::Time, tz::Offset};
use serde_json::Value;

use crate::{log_tail::LogTail, render::log_line::LogLine};

/// Events that are kept of a long run: so many first ones, and so many last ones.
const KEPT: [usize; 2] = [100, 300];
/// Tags of what people want to know later; warnings are kept whatever their tag.
const TOLD: [&str; 5] = ["run", "workers", "save", "fail", "refuse"];

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub struct StoryEvent {
    /// In seconds since 1970 (UTC), where the log says which day it was.
    pub unix_seconds: Option<f64>,
    /// Time of day, as the log has it.
    pub time: String,
    /// `run`, `workers`, `save`, `fail`, ...
    pub tag: String,
    /// What is told.
    pub text: String,
    /// Something is wrong.
    pub warns: bool,
}

/// The events of a log, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Story {
    /// First and last ones.
    pub events: Vec<StoryEvent>,
    /// Events between them that are not kept.
    pub left_out: usize,
    /// Date and time of its first event, as the log has them.
    pub begun: Option<String>,
    /// When the last line was written, in seconds since 1970 (UTC).
    pub end: Option<f64>,
}

/// What of a log is read for its beginning: the first launch with its workers, of some hundred ranks.
const OPENING_BYTES: u64 = 64 << 10;

impl Story {
    /// Reads a log to its last whole line; lines that are not of a log are passed over.
    pub fn read(path: &Path) -> std::io::Result<Self> {
        let (mut story, mut day) = (Self::default(), None);
        let mut log = LogTail::new(path);
        loop {
            let lines = log.lines()?;
            if lines.is_empty() {
                return Ok(story);
            }
            lines.iter().for_each(|line| story.enter(line, &mut day));
        }
    }

    /// Beginning alone, for a look at many runs; nothing if there is no log.
    pub fn opening(path: &Path) -> Self {
        let (mut story, mut day, mut bytes) = (Self::default(), None, Vec::new());
        let read = File::open(path).and_then(|file| file.take(OPENING_BYTES).read_to_end(&mut bytes));
        let text = String::from_utf8_lossy(&bytes);
        let whole = text.rsplit_once('\n').filter(|_| read.is_ok()).map_or("", |(whole, _)| whole);
        whole.lines().for_each(|line| story.enter(line, &mut day));
        story
    }

    /// Machines from which workers joined, by name.
    pub fn machines(&self) -> Vec<&str> {
        let joined = self.events.iter().filter(|event| event.tag == "workers");
        let joined = joined.filter_map(|event| event.text.split_once(" joined from "));
        let hosts = joined.map(|(_, rest)| rest.split(" (").next().unwrap_or_default());
        let mut hosts: Vec<_> = hosts.collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    fn enter(&mut self, line: &str, day: &mut Option<(Date, Offset)>) {
        let event = if line.starts_with('{') { of_json(line) } else { of_text(line, day) };
        let Some(event) = event else { return };
        self.end = event.unix_seconds.or(self.end);
        if self.begun.is_none() {
            let date = match line.starts_with('{') {
                true => event.unix_seconds.and_then(|at| Timestamp::from_second(at as i64).ok()).map(day_of),
                false => day.map(|(date, _)| date.to_string()),
            };
            self.begun = date.map(|date| format!("{date} {}", event.time));
        }
        if !TOLD.contains(&event.tag.as_str()) && !event.warns {
            return;
        }
        let [first, last] = KEPT;
        if self.events.len() == first + last {
            self.events.remove(first);
            self.left_out += 1;
        }
        self.events.push(event);
    }
}

fn of_text(line: &str, day: &mut Option<(Date, Offset)>) -> Option<StoryEvent> {
    let line = LogLine::parse(line)?;
    if line.tag == "day" {
        *day = dated(line.text);
        return None;
    }
    let at = || {
        let (date, offset) = (*day)?;
        let time: Time = line.time.parse().ok()?;
        Some(offset.to_timestamp(date.to_datetime(time)).ok()?.as_millisecond() as f64 / 1e3)
    };
    // A step's line is read by its tag alone: there are many of them.
    let text = if line.tag == "step" && !line.warns() { "" } else { line.text };
    Some(StoryEvent {
        unix_seconds: at(),
        time: line.time.to_owned(),
        tag: line.tag.to_owned(),
        text: text.to_owned(),
        warns: line.warns(),
    })
}

fn day_of(at: Timestamp) -> String {
    at.strftime("%Y-%m-%d").to_string()
}

/// Date and offset from `2026-11-21 (Saturday, UTC+01:00)`.
fn dated(text: &str) -> Option<(Date, Offset)> {
    let (date, rest) = text.split_once(' ')?;
    let offset = rest.split_once("UTC")?.1.trim_end_matches(')');
    let (hours, minutes) = offset.split_once(':')?;
    let sign = if offset.starts_with('-') { -1 } else { 1 };
    let seconds = hours.parse::<i32>().ok()? * 3600 + sign * minutes.parse::<i32>().ok()? * 60;
    Some((date.parse().ok()?, Offset::from_seconds(seconds).ok()?))
}

fn of_json(line: &str) -> Option<StoryEvent> {
    let record: Value = serde_json::from_str(line).ok()?;
    let at: Timestamp = record["timestamp"].as_str()?.parse().ok()?;
    let target = record["target"].as_str()?;
    let tag = target.strip_prefix("coxswain::").filter(|tag| !tag.contains("::")).unwrap_or("note");
    Some(StoryEvent {
        unix_seconds: Some(at.as_millisecond() as f64 / 1e3),
        time: at.strftime("%H:%M:%S").to_string(),
        tag: tag.to_owned(),
        text: record["message"].as_str()?.to_owned(),
        warns: matches!(record["level"].as_str(), Some("WARN" | "ERROR")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn story(text: &str) -> Story {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("coordinator.log");
        std::fs::write(&path, text).unwrap();
        Story::read(&path).unwrap()
    }

    #[test]
    fn events_have_a_time_and_what_is_no_event_is_passed_over() {
        let told = story(
            "thread 'main' panicked\n23:59:58  day     2026-11-21 (Saturday, UTC+01:00)\n\
             23:59:58  run     starting: generation 1 is complete\n23:59:59  step      1/4  epoch 0  loss 0.8\n\
             00:00:01  day     2026-11-22 (Sunday, UTC+01:00)\n00:00:01  fail    warning: lost: rank 1\n\
             00:00:02  note    warning: odd\n00:00:03  note    all is well\n00:00:04  run     cut in ha",
        );
        let tags: Vec<_> = told.events.iter().map(|event| (event.tag.as_str(), event.warns)).collect();
        assert_eq!(tags, [("run", false), ("fail", true), ("note", true)]);
        // 2026-11-21T22:59:58Z.
        let times: Vec<_> = told.events.iter().filter_map(|event| event.unix_seconds).collect();
        assert_eq!(times, [1_795_301_998.0, 1_795_302_001.0, 1_795_302_002.0]);
        assert_eq!(told.end, Some(1_795_302_003.0));
        assert_eq!(told.begun.as_deref(), Some("2026-11-21 23:59:58"));
    }

    #[test]
    fn a_log_for_programs_tells_the_same() {
        let told = story(
            "{\"timestamp\":\"2026-11-21T22:59:58.5Z\",\"level\":\"WARN\",\"target\":\"coxswain::fail\",\"message\":\"lost\"}\n\
             {\"timestamp\":\"2026-11-21T22:59:59Z\",\"level\":\"INFO\",\"target\":\"coxswain::step\",\"message\":\"..\"}\n{\"timestamp\":",
        );
        assert_eq!(told.events.len(), 1);
        assert_eq!((told.events[0].tag.as_str(), told.events[0].warns), ("fail", true));
        assert_eq!((told.events[0].unix_seconds, told.end), (Some(1_795_301_998.5), Some(1_795_301_999.0)));
    }

    #[test]
    fn a_beginning_tells_when_and_where_without_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("coordinator.log");
        let begin = "23:59:58  day     2026-11-21 (Saturday, UTC+01:00)\n23:59:59  workers rank 1 joined from \
                     node-b (process 4711, cpu) (1 of 2 workers)\n00:00:00  workers rank 0 joined from node-a (process \
                     1, cpu) (2 of 2 workers)\n";
        let more: String = (0..5000).map(|n| format!("10:00:00  run     event {n}\n")).collect();
        std::fs::write(&path, format!("{begin}{more}")).unwrap();
        let opening = Story::opening(&path);
        assert_eq!(opening.begun.as_deref(), Some("2026-11-21 23:59:59"));
        assert_eq!(opening.machines(), ["node-a", "node-b"]);
        assert_eq!(Story::opening(&dir.path().join("none")), Story::default());
    }

    #[test]
    fn of_a_long_story_the_ends_are_kept() {
        let text: String = (0..1000).map(|n| format!("10:00:00  run     event {n}\n")).collect();
        let told = story(&text);
        assert_eq!((told.events.len(), told.left_out), (400, 600));
        assert_eq!(
            (told.events[99].text.as_str(), told.events[100].text.as_str()),
            ("event 99", "event 700")
        );
    }
}
