//! A run as data, from its directory.

use std::path::Path;

use coxswain_coordinator::event_file::ScalarLog;
use coxswain_proto::{VERSION, bounded, limits::MAX_METADATA_BYTES};
use serde_json::Value;

use super::story::Story;
use crate::{audit::RunRecords, run_dir::RunDir};

/// Largest file of samples that is read.
const MAX_SAMPLES_BYTES: u64 = 4 << 20;

/// What is known of one run.
pub struct ReportedRun {
    /// Run file, summary and records.
    pub dir: RunDir,
    /// Figures of its steps.
    pub scalars: ScalarLog,
    /// What happened.
    pub story: Story,
    /// `samples.json`: predictions of held-out samples; null if there is none.
    pub samples: Value,
    /// Names of an action's dimensions, by `policy.json` or else `samples.json`; none where the data set has
    /// none.
    pub action_names: Vec<String>,
    /// What could not be read, a line each.
    pub problems: Vec<String>,
}

impl ReportedRun {
    /// Reads what is there. A directory that is no run has been refused before.
    pub async fn read(path: &Path) -> Self {
        let dir = RunDir::read(path).await;
        let scalars = ScalarLog::read(path);
        let log = path.join("logs/coordinator.log");
        let story = Story::read(&log);
        let mut problems: Vec<_> = dir.records.as_ref().err().cloned().into_iter().collect();
        problems.extend(story.as_ref().err().map(|error| format!("{}: {error}", log.display())));
        problems.extend(scalars.problems.iter().cloned());
        if let Some(version) = dir.run["version"].as_str().filter(|version| *version != VERSION) {
            problems.push(format!(
                "the run was written by version {version}, but this is version {VERSION}: unknown fields \
                 are left out"
            ));
        }
        problems.extend(dir.damage());
        let samples = samples(&path.join("samples.json"), &mut problems);
        let action_names = action_names(&path.join("policy.json"), &samples);
        Self { dir, scalars, story: story.unwrap_or_default(), samples, action_names, problems }
    }

    /// Name; its directory's if it has none.
    pub fn name(&self) -> String {
        let named = self.dir.run["name"].as_str().filter(|name| !name.is_empty());
        named.map_or_else(|| self.dir.dir.display().to_string(), str::to_owned)
    }

    /// What its coordinator has written down.
    pub fn records(&self) -> Option<&RunRecords> {
        self.dir.records.as_ref().ok()
    }

    /// Points of a tag: steps committed, and values.
    pub fn series(&self, tag: &str) -> Vec<(f64, f64)> {
        let points = self.scalars.series.get(tag).into_iter().flatten();
        points.map(|point| (point.step as f64 + 1.0, point.value)).collect()
    }

    /// A measure of held-out samples over the steps, from before the first one on.
    pub fn held_out(&self, name: &str) -> Vec<(f64, f64)> {
        let before = &self.dir.summary["error_before"];
        let before = before[name].as_f64().or_else(|| before["parts"][name].as_f64());
        let is_whole = self.dir.summary["first_step"].as_u64() == Some(0);
        let first = before.filter(|_| is_whole).map(|value| (0.0, value));
        first.into_iter().chain(self.series(&format!("eval/{name}"))).collect()
    }

    /// Losses of its steps; by the scalars where there is no ledger, which has every step.
    pub fn losses(&self) -> Vec<(f64, f64)> {
        let rows = self.records().into_iter().flat_map(|records| &records.steps);
        let learned = rows.filter(|row| row.skipped.is_none());
        let losses: Vec<_> = learned.map(|row| (row.step as f64 + 1.0, row.loss)).collect();
        if losses.is_empty() { self.series("train/loss") } else { losses }
    }

    /// Tags that begin like this, and the rest of their names, in their order.
    pub fn tags(&self, prefix: &str) -> Vec<(String, String)> {
        let tags = self.scalars.series.keys();
        tags.filter_map(|tag| Some((tag.clone(), tag.strip_prefix(prefix)?.to_owned()))).collect()
    }
}

/// Another program's file by now: what is not as expected has no names.
fn action_names(path: &Path, samples: &Value) -> Vec<String> {
    let text = bounded::read_text(path, MAX_METADATA_BYTES).unwrap_or_default();
    let policy: Value = serde_json::from_str(&text).unwrap_or_default();
    let listed = policy["action"]["names"].as_array().into_iter().flatten();
    let drawn = samples["samples"][0]["curves"].as_array().into_iter().flatten();
    let names: Vec<_> = listed.filter_map(Value::as_str).map(str::to_owned).collect();
    let drawn = drawn.filter_map(|curve| curve["name"].as_str()).map(str::to_owned);
    if names.is_empty() { drawn.collect() } else { names }
}

fn samples(path: &Path, problems: &mut Vec<String>) -> Value {
    let Ok(found) = std::fs::metadata(path) else { return Value::Null };
    if found.len() > MAX_SAMPLES_BYTES {
        problems.push(format!("{}: over {} MiB, so not shown", path.display(), MAX_SAMPLES_BYTES >> 20));
        return Value::Null;
    }
    let text = std::fs::read(path).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_else(|error| {
        problems.push(format!("{}: not valid JSON; it may be truncated ({error})", path.display()));
        Value::Null
    })
}
