//! A profile as tables: phases with their stages, and the operations that took longest.

use std::{collections::BTreeMap, time::Duration};

use coxswain_nn::profile::{SpanKind, SpanSum};
use coxswain_proto::human;

use super::{Profile, taken::WARM_UP};
use crate::render::table::table;

/// Operations that have a row.
const SLOWEST: usize = 10;
/// Below this share of the steps a part without a name has no row.
const LEAST_SHARE: f64 = 0.5;

/// Both tables, below what was measured.
pub fn tables(profile: &Profile) -> String {
    let steps = profile.steps;
    let head = format!(
        "{} steps after {WARM_UP} warm-up step, {} samples each, on the CPU in one process, threads: {}",
        steps.count,
        human::grouped(steps.samples),
        steps.threads
    );
    format!("{head}\n\n{}\n\n{}", stages(profile), operations(profile))
}

fn stages(profile: &Profile) -> String {
    let row = |name: String, time: Duration, peak: Option<u64>| {
        let peak = peak.map_or_else(String::new, human::bytes);
        [name, milliseconds(profile.ms(time)), format!("{:.1} %", profile.share(time)), peak]
    };
    let mut rows = Vec::new();
    for phase in &profile.all.inner {
        rows.push(row(phase.name.to_owned(), phase.time, Some(phase.peak)));
        for stage in phase.inner.iter().filter(|inner| inner.kind == SpanKind::Stage) {
            if stage.name.is_empty() && profile.share(stage.time) < LEAST_SHARE {
                continue;
            }
            let name = if stage.name.is_empty() { "between" } else { stage.name };
            rows.push(row(format!("  {name}{}", layers(profile, stage)), stage.time, Some(stage.peak)));
        }
        let again = of_parts(phase);
        rows.extend(again.into_iter().map(|(name, time)| row(format!("  of this {name}"), time, None)));
    }
    rows.push(row("a step".to_owned(), profile.all.time, Some(profile.all.peak)));
    table(["phase, stage", "ms a step", "share", "peak memory"], &rows)
}

/// How many layers a stage has, and how long the fastest and the slowest one take in a step.
fn layers(profile: &Profile, stage: &SpanSum) -> String {
    let layers = stage.inner.iter().filter(|inner| matches!(inner.kind, SpanKind::Layer(_)));
    let times: Vec<_> = layers.map(|layer| profile.ms(layer.time)).collect();
    if times.len() < 2 {
        return String::new();
    }
    let least = times.iter().copied().fold(f64::INFINITY, f64::min);
    let most = times.iter().copied().fold(0.0, f64::max);
    format!(", {} layers of {} to {} ms", times.len(), milliseconds(least), milliseconds(most))
}

/// Time of the parts with a name of their own, wherever they lie in a phase.
fn of_parts(span: &SpanSum) -> BTreeMap<&'static str, Duration> {
    let mut parts = BTreeMap::new();
    for inner in &span.inner {
        if inner.kind == SpanKind::Part {
            *parts.entry(inner.name).or_default() += inner.time;
        } else {
            of_parts(inner).into_iter().for_each(|(name, time)| *parts.entry(name).or_default() += time);
        }
    }
    parts
}

/// What operations of one name took without those in them, and how many there were.
pub(super) fn by_operation(all: &SpanSum) -> Vec<(&'static str, Duration, u64)> {
    fn enter(span: &SpanSum, sums: &mut BTreeMap<&'static str, (Duration, u64)>) {
        if span.kind == SpanKind::Operation {
            let sum = sums.entry(span.name).or_default();
            (sum.0, sum.1) = (sum.0 + span.own_time(), sum.1 + span.count);
        }
        span.inner.iter().for_each(|inner| enter(inner, sums));
    }
    let mut sums = BTreeMap::new();
    enter(all, &mut sums);
    let mut sums: Vec<_> = sums.into_iter().map(|(name, (time, count))| (name, time, count)).collect();
    sums.sort_by_key(|(_, time, _)| std::cmp::Reverse(*time));
    sums
}

fn operations(profile: &Profile) -> String {
    let found = by_operation(&profile.all);
    let row = |name: String, time: Duration, count: String| {
        [name, milliseconds(profile.ms(time)), format!("{:.1} %", profile.share(time)), count]
    };
    let each_step = |count: u64| human::grouped(count.div_ceil(profile.steps.count));
    let mut rows: Vec<_> = found
        .iter()
        .take(SLOWEST)
        .map(|&(name, time, count)| row(name.to_owned(), time, each_step(count)))
        .collect();
    let rest = &found[rows.len()..];
    let time = |of: &[(&str, Duration, u64)]| of.iter().map(|(_, time, _)| *time).sum::<Duration>();
    if !rest.is_empty() {
        let count = rest.iter().map(|(.., count)| count).sum();
        rows.push(row(format!("{} others", rest.len()), time(rest), each_step(count)));
    }
    let waits = profile.all.inner.iter().filter(|phase| phase.name == "data").map(|phase| phase.time).sum();
    rows.push(row("waiting for data".to_owned(), waits, String::new()));
    let others = profile.all.time.saturating_sub(time(&found) + waits);
    rows.push(row("all else".to_owned(), others, String::new()));
    table(["operation", "ms a step", "share", "calls"], &rows)
}

/// In as many digits as tell something.
fn milliseconds(ms: f64) -> String {
    match ms {
        ms if ms < 9.995 => format!("{ms:.2}"),
        ms if ms < 99.95 => format!("{ms:.1}"),
        ms => format!("{ms:.0}"),
    }
}
