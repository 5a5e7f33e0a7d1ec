//! What a run leaves behind, told in a few lines: `summary.json` of its output directory.
//!
//! The file is another program's output by the time it is read: what is missing in it is left out here.

use std::path::Path;

use coxswain_coordinator::journal::{self, LedgerEntry};
use coxswain_proto::{
    human,
    memory::{Comparison, MemoryRow},
    run_spec::RunSpec,
};
use coxswain_worker::train::checkpoint::Store;
use serde::Deserialize;
use serde_json::Value;

use crate::{endpoint::SPEC_FILE, run_dir::json_of, tasks::tasks};

/// The lines for a finished run; only the directory if there is no summary. Memory, predicted and measured,
/// is the log's to show at the end: it is told where nobody has seen that.
pub fn of_run(output_dir: &Path, with_memory: bool) -> String {
    let summary = json_of(output_dir, "summary.json");
    let records = journal::read(&output_dir.join("coordinator"));
    let mut lines = Vec::new();
    let whole = records.as_ref().ok().and_then(|records| losses(&records.steps));
    let of_launch = || ["loss_first", "loss_last"].map(|key| summary.get(key).cloned());
    let [first, last] = whole.map_or_else(of_launch, |losses| losses.map(Some));
    lines.extend(fall(first.as_ref(), last.as_ref(), "loss (mean of 10 steps)"));
    lines.extend(held_out(&summary["error_before"], &summary["error_after"]));
    lines.extend(peaks(&summary["peak_memory"]));
    lines.extend(with_memory.then(|| compared(&summary["memory"])).into_iter().flatten());
    if let Ok(records) = records {
        lines.extend(left_out(&records.steps));
        lines.extend(saved(output_dir, records.steps.len() as u64));
    }
    lines.push(format!("{:<26}{}", "written to", output_dir.display()));
    let files = written(output_dir);
    lines.extend((!files.is_empty()).then(|| listing("", &files, ",", 3)));
    lines.extend(next(output_dir));
    lines.iter().map(|line| format!("  {line}\n")).collect()
}

/// The loss of the whole run, of its first and of its last steps: a summary has that of one worker's life.
fn losses(steps: &[LedgerEntry]) -> Option<[Value; 2]> {
    let losses: Vec<_> = steps.iter().filter_map(LedgerEntry::learned).collect();
    let mean = |losses: &[f64]| (losses.iter().sum::<f64>() / losses.len() as f64).into();
    let shown = losses.len().min(10);
    (shown > 0).then(|| [mean(&losses[..shown]), mean(&losses[losses.len() - shown..])])
}

/// A label and a list behind it, so many items on a line: terminals may have 80 columns.
fn listing(label: &str, items: &[String], separator: &str, on_a_line: usize) -> String {
    let lines: Vec<_> = items.chunks(on_a_line).map(|row| row.join(&format!("{separator} "))).collect();
    format!("{label:<26}{}", lines.join(&format!("{separator}\n{:28}", "")))
}

/// What `manifest.json` lists, by name.
fn written(output_dir: &Path) -> Vec<String> {
    let manifest = json_of(output_dir, "manifest.json");
    let paths = manifest["files"].as_array().into_iter().flatten().filter_map(|file| file["path"].as_str());
    let mut names: Vec<_> = paths
        .map(|path| path.split_once('/').map_or_else(|| path.to_owned(), |(dir, _)| format!("{dir}/")))
        .collect();
    names.dedup();
    names
}

/// What can be done with it.
fn next(output_dir: &Path) -> Option<String> {
    let spec: RunSpec = serde_json::from_value(json_of(output_dir, SPEC_FILE)).ok()?;
    let dir = human::word(output_dir.display());
    let commands = tasks().of(&spec).ok()?.next_commands().map(|command| command.replace("RUN_DIR", &dir));
    Some(listing("to try next", &commands, ";", 1))
}

/// Measures with a name of their own, in their order; others are told after them by the names that their
/// tasks gave them.
const ERRORS: [(&str, &str); 2] =
    [("mse_normalized", "held-out error, squared"), ("mae", "held-out error, absolute")];
/// What is counted beside measures.
const COUNTS: [&str; 3] = ["samples", "unreadable", "parts"];

/// Every measure of held-out samples, before and after, and the parts that are measures of their own
/// (`rougeL`, not `mae/dim0`).
fn held_out(before: &Value, after: &Value) -> Vec<String> {
    let errors =
        ERRORS.into_iter().filter_map(|(field, name)| fall(before.get(field), after.get(field), name));
    let is_other = |field: &&String| {
        !COUNTS.contains(&field.as_str()) && ERRORS.iter().all(|(known, _)| *known != field.as_str())
    };
    let others = after.as_object().into_iter().flat_map(|measures| measures.keys().filter(is_other));
    let others = others.map(|field| (field.as_str(), format!("held-out {}", field.replace('_', " "))));
    let whole = after["parts"].as_object().into_iter().flatten().filter(|(name, _)| !name.contains('/'));
    let whole = whole.filter_map(|(name, value)| {
        change(before["parts"].get(name), Some(value), &format!("held-out {name}"))
    });
    let others = others.filter_map(|(field, name)| change(before.get(field), after.get(field), &name));
    errors.chain(others).chain(whole).collect()
}

/// Steps and samples that the run has done without.
fn left_out(steps: &[LedgerEntry]) -> Option<String> {
    let skipped = steps.iter().filter(|step| step.skipped.is_some()).count();
    let unusable: u64 =
        steps.iter().flat_map(|step| &step.left_out).map(|range| range.end - range.start).sum();
    let steps = (skipped > 0).then(|| format!("{skipped} of {} steps", steps.len()));
    let samples = (unusable > 0).then(|| format!("unusable samples: {unusable}"));
    let told: Vec<_> = steps.into_iter().chain(samples).collect();
    (!told.is_empty()).then(|| format!("{:<26}{}; `cox audit` lists them", "left out", told.join(", ")))
}

/// How old the newest checkpoint is, where later ones were given up.
fn saved(output_dir: &Path, done: u64) -> Option<String> {
    let newest = Store::new(output_dir).newest().map_or(0, |found| found.manifest.step);
    let what = match newest {
        0 => "none".to_owned(),
        step => format!("step {step} of {done}"),
    };
    let line = || format!("{:<26}{what}; the log says why later checkpoints failed", "newest checkpoint");
    (newest < done).then(line)
}

fn change(before: Option<&Value>, after: Option<&Value>, name: &str) -> Option<String> {
    let shown = |value: &Value| match value {
        // JSON has no word for it.
        Value::Null => Some("NaN".to_owned()),
        value => value.as_f64().map(|value| format!("{value:.4}")),
    };
    Some(format!("{name:<26}{} -> {}", shown(before?)?, shown(after?)?))
}

/// The change of what is better the lower it is, and by how much.
fn fall(before: Option<&Value>, after: Option<&Value>, name: &str) -> Option<String> {
    let line = change(before, after, name)?;
    let (Some(from), Some(to)) = (before?.as_f64(), after?.as_f64()) else { return Some(line) };
    let share = 100.0 * (to / from - 1.0);
    let shown = from > 0.0 && share.is_finite() && share.abs() >= 0.5;
    let way = if share < 0.0 { "lower" } else { "higher" };
    Some(if shown { format!("{line} ({:.0} % {way})", share.abs()) } else { line })
}

/// What each rank held at most: what it had in use, which `cox plan` predicts, and all that the system or the
/// driver counted as its own, the program itself and what the allocator kept among it.
fn peaks(ranks: &Value) -> Option<String> {
    let ranks = ranks.as_array().filter(|ranks| !ranks.is_empty())?;
    let shown = ranks.iter().filter_map(|rank| {
        let all = ["in_use", "reserved", "driver"].iter().filter_map(|scope| rank[*scope].as_u64()).max()?;
        let [in_use, all] = [rank["in_use"].as_u64()?, all].map(human::bytes);
        Some(format!("rank {} {in_use} in use, {all} for the process", rank["rank"].as_u64()?))
    });
    Some(listing("peak memory", &shown.collect::<Vec<_>>(), ";", 1))
}

/// Rank 0's memory in steps, predicted and measured by category.
fn compared(memory: &Value) -> Vec<String> {
    let (Some(predicted), Some(measured)) = (memory["predicted"].as_u64(), memory["measured"].as_u64())
    else {
        return Vec::new();
    };
    let runs = memory["calibration"]["records"].as_u64().unwrap_or(0) as u32;
    let all = Vec::<MemoryRow>::deserialize(&memory["categories"]).unwrap_or_default();
    let categories =
        all.into_iter().filter(|of| of.predicted > 0 || of.measured.is_some_and(|bytes| bytes > 0));
    Comparison { predicted, measured, runs, categories: categories.collect() }.table_of(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn step(step: u64, more: Value) -> LedgerEntry {
        let positions = json!({"start": step * 4, "end": step * 4 + 4});
        let mut entry = json!({"step": step, "epoch": 0, "generation": 1, "world": 2, "positions": positions, "loss": 0.5});
        entry.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(entry).unwrap()
    }

    #[test]
    fn what_a_run_has_done_without_is_counted() {
        assert_eq!(left_out(&[step(0, json!({})), step(1, json!({}))]), None);
        let damaged = json!({"left_out": [{"start": 4, "end": 5}, {"start": 6, "end": 8}]});
        let steps = [step(0, json!({})), step(1, damaged)];
        let told = "left out                  unusable samples: 3; `cox audit` lists them";
        assert_eq!(left_out(&steps).as_deref(), Some(told));
    }

    #[test]
    fn the_loss_is_that_of_the_whole_run_without_steps_that_were_left_out() {
        let told = |step_number: u64| {
            let skip = json!({"skipped": {"cause": "loss", "samples": []}, "reports": 2});
            let more = json!({"loss": 20 - step_number, "reports": 2});
            step(step_number, if step_number == 3 { skip } else { more })
        };
        let steps: Vec<_> = (0..20).map(told).collect();
        // 20 to 10 without 17; 10 to 1.
        assert_eq!(losses(&steps), Some([json!(14.8), json!(5.5)]));
        assert_eq!(losses(&steps[..0]), None);
    }

    #[test]
    fn a_long_list_is_broken_between_its_items() {
        let items = ["a", "b", "c", "d", "e"].map(str::to_owned);
        let line = format!("\n{:28}", "");
        assert_eq!(listing("label", &items, ";", 2), format!("{:<26}a; b;{line}c; d;{line}e", "label"));
    }

    #[test]
    fn the_age_of_the_newest_checkpoint_is_told_where_later_ones_were_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let none = "newest checkpoint         none; the log says why later checkpoints failed";
        assert_eq!(saved(dir.path(), 6).as_deref(), Some(none));
        assert_eq!(saved(dir.path(), 0), None, "nothing has been done");
    }

    #[test]
    fn a_summary_is_told_and_its_absence_tolerated() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display();
        assert_eq!(of_run(dir.path(), false), format!("  written to                {at}\n"));
        let files = ["adapter/a.json", "adapter/b.json", "stats.json"].map(|path| json!({"path": path}));
        std::fs::write(dir.path().join("manifest.json"), json!({"files": files}).to_string()).unwrap();
        let summary = serde_json::json!({
            "loss_first": 1.5,
            "loss_last": 0.25,
            "error_before": {"samples": 3, "mae": 0.9, "token_accuracy": 0.25, "parts": {"mae/dim0": 0.9, "rouge1": 0.0}},
            "error_after": {"samples": 3, "mae": null, "token_accuracy": 0.75, "parts": {"mae/dim0": 0.5, "rouge1": 0.5}},
            "peak_memory": [{"rank": 0, "in_use": 1 << 20, "reserved": 0, "driver": 3 << 20}],
            "memory": {"predicted": 11 << 20, "measured": 10 << 20, "calibration": {"records": 1}, "categories": [
                {"category": "trainables", "predicted": 2 << 20, "measured": 2 << 20},
                {"category": "cache", "predicted": 0, "measured": 0},
            ]},
        });
        std::fs::write(dir.path().join("summary.json"), summary.to_string()).unwrap();
        assert!(
            !of_run(dir.path(), false).contains("predicted")
                && of_run(dir.path(), false).contains("peak memory")
        );
        assert_eq!(
            of_run(dir.path(), true),
            format!(
                "  loss (mean of 10 steps)   1.5000 -> 0.2500 (83 % lower)\n  held-out error, absolute  0.9000 -> NaN\n  \
                 held-out token accuracy   0.2500 -> 0.7500\n  \
                 held-out rouge1           0.0000 -> 0.5000\n  \
                 peak memory               rank 0 1.0 MiB in use, 3.0 MiB for the process\n  \
                 rank 0                        predicted    measured     error\n  \
                 trainables                      2.0 MiB     2.0 MiB    +0.0 %\n  \
                 peak, from 1 earlier run       11.0 MiB    10.0 MiB   +10.0 %\n  \
                 written to                {at}\n  {:26}adapter/, stats.json\n",
                ""
            )
        );
    }
}
