//! Did every sample count exactly once, and where did features come from.

use coxswain_proto::human::{self, grouped};
use serde_json::Value;

use super::figure::section;
use crate::{
    audit::{RunRecords, count},
    render::audit,
    report::{chart::number, html::Html, read::ReportedRun},
};

/// Epochs, memberships and ranges of steps that have a row each; the last ones of more.
const MOST_ROWS: usize = 40;

/// The ledger's account of a run, as `cox audit` gives it, and what its cache did.
pub(super) fn account(run: &ReportedRun) -> Option<Html> {
    let mut html = Html::new();
    if let Some(records) = run.records() {
        of_ledger(&mut html, records);
    }
    of_cache(&mut html, &run.dir.summary["cache"]);
    section("Account", html)
}

fn of_ledger(html: &mut Html, records: &RunRecords) {
    let accounts = records.audit();
    if accounts.is_empty() {
        return;
    }
    let (missing, duplicate) = audit::totals(&accounts);
    let class = if missing + duplicate == 0 { "good" } else { "bad" };
    html.element("p", class, |html| match (missing, duplicate) {
        (0, 0) => html.text("every sample counted exactly once: 0 missing, 0 duplicate"),
        _ => html.text(&format!("the ledger does not add up: {missing} missing, {duplicate} duplicate")),
    });
    let row = |account: &crate::audit::EpochAccount| {
        let ranges = [&account.quarantined, &account.skipped, &account.missing, &account.duplicate];
        let counts = [account.epoch, account.expected, account.committed];
        counts.into_iter().chain(ranges.map(|ranges| count(ranges))).map(|n| grouped(n).into()).collect()
    };
    table(
        html,
        &["epoch#", "samples#", "committed#", "quarantined#", "left out#", "missing#", "duplicate#"],
        accounts.iter().map(row).collect(),
    );
    let generations = records.generations.iter().map(|of| {
        let (from, source) = match &of.started {
            Some((step, source)) => (step.to_string(), source.clone()),
            None => ("-".to_owned(), "trained no step".to_owned()),
        };
        [of.generation.to_string(), of.workers.to_string(), from, source].map(Html::from).into()
    });
    table(html, &["generation#", "workers#", "from step#", "state from"], generations.collect());
    let sets = records.by_set();
    let sets = sets.iter().map(|set| {
        let counts = [set.samples, set.taken, set.consumed, set.quarantined];
        [set.name.as_str().into()].into_iter().chain(counts.map(|n| grouped(n).into())).collect()
    });
    table(html, &["data set", "samples#", "an epoch#", "consumed#", "quarantined#"], sets.collect());
    let features = records.cache_ranges();
    let features = features.iter().map(|range| {
        let kept = if range.generation == 0 {
            "computed".to_owned()
        } else {
            format!("version {}", range.generation)
        };
        let steps = format!("{} to {}", range.steps.start, range.steps.end.saturating_sub(1));
        [steps, kept, grouped(range.hits), grouped(range.misses)].map(Html::from).into()
    });
    table(html, &["steps", "features", "hits#", "misses#"], features.collect());
    for crate::audit::Change { step, key, from, to } in &records.changes {
        let text = format!("changed at step {step}: {key} from {from} to {to}");
        html.element("p", "note", |html| html.text(&text));
    }
}

fn of_cache(html: &mut Html, cache: &Value) {
    let Some(cache) = cache.as_object() else { return };
    let told = cache.iter().filter(|(_, value)| value.is_number() || value.is_string());
    let row = |(key, value): (&String, &Value)| {
        let name = key.strip_suffix("_seconds").map_or_else(|| key.clone(), |name| format!("{name} time"));
        vec![name.replace('_', " ").into(), told_of(key, value).into()]
    };
    html.table(&["feature cache", ""], &told.map(row).collect::<Vec<_>>());
}

/// A value in the unit that its key ends with.
fn told_of(key: &str, value: &Value) -> String {
    match (value.as_f64(), value.as_u64()) {
        (Some(seconds), _) if key.ends_with("seconds") => human::seconds(seconds),
        (_, Some(bytes)) if key.ends_with("bytes") => human::bytes(bytes),
        (_, Some(count)) => grouped(count),
        (Some(real), _) => number(real),
        _ => value.as_str().map_or_else(|| value.to_string(), str::to_owned),
    }
}

fn table(html: &mut Html, head: &[&'static str], mut rows: Vec<Vec<Html>>) {
    if rows.is_empty() {
        return;
    }
    let more = rows.len().saturating_sub(MOST_ROWS);
    rows.drain(..more);
    html.table(head, &rows);
    if more > 0 {
        html.element("p", "note", |html| html.text(&format!("{more} earlier rows are not shown")));
    }
}
