//! Runs side by side, as text and as JSON.

use std::{collections::BTreeMap, path::Path};

use coxswain_proto::human;
use serde_json::{Value, json};

use super::table::table;
use crate::{report::Story, run_dir::RunDir};

/// A key of a run, and what each of two runs says; null where it says nothing.
pub type Difference = (String, Value, Value);

/// A run in a list: how it stands, and how it began.
pub struct RunEntry {
    /// What its directory holds.
    pub run: RunDir,
    /// The beginning of its log.
    pub opening: Story,
}

impl RunEntry {
    /// Where it ran: the machine, or how many of them.
    fn place(&self) -> String {
        match &self.opening.machines()[..] {
            [] => "-".to_owned(),
            [machine] => human::start(machine, 20),
            machines => format!("{} machines", machines.len()),
        }
    }
}

/// One row for each run.
pub fn list(dir: &Path, runs: &[RunEntry]) -> String {
    if runs.is_empty() {
        return format!("no runs in {}", dir.display());
    }
    let rows = runs.iter().map(|listed| {
        let run = &listed.run;
        let (state, steps) = match &run.records {
            Ok(records) => {
                let of = records.total_steps.map_or_else(String::new, |total| format!(" of {total}"));
                (records.state.clone(), format!("{}{of}", records.steps.len()))
            }
            Err(_) => ("unreadable".to_owned(), "-".to_owned()),
        };
        let faults = run.records.as_ref().map_or(0, |records| records.faults.len());
        let loss = run.summary["loss_last"].as_f64();
        [
            run.dir.display().to_string(),
            // To the minute.
            listed.opening.begun.as_deref().map_or("-", |begun| begun.get(..16).unwrap_or(begun)).to_owned(),
            listed.place(),
            text(&run.spec["task"]["type"]),
            state,
            steps,
            loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}")),
            faults.to_string(),
        ]
    });
    let rows: Vec<_> = rows.collect();
    let shown = table(["run", "started", "where", "task", "state", "steps", "loss", "faults"], &rows);
    let unread = runs.iter().filter_map(|RunEntry { run, .. }| Some((run, run.records.as_ref().err()?)));
    let unread = unread.map(|(run, why)| format!("\n{}: {why}", run.dir.display()));
    shown + &unread.collect::<String>()
}

/// Facts of one run, as JSON.
pub fn json(listed: &RunEntry) -> Value {
    let RunEntry { run, opening } = listed;
    let mut facts = json!({
        "dir": run.dir,
        "run": run.run,
        "begun": opening.begun,
        "machines": opening.machines(),
        "task": run.spec["task"]["type"],
        "summary": run.summary,
    });
    match &run.records {
        Err(problem) => facts["problem"] = json!(problem),
        Ok(records) => {
            facts["state"] = json!(records.state);
            facts["steps"] = json!(records.steps.len());
            facts["total_steps"] = json!(records.total_steps);
            facts["faults"] = json!(records.faults.len());
        }
    }
    facts
}

/// What two runs differ in: program and content of the data, then keys of the run file, then results.
pub fn differences(first: &RunDir, second: &RunDir) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut compare = |prefix: &str, one: &Value, other: &Value| {
        let [one, other] = [one, other].map(|value| {
            let mut leaves = BTreeMap::new();
            flatten(prefix, value, &mut leaves);
            leaves
        });
        let keys: std::collections::BTreeSet<_> = one.keys().chain(other.keys()).collect();
        for key in keys {
            let [here, there] = [&one, &other].map(|leaves| leaves.get(key).cloned().unwrap_or(Value::Null));
            if here != there {
                found.push((key.clone(), here, there));
            }
        }
    };
    compare("run", &first.run, &second.run);
    // Of a run that goes on it is not known.
    let data = |run: &RunDir| {
        let digest = run.records.as_ref().map_or("", |records| &records.data);
        json!({"digest": Some(digest).filter(|digest| !digest.is_empty())})
    };
    let (here, there) = (data(first), data(second));
    if !here["digest"].is_null() && !there["digest"].is_null() {
        compare("data", &here, &there);
    }
    compare("", &first.spec, &second.spec);
    compare("summary", &first.summary, &second.summary);
    found
}

/// The differences as a table; numbers with their ratio. Series and parts of measures are left to JSON.
pub fn diff(first: &RunDir, second: &RunDir, differences: &[Difference]) -> String {
    if differences.is_empty() {
        return "no difference".to_owned();
    }
    let ratio = |one: &Value, other: &Value| match (one.as_f64(), other.as_f64()) {
        (Some(one), Some(other)) if one != 0.0 => format!("x {:.3}", other / one),
        _ => String::new(),
    };
    let row = |(key, one, other): &Difference| [key.clone(), text(one), text(other), ratio(one, other)];
    let rows: Vec<_> = differences.iter().filter(|found| !is_detail(found)).map(row).collect();
    let [first, second] = [first, second].map(|run| run.dir.display().to_string());
    table(["key", &first, &second, ""], &rows)
}

/// Whether it is one of a series, or of a part of a measure.
pub fn is_detail(difference: &Difference) -> bool {
    let (key, one, other) = difference;
    key.starts_with("summary.") && (key.contains(".parts.") || one.is_array() || other.is_array())
}

/// Leaves of a document by dotted key. A list is a leaf: its elements have no names.
fn flatten(prefix: &str, value: &Value, leaves: &mut BTreeMap<String, Value>) {
    match value {
        Value::Null => {}
        Value::Object(fields) => {
            for (name, field) in fields {
                let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                flatten(&key, field, leaves);
            }
        }
        leaf => drop(leaves.insert(prefix.to_owned(), leaf.clone())),
    }
}

/// A value in a column of a table.
fn text(value: &Value) -> String {
    const LONGEST: usize = 40;
    shown(value, LONGEST)
}

/// A value as a person would write it, cut behind so many characters.
pub fn shown(value: &Value, longest: usize) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => human::start(text, longest),
        Value::Number(number) => digits(number.to_string(), number.as_f64()),
        other => human::start(&other.to_string(), longest),
    }
}

/// A number as it was written, rounded where it has more digits than a person compares.
fn digits(written: String, number: Option<f64>) -> String {
    const MOST: usize = 8;
    match number {
        Some(number) if written.len() > MOST && number.fract() != 0.0 => match number.abs() {
            0.1.. => format!("{number:.4}"),
            _ => format!("{number:.3e}"),
        },
        _ => written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::RunRecords;

    fn told(dir: &str, spec: Value) -> RunDir {
        RunDir { dir: dir.into(), spec, summary: Value::Null, run: Value::Null, records: Err("gone".into()) }
    }

    #[test]
    fn runs_differ_in_the_keys_whose_values_do() {
        let one = told("a", json!({"lora": {"rank": 8, "targets": ["q"]}, "train": {"steps": 10}}));
        let other = told("b", json!({"lora": {"rank": 16, "targets": ["q"]}, "cache": {"mode": "off"}}));
        let found = differences(&one, &other);
        let keys: Vec<_> = found.iter().map(|(key, ..)| key.as_str()).collect();
        assert_eq!(keys, ["cache.mode", "lora.rank", "train.steps"]);
        let shown = diff(&one, &other, &found);
        assert!(shown.contains("lora.rank") && shown.contains("x 2.000"), "{shown}");
        assert_eq!(diff(&one, &one, &differences(&one, &one)), "no difference");
    }

    #[test]
    fn data_of_other_content_are_a_difference_where_both_are_known() {
        let of = |digest: &str| RunDir {
            records: Ok(RunRecords { data: digest.to_owned(), ..RunRecords::default() }),
            ..told("a", Value::Null)
        };
        let keys = |one: &RunDir, other: &RunDir| differences(one, other).len();
        assert_eq!((keys(&of("x"), &of("x")), keys(&of("x"), &of("y"))), (0, 1));
        assert_eq!((keys(&of("x"), &of("")), keys(&of("x"), &told("b", Value::Null))), (0, 0));
        assert_eq!(differences(&of("x"), &of("y"))[0].0, "data.digest");
    }

    #[test]
    fn numbers_are_rounded_where_they_are_long() {
        let shown = |number: f64| text(&json!(number));
        assert_eq!(
            [0.1169734110155355, 1e-5, 9.090909e-5, 2.0].map(shown),
            ["0.1170", "0.00001", "9.091e-5", "2.0"]
        );
        assert_eq!(text(&json!(39338097u64)), "39338097");
    }

    #[test]
    fn a_run_without_records_is_a_row_with_the_reason_below() {
        let opening = Story { begun: Some("2026-11-24 10:00:01".into()), ..Story::default() };
        let listed = RunEntry { run: told("runs/a", Value::Null), opening };
        let shown = list(Path::new("runs"), &[listed]);
        assert!(shown.contains("unreadable") && shown.ends_with("runs/a: gone"), "{shown}");
        assert!(shown.contains("2026-11-24 10:00 "), "{shown}");
        assert_eq!(list(Path::new("runs"), &[]), "no runs in runs");
    }
}
