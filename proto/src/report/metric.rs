//! Figures of a step as data: the code that measures one names it, and everything between there and a screen
//! passes it on.
//!
//! ```text
//! name    kind, or kind/of: `time/vision`, `grad_norm/lora`, `lr/lora`
//! unit    `s`, `bytes`, ...; `1` for a plain number
//! merge   how the values of ranks become the step's
//! ```
//!
//! Four kinds mean something to those who show steps: times of stages (`time/..`, in seconds), which complete
//! the account of where a step's time went; learning rates (`lr/..`), of which a line has room for the
//! highest; the error on held-out samples (`eval/..`) and the best of it (`best/..`), which are known of few
//! steps and are shown until there is a newer one. All others are listed as they are.

use std::{borrow::Cow, time::Duration};

use serde::Serialize;

use crate::limits::{MAX_METRIC_NAME_BYTES, MAX_METRIC_UNIT_BYTES, MAX_METRICS};

const TIME: &str = "time";
const LEARNING_RATE: &str = "lr";
const HELD_OUT: &str = "eval";
const BEST: &str = "best";
const SECONDS: &str = "s";
const PLAIN: &str = "1";

/// One figure of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Metric {
    /// `kind`, or `kind/of`; what it may be made of, [`Metric::problem`] says.
    pub name: Cow<'static, str>,
    /// `s`, `bytes`, ...; `1` for a plain number.
    pub unit: Cow<'static, str>,
    /// In that unit.
    pub value: f64,
    /// How the values of ranks become the step's.
    #[serde(skip)]
    pub merge: Merge,
}

/// How the values of ranks become the step's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// Mean, over the ranks that report it.
    Mean,
    /// Sum.
    Sum,
    /// The largest.
    Max,
    /// Rank 0's, which alone reports it. The code that measures it says so, and must know that the others
    /// have the same, as with what an all-reduce or the step's number gives; nothing compares them.
    FromRankZero,
}

impl Metric {
    /// A plain number that is the same on all ranks, as the caller knows.
    pub fn same(name: impl Into<Cow<'static, str>>, value: f64) -> Self {
        Self { name: name.into(), unit: PLAIN.into(), value, merge: Merge::FromRankZero }
    }

    /// The learning rate of a parameter group.
    pub fn learning_rate(group: &str, rate: f64) -> Self {
        Self::same(format!("{LEARNING_RATE}/{group}"), rate)
    }

    /// A measure on held-out samples, or a part of one.
    pub fn held_out(measure: &str, value: f64) -> Self {
        Self::same(format!("{HELD_OUT}/{measure}"), value)
    }

    /// A measure of the best checkpoint so far, or its `step`.
    pub fn best(what: &str, value: f64) -> Self {
        Self::same(format!("{BEST}/{what}"), value)
    }

    /// Whether it is of held-out samples.
    pub fn is_held_out(&self) -> bool {
        matches!(self.kind(), HELD_OUT | BEST)
    }

    /// Time that a rank spent in one of the task's stages.
    pub fn stage_time(stage: &str, time: Duration) -> Self {
        Self {
            name: format!("{TIME}/{stage}").into(),
            unit: SECONDS.into(),
            value: time.as_secs_f64(),
            merge: Merge::Mean,
        }
    }

    /// The part of its name before the slash.
    pub fn kind(&self) -> &str {
        self.name.split_once('/').map_or(&*self.name, |(kind, _)| kind)
    }

    /// The part of its name behind the slash; empty without one.
    pub fn suffix(&self) -> &str {
        self.name.split_once('/').map_or("", |(_, of)| of)
    }

    /// If it is the time of a stage: which, and how many seconds.
    pub fn as_stage_time(&self) -> Option<(&str, f64)> {
        let (kind, of) = self.name.split_once('/')?;
        (kind == TIME && self.unit == SECONDS).then_some((of, self.value))
    }

    /// The field that cannot be what it is, and why: names become files, labels and columns elsewhere.
    pub fn problem(&self) -> Option<(&'static str, String)> {
        let word = |text: &str, more: &[u8]| {
            !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || more.contains(&b))
        };
        let too_long = |text: &str, most: usize| {
            (text.len() > most).then(|| format!("has {} bytes; at most {most} are allowed", text.len()))
        };
        let badly_named = || {
            let begins = self.name.starts_with(|first: char| first.is_ascii_lowercase());
            let (kind, of) = self.name.split_once('/').unwrap_or((&self.name, "-"));
            let well = begins && word(kind, b"_") && word(of, b"_-./");
            (!well).then(|| {
                format!("{:?} is not of the form kind or kind/part (a-z, then letters, digits, _)", self.name)
            })
        };
        let no_unit =
            || (!word(&self.unit, b"_")).then(|| format!("{:?} is no unit (letters, digits, _)", self.unit));
        let name = too_long(&self.name, MAX_METRIC_NAME_BYTES).or_else(badly_named).map(|why| ("name", why));
        let unit = || too_long(&self.unit, MAX_METRIC_UNIT_BYTES).or_else(no_unit).map(|why| ("unit", why));
        name.or_else(unit)
    }
}

/// Stages and their seconds, in the order in which they were reported.
pub fn stage_times(metrics: &[Metric]) -> impl Iterator<Item = (&str, f64)> {
    metrics.iter().filter_map(Metric::as_stage_time)
}

/// The highest learning rate of all groups; nothing if none is reported.
pub fn highest_learning_rate(metrics: &[Metric]) -> Option<f64> {
    metrics.iter().filter(|metric| metric.kind() == LEARNING_RATE).map(|metric| metric.value).reduce(f64::max)
}

/// The metrics of several ranks on their way to one.
#[derive(Clone, Debug, Default)]
pub struct MergedMetrics(Vec<(Metric, u32)>);

impl MergedMetrics {
    /// Adds what a rank reports of the step. Beyond [`MAX_METRICS`] names more are dropped.
    pub fn add(&mut self, reported: &[Metric]) {
        for (place, metric) in reported.iter().enumerate() {
            // Ranks report the same names in the same order, unless a task does otherwise.
            let same = |(known, _): &(Metric, u32)| known.name == metric.name;
            let known = match self.0.get(place).is_some_and(same) {
                true => Some(place),
                false => self.0.iter().position(same),
            };
            match known {
                Some(known) => {
                    let (sum, ranks) = &mut self.0[known];
                    *ranks += 1;
                    sum.value = match metric.merge {
                        Merge::Mean | Merge::Sum => sum.value + metric.value,
                        Merge::Max => sum.value.max(metric.value),
                        Merge::FromRankZero => sum.value,
                    };
                }
                None if self.0.len() < MAX_METRICS => self.0.push((metric.clone(), 1)),
                None => {}
            }
        }
    }

    /// The step's metrics.
    pub fn finish(self) -> Vec<Metric> {
        let merged = self.0.into_iter().map(|(metric, ranks)| {
            let over = if metric.merge == Merge::Mean { f64::from(ranks) } else { 1.0 };
            Metric { value: metric.value / over, ..metric }
        });
        merged.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metric(name: &'static str, value: f64, merge: Merge) -> Metric {
        Metric { merge, ..Metric::same(name, value) }
    }

    #[test]
    fn values_of_ranks_become_one_as_each_metric_says() {
        let rank = |value: f64| {
            [
                metric("mean", value, Merge::Mean),
                metric("sum", value, Merge::Sum),
                metric("max", value, Merge::Max),
                metric("same", value, Merge::FromRankZero),
            ]
        };
        let mut merged = MergedMetrics::default();
        [2.0, 7.0, 3.0].into_iter().for_each(|value| merged.add(&rank(value)));
        let values: Vec<_> = merged.finish().into_iter().map(|metric| metric.value).collect();
        assert_eq!(values, [4.0, 12.0, 7.0, 2.0]);
    }

    #[test]
    fn ranks_need_not_report_the_same_metrics_in_the_same_order() {
        let (a, b) = (|value| metric("a", value, Merge::Mean), |value| metric("b", value, Merge::Mean));
        let mut merged = MergedMetrics::default();
        merged.add(&[a(1.0)]);
        merged.add(&[b(8.0), a(3.0)]);
        let told: Vec<_> = merged.finish().into_iter().map(|metric| (metric.name, metric.value)).collect();
        assert_eq!(told, [("a".into(), 2.0), ("b".into(), 8.0)]);
    }

    #[test]
    fn a_step_keeps_no_more_metrics_than_a_report_may_have() {
        let rank = |from: usize| -> Vec<Metric> {
            (from..from + MAX_METRICS).map(|name| Metric::same(format!("m{name}"), 0.0)).collect()
        };
        let mut merged = MergedMetrics::default();
        merged.add(&rank(0));
        merged.add(&rank(MAX_METRICS / 2));
        assert_eq!(merged.finish().len(), MAX_METRICS);
    }

    #[test]
    fn stages_and_learning_rates_are_found_among_metrics() {
        let time = Duration::from_millis(1500);
        let metrics = [
            Metric::stage_time("tower", time),
            Metric::learning_rate("slow", 1e-5),
            Metric::learning_rate("fast", 1e-3),
            metric("time/steps", 3.0, Merge::Sum),
        ];
        assert_eq!(stage_times(&metrics).collect::<Vec<_>>(), [("tower", 1.5)]);
        assert_eq!(highest_learning_rate(&metrics), Some(1e-3));
        assert_eq!((metrics[1].kind(), metrics[1].suffix()), ("lr", "slow"));
        assert_eq!(highest_learning_rate(&metrics[..1]), None);
    }

    #[test]
    fn names_and_units_that_a_sink_could_not_write_are_told() {
        for good in ["loss", "time/vision", "grad_norm/lora", "eval/x-1.y/z", "m2/A"] {
            assert_eq!(Metric::same(good, 0.0).problem(), None, "{good}");
        }
        for bad in ["", "/x", "x/", "2m", "Time/x", "a b", "a/\"", "a-b/c", "m/\u{e9}"] {
            let problem = Metric::same(bad, 0.0).problem();
            assert!(problem.as_ref().is_some_and(|(field, _)| *field == "name"), "{bad}: {problem:?}");
        }
        let long = Metric::same("x".repeat(MAX_METRIC_NAME_BYTES + 1), 0.0).problem();
        assert_eq!(long, Some(("name", "has 65 bytes; at most 64 are allowed".into())));
        for bad in ["", "m/s", "a unit", "seventeen_letters"] {
            let problem = Metric { unit: bad.into(), ..Metric::same("x", 0.0) }.problem();
            assert!(problem.as_ref().is_some_and(|(field, _)| *field == "unit"), "{bad}: {problem:?}");
        }
    }
}
