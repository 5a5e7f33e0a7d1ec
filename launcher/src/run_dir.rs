//! A run as its output directory tells it, over or still going.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{
    audit::{RunRecords, source},
    endpoint::SPEC_FILE,
};

/// What a run's directory holds for people. What another version has written, or nothing has, is null.
pub struct RunDir {
    /// Where it is.
    pub dir: PathBuf,
    /// Every key of its run file, as it was run.
    pub spec: Value,
    /// `summary.json`, which a run leaves at its end.
    pub summary: Value,
    /// `run.json`: name, id, version.
    pub run: Value,
    /// What its coordinator has written down, or why that cannot be read.
    pub records: Result<RunRecords, String>,
}

/// A JSON file of a run's directory; null where there is none, or it cannot be read.
pub fn json_of(dir: &Path, file: &str) -> Value {
    let text = std::fs::read(dir.join(file)).ok();
    text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or(Value::Null)
}

impl RunDir {
    /// Reads all of it; records of a run that goes on are its coordinator's to tell.
    pub async fn read(dir: &Path) -> Self {
        let read = |file: &str| json_of(dir, file);
        let records = source::of_run(dir).await.map_err(|failed| failed.message.unwrap_or_default());
        let spec = Some(read(SPEC_FILE)).filter(|spec| !spec.is_null());
        Self {
            dir: dir.to_owned(),
            // Written when training begins; that of the launch is there before.
            spec: spec.unwrap_or_else(|| read(&format!("logs/{SPEC_FILE}"))),
            summary: read("summary.json"),
            run: read("run.json"),
            records,
        }
    }

    /// Files of it that are there and cannot be read, a line each.
    pub fn damage(&self) -> Vec<String> {
        let files = [("run.json", &self.run), ("summary.json", &self.summary), (SPEC_FILE, &self.spec)];
        let paths = files.into_iter().map(|(file, found)| (self.dir.join(file), found));
        let damaged = paths.filter(|(path, found)| found.is_null() && path.exists());
        damaged.map(|(path, _)| format!("{}: not valid JSON; it may be truncated", path.display())).collect()
    }

    /// Whether a run has begun here: its coordinator writes this before it answers.
    pub fn is_run(dir: &Path) -> bool {
        dir.join("run.json").is_file()
    }
}
