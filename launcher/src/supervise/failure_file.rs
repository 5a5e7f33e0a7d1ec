//! `OUTPUT_DIR/failure.json`: why the last launch of a run failed, for programs.
//!
//! It is written by the launcher that ran the coordinator, when the run has failed, and removed when the run
//! is started again. What a run survived is not in it; `cox status` and `cox audit` tell that.

use std::{fs, io, path::Path};

use coxswain_proto::in_place;
use serde_json::{Value, json};

use super::{machine::ProcessExit, report::Report};
use crate::render::json;

const FILE: &str = "failure.json";

/// Writes the file; a disk that fails is only logged, since the launch has failed already.
pub fn write(output_dir: &Path, report: &Report) {
    let path = output_dir.join(FILE);
    let text = format!("{:#}\n", content(report));
    if let Err(error) = in_place::replace(&path, text.as_bytes()) {
        tracing::warn!(path = %path.display(), %error, "the failure file cannot be written");
    }
}

/// Removes what an earlier launch left.
pub fn remove(output_dir: &Path) {
    let path = output_dir.join(FILE);
    if let Err(error) = fs::remove_file(&path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "an old failure file cannot be removed");
    }
}

fn content(report: &Report) -> Value {
    let first_exit = report.worker.as_ref().map(|worker| {
        let (exit_code, signal) = match worker.ended {
            ProcessExit::Code(code) => (Some(code), None),
            ProcessExit::Signal(signal) => (None, Some(signal)),
        };
        json!({
            "rank": worker.rank,
            "local_rank": worker.local_rank,
            "host": worker.host,
            "pid": worker.pid,
            "exit_code": exit_code,
            "signal": signal,
            "log": worker.log.as_ref().map(|log| log.path.display().to_string()),
        })
    });
    let victims = report.first_cause.as_ref().map(|cause| cause.victims.clone()).unwrap_or_default();
    json!({
        "exit_code": report.exit().code(),
        "first_cause": report.first_cause.as_ref().map(json::failure),
        "victims": victims,
        "first_exit": first_exit,
        "coordinator_lost": report.coordinator_lost && !report.displaced,
    })
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{Failure, FailureKind, RunPhase};

    use super::*;
    use crate::supervise::report::FailedWorker;

    #[test]
    fn it_names_the_first_cause_apart_from_its_victims() {
        let dir = tempfile::tempdir().unwrap();
        let first_cause = Failure {
            rank: Some(1),
            kind: FailureKind::WorkerLost.into(),
            message: "killed by SIGKILL".into(),
            victims: vec![0, 2],
            ..Failure::default()
        };
        let worker = FailedWorker {
            rank: 1,
            local_rank: 1,
            host: "n4".into(),
            pid: 77,
            ended: ProcessExit::Signal(9),
            log: None,
        };
        let report = Report {
            run_end: Some(RunPhase::Failed),
            first_cause: Some(first_cause),
            worker: Some(worker),
            ..Report::default()
        };
        write(dir.path(), &report);
        let read: Value = serde_json::from_str(&fs::read_to_string(dir.path().join(FILE)).unwrap()).unwrap();
        assert_eq!(read["exit_code"], 4);
        assert_eq!(read["first_cause"]["kind"], "worker_lost");
        assert_eq!(read["victims"], json!([0, 2]));
        assert_eq!(read["first_exit"]["signal"], 9);
        remove(dir.path());
        remove(dir.path());
        assert!(!dir.path().join(FILE).exists());
    }
}
