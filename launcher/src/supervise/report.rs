//! How a launch ended: the exit code, and the few lines that people read.

use std::{
    fmt::Write,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::PathBuf,
    time::{Duration, Instant},
};

use coxswain_proto::{
    human,
    v1::{CheckpointRecord, CheckpointState, Failure, RunPhase, StepCommitted},
};

use super::{machine::ProcessExit, signals};
use crate::{exit::Exit, render::status};

/// Lines of a failed rank's log that are shown.
const TAIL: usize = 15;
/// Bytes of it that are searched for them.
const TAIL_BYTES: u64 = 16 << 10;

/// What a launcher knows when everything has ended.
#[derive(Debug, Default)]
pub struct Report {
    /// The signal that ended the run, if one did.
    pub interrupted: Option<i32>,
    /// When the first signal came, and which.
    pub signalled: Option<(Instant, i32)>,
    /// The first worker of this launcher that failed by itself and was not replaced.
    pub worker: Option<FailedWorker>,
    /// How the coordinator ended, if it was ours.
    pub coordinator: Option<ProcessExit>,
    /// Whether the coordinator was lost for good.
    pub coordinator_lost: bool,
    /// Whether another launcher has this one's place.
    pub displaced: bool,
    /// How the run ended, as the coordinator said while it lived.
    pub run_end: Option<RunPhase>,
    /// The first cause of the newest failure, as the coordinator saw it; the run may have survived it.
    pub first_cause: Option<Failure>,
    /// The last step that was committed.
    pub last_step: Option<StepCommitted>,
    /// The last one that was not left out.
    pub last_learned: Option<StepCommitted>,
    /// The step of the newest complete checkpoint.
    pub newest_checkpoint: Option<u64>,
    /// From start to end.
    pub wall: Duration,
}

/// A worker that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedWorker {
    /// Rank.
    pub rank: u32,
    /// Number among this launcher's workers.
    pub local_rank: u32,
    /// Machine.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// How it ended.
    pub ended: ProcessExit,
    /// Log of standard error, if one is kept.
    pub log: Option<Log>,
}

/// A log, and where in it this launch begins: logs are continued over launches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// The file.
    pub path: PathBuf,
    /// Size before the worker was started.
    pub begin: u64,
}

impl Report {
    /// How the launcher ends: as the run did, whatever became of single workers on the way. Where the end was
    /// not seen, the most specific of what workers and first cause say wins.
    pub fn exit(&self) -> Exit {
        if let Some(signal) = self.interrupted {
            return Exit::Signal(signal);
        }
        if self.displaced {
            return Exit::Rendezvous;
        }
        let of = |ended: ProcessExit| match ended {
            ProcessExit::Code(code) => Exit::of_child(code),
            ProcessExit::Signal(_) => Exit::WorkerFailed,
        };
        let coordinator = self.coordinator.map(of);
        if coordinator == Some(Exit::Done) || self.run_end == Some(RunPhase::Finished) {
            return Exit::Done;
        }
        let failed = self.run_end == Some(RunPhase::Failed);
        let cause = self.first_cause.as_ref().filter(|_| failed).map(|cause| Exit::of_cause(cause.kind));
        let worker = self.worker.as_ref().map(|worker| of(worker.ended));
        let vague = |exit: &Exit| matches!(exit, Exit::WorkerFailed | Exit::CoordinatorLost | Exit::Done);
        let told = [coordinator, cause, worker].into_iter().flatten();
        match told.clone().find(|exit| !vague(exit)) {
            Some(specific) => specific,
            None if self.coordinator_lost => Exit::CoordinatorLost,
            None => told.rev().find(|exit| *exit != Exit::Done).unwrap_or(Exit::Done),
        }
    }

    /// What failed, where to look, and the last lines of the failed rank's log; empty if all went well.
    pub fn failure_text(&self, run: &str) -> String {
        let mut text = String::new();
        match self.exit() {
            Exit::Done => return text,
            Exit::Signal(signal) => {
                let _ = writeln!(text, "{run}: ended by {}{}", signals::name(signal), self.goes_on());
            }
            exit => {
                let _ = writeln!(text, "{run} failed (exit code {})", exit.code());
            }
        }
        if let Some(first) = &self.first_cause {
            // A run that was stopped has survived it.
            let what = if self.interrupted.is_some() { "last fault    " } else { "first cause   " };
            let _ = writeln!(text, "  {what}{}", status::failure(first));
        }
        if let Some(worker) = &self.worker {
            let _ = writeln!(text, "  first exit    {worker}");
            if let Some(log) = &worker.log {
                let _ = writeln!(text, "  its log       {}", log.path.display());
                for line in tail(log) {
                    let _ = writeln!(text, "    | {line}");
                }
            }
        }
        if self.displaced {
            let _ = writeln!(text, "  another launcher has replaced this one");
        } else if self.coordinator_lost {
            let _ = writeln!(text, "  the coordinator was lost");
        }
        text.truncate(text.trim_end().len());
        text
    }

    /// Takes note of checkpoints that the coordinator knows.
    pub fn note_checkpoints(&mut self, checkpoints: &[CheckpointRecord]) {
        let complete = checkpoints.iter().filter(|of| of.state() == CheckpointState::Complete);
        self.newest_checkpoint = complete.map(|of| of.step).max().max(self.newest_checkpoint);
    }

    /// What a launch after this one would find.
    fn goes_on(&self) -> String {
        self.last_step.as_ref().map_or_else(String::new, |step| {
            let (done, total) = (step.step + 1, step.total_steps);
            let next = match self.newest_checkpoint {
                _ if done >= total => String::new(),
                Some(step) => format!("; start it again to resume from the checkpoint of step {step}"),
                None => "; there is no checkpoint yet: starting it again begins at step 0".to_owned(),
            };
            format!(" after step {done} of {total}{next}")
        })
    }

    /// One line of a launcher without the coordinator, whose workers have left in order.
    pub fn left_text(&self, run: &str) -> String {
        let was_last = self.last_step.as_ref().is_some_and(|step| step.step + 1 >= step.total_steps);
        match self.run_end {
            Some(RunPhase::Finished) => format!("{run}: the run has ended"),
            // The coordinator may have gone before it has said so.
            None if was_last => format!("{run}: the run has ended"),
            _ => format!("{run}: this node has left the run"),
        }
    }

    /// One line on how it went; `stopped` if people have asked for the end.
    pub fn success_text(&self, stopped: bool) -> String {
        let how = if stopped { "stopped after" } else { "finished in" };
        let mut parts = vec![format!("{how} {}", human::time(self.wall))];
        if let Some(step) = &self.last_step {
            let (done, total) = (step.step + 1, step.total_steps);
            let last = match &self.last_learned {
                Some(learned) if learned.step == step.step => format!("the last with loss {:.4}", step.loss),
                Some(learned) => {
                    format!(
                        "the last {} left out; the loss before that was {:.4}",
                        step.step - learned.step,
                        learned.loss
                    )
                }
                None => "all steps of this launch were left out".to_owned(),
            };
            parts.push(format!("{done} of {total} steps, {last}"));
        }
        parts.join(" · ")
    }
}

impl std::fmt::Display for FailedWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rank, local_rank, pid, host, ended, .. } = self;
        write!(f, "rank {rank} (local {local_rank}, pid {pid}) on {host}: {ended}")
    }
}

/// The last lines that were written since the launch; none if the log cannot be read.
fn tail(log: &Log) -> Vec<String> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(&log.path)?;
        let end = file.metadata()?.len();
        file.seek(SeekFrom::Start(log.begin.max(end.saturating_sub(TAIL_BYTES))))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].iter().map(|line| (*line).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{FailureKind, WorkerPhase};

    use super::*;

    fn worker(ended: ProcessExit) -> Option<FailedWorker> {
        Some(FailedWorker { rank: 3, local_rank: 1, host: "n4".into(), pid: 77, ended, log: None })
    }

    #[test]
    fn the_most_specific_cause_decides_the_exit_code() {
        let of = |coordinator: Option<i32>, ended: Option<ProcessExit>| {
            let worker = ended.and_then(worker);
            Report { coordinator: coordinator.map(ProcessExit::Code), worker, ..Report::default() }.exit()
        };
        assert_eq!(of(Some(0), None), Exit::Done);
        assert_eq!(of(None, None), Exit::Done);
        assert_eq!(of(Some(4), Some(ProcessExit::Code(3))), Exit::BadInput);
        assert_eq!(of(Some(5), Some(ProcessExit::Code(4))), Exit::OutOfMemory);
        assert_eq!(of(Some(4), Some(ProcessExit::Signal(9))), Exit::WorkerFailed);
        assert_eq!(of(Some(0), Some(ProcessExit::Code(1))), Exit::Done, "the run survived its worker");
        assert_eq!(of(Some(7), Some(ProcessExit::Signal(9))), Exit::NoProgress);
        assert_eq!(of(None, Some(ProcessExit::Code(8))), Exit::CoordinatorLost);
        assert_eq!(of(Some(6), None), Exit::Rendezvous);
        let guest = |run_end, kind: FailureKind| {
            let first_cause = Some(Failure { kind: kind.into(), ..Failure::default() });
            Report { run_end, first_cause, worker: worker(ProcessExit::Signal(9)), ..Report::default() }
                .exit()
        };
        assert_eq!(guest(Some(RunPhase::Finished), FailureKind::WorkerLost), Exit::Done);
        assert_eq!(guest(Some(RunPhase::Failed), FailureKind::NoProgress), Exit::NoProgress);
        assert_eq!(guest(Some(RunPhase::Failed), FailureKind::WorkerLost), Exit::WorkerFailed);
        let lost =
            Report { coordinator_lost: true, worker: worker(ProcessExit::Signal(15)), ..Report::default() };
        assert_eq!(lost.exit(), Exit::CoordinatorLost);
        let interrupted =
            Report { interrupted: Some(2), worker: worker(ProcessExit::Code(1)), ..Report::default() };
        assert_eq!(interrupted.exit(), Exit::Signal(2));
    }

    #[test]
    fn a_step_that_was_left_out_has_no_loss_to_tell() {
        let step = |step, loss| Some(StepCommitted { step, loss, total_steps: 9, ..Default::default() });
        let told = |last_learned| {
            let report = Report { last_step: step(8, 0.0), last_learned, ..Report::default() };
            report.success_text(false)
        };
        assert!(told(step(8, 0.0)).ends_with("9 of 9 steps, the last with loss 0.0000"));
        let two = told(step(6, 0.5));
        assert!(two.ends_with("9 of 9 steps, the last 2 left out; the loss before that was 0.5000"), "{two}");
        assert!(told(None).ends_with("9 of 9 steps, all steps of this launch were left out"));
    }

    #[test]
    fn an_end_by_a_signal_says_what_the_next_launch_would_find() {
        let step = |step| Some(StepCommitted { step, total_steps: 9, ..Default::default() });
        let told = |last_step, newest_checkpoint| {
            Report { interrupted: Some(15), last_step, newest_checkpoint, ..Report::default() }
                .failure_text("demo")
        };
        let found = "demo: ended by SIGTERM after step 5 of 9; start it again to resume from the checkpoint of step 4";
        assert_eq!(told(step(4), Some(4)), found);
        assert!(
            told(step(4), None).ends_with("there is no checkpoint yet: starting it again begins at step 0")
        );
        assert_eq!(told(step(8), Some(9)), "demo: ended by SIGTERM after step 9 of 9");
        let record = |step, state| CheckpointRecord { step, state: state as i32, ..Default::default() };
        let mut report = Report::default();
        report.note_checkpoints(&[record(3, CheckpointState::Complete), record(6, CheckpointState::Failed)]);
        assert_eq!(report.newest_checkpoint, Some(3));
    }

    #[test]
    fn a_node_that_hosts_nothing_says_whether_the_run_is_over() {
        let told = |run_end, step, total_steps| {
            let last_step = Some(StepCommitted { step, total_steps, ..Default::default() });
            Report { run_end, last_step, ..Report::default() }.left_text("demo")
        };
        assert_eq!(told(Some(RunPhase::Finished), 3, 9), "demo: the run has ended");
        assert_eq!(told(None, 8, 9), "demo: the run has ended", "whoever has said so is gone");
        assert_eq!(told(None, 3, 9), "demo: this node has left the run");
        assert_eq!(told(Some(RunPhase::Failed), 8, 9), "demo: this node has left the run");
    }

    #[test]
    fn a_failure_names_first_cause_process_and_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("stderr.log");
        let earlier = "of an earlier launch\n";
        let lines: String = (0..12).map(|n| format!("line {n}\n")).collect();
        std::fs::write(&log, format!("{earlier}{lines}")).unwrap();
        let first_cause = Failure {
            rank: Some(3),
            host: "n4".into(),
            kind: FailureKind::BadInput as i32,
            phase: WorkerPhase::Loading as i32,
            message: "no such camera".into(),
            ..Failure::default()
        };
        let failed = FailedWorker {
            log: Some(Log { path: log.clone(), begin: earlier.len() as u64 }),
            ..worker(ProcessExit::Code(3)).unwrap()
        };
        let report = Report { first_cause: Some(first_cause), worker: Some(failed), ..Report::default() };
        let text = report.failure_text("demo");
        let mut shown = text.lines();
        assert_eq!(shown.next(), Some("demo failed (exit code 3)"));
        assert_eq!(shown.next(), Some("  first cause   rank 3 on n4, bad input, in loading: no such camera"));
        assert_eq!(shown.next(), Some("  first exit    rank 3 (local 1, pid 77) on n4: exit code 3"));
        assert_eq!(shown.next(), Some(format!("  its log       {}", log.display()).as_str()));
        assert_eq!(shown.next(), Some("    | line 0"));
        assert_eq!(shown.last(), Some("    | line 11"));
        assert_eq!(Report::default().failure_text("demo"), "");
    }

    #[test]
    fn a_launcher_whose_place_is_anothers_has_not_lost_its_coordinator() {
        let text = |displaced| {
            Report { displaced, coordinator_lost: true, ..Report::default() }.failure_text("demo")
        };
        assert_eq!(text(true), "demo failed (exit code 6)\n  another launcher has replaced this one");
        assert_eq!(text(false), "demo failed (exit code 8)\n  the coordinator was lost");
    }
}
