//! A run's audit as text and as JSON.

use std::ops::Range;

use serde_json::{Value, json};

use super::{cache::hit_rate, table::table};
use crate::audit::{CacheRange, Change, EpochAccount, RunRecords, SetAccount, count};

/// Ranges shown of many.
const SHOWN: usize = 8;
/// Ranges of steps shown with where their features came from.
const MOST_RANGES: usize = 16;

/// The whole audit, several lines.
pub fn text(records: &RunRecords, accounts: &[EpochAccount]) -> String {
    let RunRecords { run_name, run_id, state, steps, .. } = records;
    let of = records.total_steps.map(|total| format!(" of {total}")).unwrap_or_default();
    let mut parts = vec![format!("{run_name} (run {run_id}) {state} · {}{of} steps committed", steps.len())];
    parts.push(String::new());
    parts.push(epochs(accounts));
    for account in accounts {
        parts.extend(listed("quarantined", account.epoch, &account.quarantined));
        parts.extend(listed("skipped", account.epoch, &account.skipped));
        parts.extend(listed("missing", account.epoch, &account.missing));
        parts.extend(listed("duplicate", account.epoch, &account.duplicate));
    }
    parts.extend(skipped_steps(records));
    let sets = records.by_set();
    if !sets.is_empty() {
        parts.push(String::new());
        parts.push(by_set(&sets));
    }
    if !records.generations.is_empty() {
        parts.push(String::new());
        parts.push(generations(records));
    }
    let ranges = records.cache_ranges();
    if !ranges.is_empty() {
        parts.push(String::new());
        parts.push(cache(&ranges));
    }
    parts.push(String::new());
    parts.push(match records.faults.len() {
        0 => "no faults".to_owned(),
        1 => "1 fault".to_owned(),
        faults => format!("{faults} faults"),
    });
    for fault in &records.faults {
        parts.push(format!("  generation {}: {}", fault.generation, fault.text));
    }
    for Change { step, key, from, to } in &records.changes {
        parts.push(format!("changed at step {step}: {key} from {from} to {to}"));
    }
    parts.push(verdict(accounts));
    parts.join("\n")
}

fn verdict(accounts: &[EpochAccount]) -> String {
    let (missing, duplicate) = totals(accounts);
    format!("{missing} missing, {duplicate} duplicate")
}

/// Missing and duplicate samples over all epochs.
pub fn totals(accounts: &[EpochAccount]) -> (u64, u64) {
    let sum = |of: fn(&EpochAccount) -> &Vec<Range<u64>>| accounts.iter().map(|a| count(of(a))).sum();
    (sum(|account| &account.missing), sum(|account| &account.duplicate))
}

fn epochs(accounts: &[EpochAccount]) -> String {
    let rows: Vec<_> = accounts
        .iter()
        .map(|account| {
            let EpochAccount { epoch, expected, committed, quarantined, skipped, missing, duplicate } =
                account;
            let counts = [quarantined, skipped, missing, duplicate].map(|ranges| count(ranges));
            let [quarantined, skipped, missing, duplicate] = counts;
            [*epoch, *expected, *committed, quarantined, skipped, missing, duplicate]
                .map(|number| number.to_string())
        })
        .collect();
    table(["epoch", "samples", "committed", "quarantined", "skipped", "missing", "duplicate"], &rows)
}

/// What of each data set of a mixture was consumed, and how often it was gone through.
fn by_set(sets: &[SetAccount]) -> String {
    let rows = sets.iter().map(|set| {
        let SetAccount { name, samples, taken, consumed, quarantined } = set;
        let passes = (consumed + quarantined) as f64 / (*samples).max(1) as f64;
        let numbers = [samples, taken, consumed, quarantined].map(u64::to_string);
        let [samples, taken, consumed, quarantined] = numbers;
        [name.clone(), samples, taken, consumed, quarantined, format!("{passes:.2}")]
    });
    let rows: Vec<_> = rows.collect();
    table(["data set", "samples", "an epoch", "consumed", "quarantined", "passes"], &rows)
}

fn listed(what: &str, epoch: u64, ranges: &[Range<u64>]) -> Option<String> {
    let shown: Vec<_> =
        ranges.iter().take(SHOWN).map(|range| format!("{}..{}", range.start, range.end)).collect();
    let more = ranges.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!shown.is_empty()).then(|| format!("  {what} in epoch {epoch}: positions {}{more}", shown.join(", ")))
}

/// A line for each of the first steps that were left out.
fn skipped_steps(records: &RunRecords) -> Vec<String> {
    let steps = records.steps.iter().filter_map(|step| Some((step.step, step.skipped.as_ref()?)));
    let more = steps.clone().count().saturating_sub(SHOWN);
    let lines = steps.take(SHOWN).map(|(step, why)| format!("  step {step} was left out: {why}"));
    lines.chain((more > 0).then(|| format!("  and {more} more steps were left out"))).collect()
}

fn generations(records: &RunRecords) -> String {
    let rows: Vec<_> = records
        .generations
        .iter()
        .map(|membership| {
            let own = || records.steps.iter().filter(|step| step.generation == membership.generation);
            let (from, source) = match &membership.started {
                Some((step, source)) => (step.to_string(), source.clone()),
                None => ("-".to_owned(), "trained no step".to_owned()),
            };
            let number = membership.generation.to_string();
            [number, membership.workers.to_string(), from, own().count().to_string(), source]
        })
        .collect();
    table(["generation", "workers", "from step", "steps", "state from"], &rows)
}

/// Where features came from, range by range; the newest if there are many.
fn cache(ranges: &[CacheRange]) -> String {
    let rows = ranges.iter().rev().take(MOST_RANGES).rev().map(|range| {
        let generation = match range.generation {
            0 => "computed".to_owned(),
            generation => format!("version {generation}"),
        };
        [
            format!("{}..{}", range.steps.start, range.steps.end),
            generation,
            hit_rate(range.hits, range.misses),
        ]
    });
    let rows: Vec<_> = rows.collect();
    let mut shown = table(["steps", "features", "hits"], &rows);
    if let Some(more) = ranges.len().checked_sub(MOST_RANGES + 1) {
        shown.push_str(&format!("\n({} earlier ranges are not shown)", more + 1));
    }
    shown
}

/// Records and accounts for programs, as JSON.
pub fn json(records: &RunRecords, accounts: &[EpochAccount]) -> Value {
    let ranges =
        |ranges: &[Range<u64>]| ranges.iter().map(|range| [range.start, range.end]).collect::<Vec<_>>();
    let (missing, duplicate) = totals(accounts);
    let epochs = accounts.iter().map(|account| {
        json!({
            "epoch": account.epoch,
            "samples": account.expected,
            "committed": account.committed,
            "quarantined": ranges(&account.quarantined),
            "skipped": ranges(&account.skipped),
            "missing": ranges(&account.missing),
            "duplicate": ranges(&account.duplicate),
        })
    });
    let generations = records.generations.iter().map(|membership| {
        json!({
            "generation": membership.generation,
            "workers": membership.workers,
            "first_step": membership.started.as_ref().map(|(step, _)| step),
            "source": membership.started.as_ref().map(|(_, source)| source),
        })
    });
    let skipped = records.steps.iter().filter_map(|step| {
        let skipped = step.skipped.as_ref()?;
        Some(json!({"step": step.step, "cause": skipped.cause, "samples": skipped.samples}))
    });
    json!({
        "run_id": records.run_id,
        "run_name": records.run_name,
        "state": records.state,
        "committed_steps": records.steps.len(),
        "total_steps": records.total_steps,
        "retried_steps": records.steps.iter().filter(|step| step.retries > 0).count(),
        "skipped": skipped.collect::<Vec<_>>(),
        "missing": missing,
        "duplicate": duplicate,
        "epochs": epochs.collect::<Vec<_>>(),
        "sets": records.by_set(),
        "generations": generations.collect::<Vec<_>>(),
        "cache": records.cache_ranges().iter().map(cache_range).collect::<Vec<_>>(),
        "faults": records.faults,
        "changes": records.changes,
    })
}

fn cache_range(range: &CacheRange) -> Value {
    json!({
        "first_step": range.steps.start,
        "end_step": range.steps.end,
        "generation": range.generation,
        "hits": range.hits,
        "misses": range.misses,
    })
}

#[cfg(test)]
mod tests {
    use coxswain_proto::order::{Order, SetShare};

    use super::*;
    use crate::audit::{CommittedStep, Fault, Membership};

    fn records() -> RunRecords {
        let step = |step: u64, generation| CommittedStep {
            step,
            generation,
            positions: vec![step * 4..step * 4 + 4],
            ..CommittedStep::default()
        };
        RunRecords {
            run_id: "r1".into(),
            run_name: "demo".into(),
            state: "finished".into(),
            data: "d1".into(),
            samples: 12,
            order: None,
            global_batch: 4,
            total_steps: Some(3),
            finished: true,
            over: true,
            steps: vec![step(0, 1), step(2, 2)],
            generations: vec![
                Membership { generation: 1, workers: 2, started: Some((0, "fresh".into())) },
                Membership { generation: 2, workers: 2, started: Some((2, "replica".into())) },
            ],
            faults: vec![Fault {
                generation: 1,
                rank: Some(1),
                text: "rank 1: SIGKILL".into(),
                ..Fault::default()
            }],
            changes: Vec::new(),
        }
    }

    #[test]
    fn what_is_missing_is_counted_and_named() {
        let records = records();
        let accounts = records.audit();
        let shown = text(&records, &accounts);
        for line in [
            "demo (run r1) finished · 2 of 3 steps committed",
            "  missing in epoch 0: positions 4..8",
            "1 fault",
            "  generation 1: rank 1: SIGKILL",
            "4 missing, 0 duplicate",
        ] {
            assert!(shown.lines().any(|shown| shown == line), "{line}\n  in\n{shown}");
        }
        let json = json(&records, &accounts);
        assert_eq!((&json["missing"], &json["duplicate"]), (&4.into(), &0.into()));
        assert_eq!(json["epochs"][0]["missing"], json!([[4, 8]]));
        assert_eq!(json["generations"][1]["source"], "replica");
        assert_eq!(json["cache"], json!([]));
    }

    #[test]
    fn each_data_set_of_a_mixture_has_an_account() {
        let share =
            |name: &str, samples, taken| SetShare { name: name.into(), order_key: samples, samples, taken };
        let shares = vec![share("lab", 8, 8), share("field", 40, 4)];
        let mut records = RunRecords { order: Some(Order::new(1, 2, 0).of_sets(shares)), ..records() };
        let step =
            CommittedStep { step: 1, generation: 1, positions: vec![4..7], ..CommittedStep::default() };
        records.steps.insert(1, CommittedStep { quarantined: vec![7..8, 7..7], ..step });
        let [lab, field] = &records.by_set()[..] else { panic!("two sets") };
        assert_eq!((lab.consumed + lab.quarantined, field.consumed + field.quarantined), (8, 4));
        assert_eq!(lab.quarantined + field.quarantined, 1);
        let shown = text(&records, &records.audit());
        assert!(shown.contains("data set  samples  an epoch"), "{shown}");
        assert_eq!(json(&records, &records.audit())["sets"][1]["an_epoch"], 4);
    }

    #[test]
    fn where_features_came_from_is_a_row_for_each_cache_phase() {
        let mut records = records();
        records.steps[1] = CommittedStep {
            step: 1,
            cache_generation: 3,
            cache_hits: 3,
            cache_misses: 1,
            ..records.steps[1].clone()
        };
        let shown = text(&records, &records.audit());
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let shown: Vec<_> = shown.lines().map(words).collect();
        for line in ["steps features hits", "0..1 computed -", "1..2 version 3 75 %"] {
            assert!(shown.iter().any(|shown| shown == line), "{line}\n  in\n{shown:#?}");
        }
    }
}
