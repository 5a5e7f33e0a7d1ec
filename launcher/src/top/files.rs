//! A run as its directory tells it, where no coordinator answers.

use std::{fs, path::Path};

use coxswain_coordinator::journal::{self, Chronicle, Fate};
use coxswain_proto::v1::{
    CheckpointRecord, CheckpointState, GetStatusResponse, RankStatus, RunPhase, WorkerPhase,
};
use serde_json::Value;

use crate::run_dir::json_of;

/// How the run stands, as far as its files say, and the losses of its ledger by committed steps. What is
/// missing, damaged or of another version is left out; the journal's problem is the status's reason.
pub fn status(dir: &Path) -> (GetStatusResponse, Vec<(u64, f64)>) {
    let (run, summary) = (json_of(dir, "run.json"), json_of(dir, "summary.json"));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut status = GetStatusResponse {
        run_id: text(&run["run_id"]),
        run_name: text(&run["name"]),
        version: text(&run["version"]),
        output_dir: dir.display().to_string(),
        ranks: summary["peak_memory"].as_array().into_iter().flatten().filter_map(rank).collect(),
        checkpoints: checkpoints(dir),
        ..GetStatusResponse::default()
    };
    status.world_size = u32::try_from(status.ranks.len()).unwrap_or(u32::MAX);
    match journal::read(&dir.join("coordinator")) {
        Ok(chronicle) => {
            let learned = chronicle.steps.iter().map(|row| Some((row.step.0 + 1, row.learned()?)));
            let losses = learned.flatten().collect();
            (told(status, &chronicle), losses)
        }
        Err(error) => {
            status.reason = error.to_string();
            (status, Vec::new())
        }
    }
}

fn told(status: GetStatusResponse, chronicle: &Chronicle) -> GetStatusResponse {
    let history = &chronicle.history;
    let (phase, reason) = match history.fate {
        Fate::NotOver => (RunPhase::Unspecified, "interrupted; start it again to resume"),
        Fate::Finished => (RunPhase::Finished, ""),
        Fate::Stopped => (RunPhase::Finished, "it was stopped"),
        Fate::Failed => (RunPhase::Failed, ""),
    };
    let last = chronicle.steps.last();
    let survived = history.failures.iter().filter(|failure| !failure.fatal).count();
    GetStatusResponse {
        phase: phase.into(),
        reason: reason.to_owned(),
        committed_steps: last.map_or(0, |row| row.step.0 + 1),
        total_steps: chronicle.total_steps.unwrap_or_default(),
        epoch: last.map_or(0, |row| row.epoch),
        loss: last.map_or(0.0, |row| row.loss),
        generation: history.memberships.last().map_or(0, |of| of.generation.0),
        world_size: history.memberships.last().map_or(status.world_size, |of| of.workers),
        restarts: u32::try_from(survived).unwrap_or(u32::MAX),
        first_failure: history.failures.last().map(Into::into),
        ..status
    }
}

fn rank(peak: &Value) -> Option<RankStatus> {
    let most = ["in_use", "reserved", "driver"].iter().filter_map(|scope| peak[*scope].as_u64()).max();
    let rank = u32::try_from(peak["rank"].as_u64()?).ok()?;
    Some(RankStatus { rank, memory_peak: most?, phase: WorkerPhase::Done.into(), ..RankStatus::default() })
}

/// Directories of checkpoints; each is whole, for it appears by a rename.
fn checkpoints(dir: &Path) -> Vec<CheckpointRecord> {
    let entries = fs::read_dir(dir.join("checkpoints")).into_iter().flatten().flatten();
    let step = |name: &str| name.strip_prefix("step-")?.parse::<u64>().ok();
    let mut steps: Vec<_> = entries.filter_map(|entry| step(entry.file_name().to_str()?)).collect();
    steps.sort_unstable();
    let state = CheckpointState::Complete.into();
    steps.into_iter().map(|step| CheckpointRecord { step, state, ..CheckpointRecord::default() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_directory_lacks_is_left_out_and_its_reason_told() {
        let dir = tempfile::tempdir().unwrap();
        let (nothing, losses) = status(dir.path());
        assert!(losses.is_empty() && nothing.ranks.is_empty() && nothing.reason.contains("journal"));
        fs::write(dir.path().join("run.json"), r#"{"name": "demo", "version": "9.9", "new": 1}"#).unwrap();
        let peaks = r#"{"peak_memory": [{"rank": 0, "in_use": 1, "driver": 7}, {"of": "another version"}]}"#;
        fs::write(dir.path().join("summary.json"), peaks).unwrap();
        for name in ["step-00000040", "step-00000020", "step-00000060.partial", "best"] {
            fs::create_dir_all(dir.path().join("checkpoints").join(name)).unwrap();
        }
        let (told, _) = status(dir.path());
        assert_eq!((told.run_name.as_str(), told.world_size, told.ranks[0].memory_peak), ("demo", 1, 7));
        assert_eq!(told.checkpoints.iter().map(|of| of.step).collect::<Vec<_>>(), [20, 40]);
        assert_eq!(told.phase(), RunPhase::Unspecified);
    }
}
