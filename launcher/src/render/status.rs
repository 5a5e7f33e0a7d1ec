//! A run's status and memory as text.

use std::time::Duration;

use coxswain_coordinator::{core::memory::RankMemory, log::memory_tables};
use coxswain_proto::{
    human,
    v1::{
        self, CheckpointRecord, Failure, FailureKind, GetMemoryResponse, GetStatusResponse, HardwareFaults,
        LeavingNode, RankStatus, Slowness, WorkerPhase,
    },
};

use super::{cache, names, table::table};

/// The whole status, several lines.
pub fn status(status: &GetStatusResponse) -> String {
    let mut parts = vec![headline(status)];
    if !status.reason.is_empty() {
        parts.push(status.reason.clone());
    }
    parts.extend(held_out(&status.held_out));
    parts.extend(status.leaving.iter().map(leaving));
    parts.extend(status.hardware.iter().map(hardware));
    if !status.ranks.is_empty() {
        parts.push(String::new());
        parts.push(ranks(&status.ranks));
        parts.extend(status.ranks.iter().filter_map(slow));
    }
    if !status.checkpoints.is_empty() {
        parts.push(String::new());
        parts.extend(status.checkpoints.iter().map(checkpoint));
    }
    if let Some(cache) = &status.cache {
        parts.push(String::new());
        parts.push(cache::text(cache));
    }
    if let Some(newest) = &status.first_failure {
        let what = if newest.fatal { "failed" } else { "survived" };
        parts.push(String::new());
        parts.push(format!("{what}: {}", failure(newest)));
    }
    parts.join("\n")
}

/// One line: what, where, how fast, how long.
pub fn headline(status: &GetStatusResponse) -> String {
    let phase = names::plain(&names::run_phase(status.phase));
    let mut parts = vec![format!("{} (run {}) {phase}", status.run_name, status.run_id)];
    parts.push(match status.total_steps {
        // No worker has opened the data set yet.
        0 => format!("step {}", status.committed_steps),
        total => format!("step {}/{total}", status.committed_steps),
    });
    if status.committed_steps > 0 {
        parts.push(format!("epoch {}", status.epoch));
        parts.push(format!("loss {:.4}", status.loss));
        parts.push(format!("{} samples/s", human::count(status.samples_per_second)));
        parts.push(format!("{} tokens/s", human::count(status.tokens_per_second)));
    }
    if status.skipped_steps > 0 {
        parts.push(format!("{} left out", status.skipped_steps));
    }
    if status.restarts > 0 {
        parts.push(format!("restarts {} of {}", status.restarts, status.max_restarts));
    }
    if status.eta_s > 0.0 {
        parts.push(format!("eta {}", human::seconds(status.eta_s)));
    }
    parts.join(" · ")
}

/// One line about the newest look at held-out samples, without the parts of a measure.
pub fn held_out(metrics: &[v1::Metric]) -> Option<String> {
    let of = |kind: &'static str| {
        let named =
            metrics.iter().filter_map(move |metric| Some((metric.name.strip_prefix(kind)?, metric.value)));
        named.filter(|(name, _)| !name.strip_prefix("ema/").unwrap_or(name).contains('/'))
    };
    let measures: Vec<_> = of("eval/").map(|(name, value)| format!("{name} {value:.4}")).collect();
    let best: Vec<_> = of("best/")
        .map(|(name, value)| match name {
            "step" => format!("best after step {value}"),
            name => format!("{name} {value:.4}"),
        })
        .collect();
    let parts = [measures, best].into_iter().filter(|part| !part.is_empty());
    let told: Vec<_> = parts.map(|part| part.join(", ")).collect();
    (!told.is_empty()).then(|| format!("held out: {}", told.join(" · ")))
}

/// One line about a node that was asked to leave.
fn leaving(node: &LeavingNode) -> String {
    let state = match node.workers {
        0 => "its workers have left".to_owned(),
        1 => "1 worker is still there".to_owned(),
        workers => format!("{workers} workers are still there"),
    };
    let stays =
        if node.hosts_coordinator { "; its launcher stays, because it hosts the coordinator" } else { "" };
    format!("node {} on {} leaves the run: {state}{stays}", node.node_rank, node.host)
}

/// One line about a slot whose hardware has shown faults.
pub fn hardware(of: &HardwareFaults) -> String {
    let times = if of.faults == 1 { "fault" } else { "faults" };
    let used = if of.cordoned { "is cordoned after" } else { "has shown" };
    format!("rank {} on {} {used} {} hardware {times}: {}", of.rank, of.host, of.faults, of.newest)
}

/// A row for each slot. What is not known of a process that is being started is a dash.
fn ranks(ranks: &[RankStatus]) -> String {
    let row = |rank: &RankStatus| {
        let known = rank.phase != WorkerPhase::Starting as i32;
        let shown = |text: String| if known { text } else { "-".to_owned() };
        let phase = names::plain(&names::worker_phase(rank.phase));
        [
            rank.rank.to_string(),
            rank.host.clone(),
            shown(rank.pid.to_string()),
            shown(rank.device.clone()),
            match (rank.gone, rank.spare) {
                (true, _) => format!("gone ({phase})"),
                (false, true) => "spare".to_owned(),
                (false, false) => phase,
            },
            shown(rank.step.to_string()),
            shown(format!("{}..{}", rank.lease_first_step, rank.lease_end_step)),
            human::time(Duration::from_millis(rank.silent_ms)),
            shown(human::bytes(rank.memory_peak)),
        ]
    };
    let rows: Vec<_> = ranks.iter().map(row).collect();
    table(["rank", "host", "pid", "device", "phase", "step", "leased", "silent", "peak"], &rows)
}

/// One line about a rank that is slower than the others.
fn slow(rank: &RankStatus) -> Option<String> {
    let Slowness { part, factor } = rank.slow.as_ref()?;
    Some(format!(
        "rank {} on {} is slow: {factor:.2} times the time of the other ranks, mostly in {part}",
        rank.rank, rank.host
    ))
}

/// One line about a checkpoint.
pub fn checkpoint(record: &CheckpointRecord) -> String {
    let state = names::checkpoint_state(record.state);
    format!("checkpoint {} {state} · {} · {}", record.step, human::bytes(record.bytes), record.path)
}

/// One line about a failure: who, where in the work, what.
pub fn failure(failure: &Failure) -> String {
    let kind = names::plain(&names::failure_kind(failure.kind));
    let mut parts = Vec::new();
    if let Some(rank) = failure.rank {
        parts.push(format!("rank {rank} on {}", failure.host));
        let phase = names::plain(&names::worker_phase(failure.phase));
        parts.push(match WorkerPhase::try_from(failure.phase) {
            Ok(
                WorkerPhase::Starting | WorkerPhase::Joining | WorkerPhase::Loading | WorkerPhase::Connecting,
            ) => format!("in {phase}"),
            _ if failure.kind == FailureKind::WorkerLost as i32 => {
                format!("last heard of in phase {phase} of step {}", failure.step)
            }
            _ => format!("in {phase} of step {}", failure.step),
        });
    }
    parts.insert(parts.len().min(1), kind);
    if failure.memory_in_use > 0 {
        parts.push(format!("{} in use", human::bytes(failure.memory_in_use)));
    }
    let victims: Vec<_> = failure.victims.iter().map(u32::to_string).collect();
    let victims = match victims.is_empty() {
        true => String::new(),
        false => format!(" (victims: rank {})", victims.join(", ")),
    };
    format!("{}: {}{victims}", parts.join(", "), failure.message.trim())
}

/// Every rank's largest peaks beside its prediction, each phase's, and the categories of the fullest rank: 80
/// columns.
pub fn memory(memory: &GetMemoryResponse) -> String {
    if memory.ranks.iter().all(|rank| rank.phases.is_empty()) {
        return "no rank has reported its memory yet; --refresh asks them all".to_owned();
    }
    let rows: Result<Vec<_>, _> = memory.ranks.iter().cloned().map(RankMemory::try_from).collect();
    match rows {
        Ok(rows) => memory_tables(&rows),
        Err(error) => format!("the coordinator's answer cannot be read: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{self, PhaseMemory, RunPhase};

    use super::*;

    #[test]
    fn a_status_is_a_headline_a_table_and_what_went_wrong() {
        let rank = RankStatus {
            rank: 1,
            host: "n4".into(),
            pid: 77,
            device: "cpu".into(),
            phase: WorkerPhase::Forward as i32,
            step: 4,
            lease_end_step: 32,
            silent_ms: 120,
            memory_peak: 3 << 20,
            ..RankStatus::default()
        };
        let failed = Failure {
            rank: Some(1),
            host: "n4".into(),
            phase: WorkerPhase::Backward as i32,
            step: 4,
            kind: FailureKind::OutOfMemory as i32,
            memory_in_use: 1 << 30,
            message: "cannot allocate\n".into(),
            ..Failure::default()
        };
        let shown = status(&GetStatusResponse {
            run_id: "r1".into(),
            run_name: "demo".into(),
            phase: RunPhase::Training as i32,
            reason: "all workers have joined".into(),
            committed_steps: 4,
            total_steps: 10,
            loss: 0.5,
            samples_per_second: 12.0,
            tokens_per_second: 3_400.0,
            eta_s: 60.0,
            ranks: vec![rank],
            first_failure: Some(failed),
            leaving: vec![
                LeavingNode { host: "n3".into(), hosts_coordinator: true, ..LeavingNode::default() },
                LeavingNode { node_rank: 2, host: "n5".into(), workers: 4, ..LeavingNode::default() },
            ],
            ..GetStatusResponse::default()
        });
        assert_eq!(
            shown,
            "demo (run r1) training · step 4/10 · epoch 0 · loss 0.5000 · 12.0 samples/s · 3400 tokens/s · eta 1m 00s\n\
             all workers have joined\n\
             node 0 on n3 leaves the run: its workers have left; its launcher stays, because it hosts the \
             coordinator\n\
             node 2 on n5 leaves the run: 4 workers are still there\n\n\
             rank  host  pid  device  phase    step  leased  silent     peak\n   \
             1  n4     77  cpu     forward     4   0..32  120 ms  3.0 MiB\n\n\
             survived: rank 1 on n4, out of memory, in backward of step 4, 1.0 GiB in use: cannot allocate"
        );
    }

    #[test]
    fn held_out_measures_are_those_of_the_weights_and_of_their_average_without_parts() {
        let names = ["eval/mse", "eval/mse/dim0", "eval/ema/mse", "eval/ema/mse/dim0", "best/step"];
        let metrics = names.map(|name| v1::Metric { name: name.into(), value: 2.0, ..v1::Metric::default() });
        let told = held_out(&metrics).expect("there is something to tell");
        assert_eq!(told, "held out: mse 2.0000, ema/mse 2.0000 · best after step 2");
    }

    #[test]
    fn a_run_whose_length_nobody_knows_and_one_that_failed() {
        let begun = GetStatusResponse {
            run_name: "demo".into(),
            run_id: "r1".into(),
            phase: RunPhase::WaitingForWorkers as i32,
            ..GetStatusResponse::default()
        };
        assert_eq!(headline(&begun), "demo (run r1) waiting for workers · step 0");
        let fatal = Failure { fatal: true, message: "no disk".into(), ..Failure::default() };
        let failed = GetStatusResponse { first_failure: Some(fatal), ..begun };
        assert!(status(&failed).ends_with("\n\nfailed: unknown: no disk"), "{}", status(&failed));
    }

    #[test]
    fn who_is_on_the_way_and_who_is_gone_have_rows_too() {
        let there = RankStatus {
            pid: 77,
            device: "cpu".into(),
            step: 4,
            lease_end_step: 32,
            ..RankStatus::default()
        };
        let forward = WorkerPhase::Forward as i32;
        let shown = ranks(&[
            RankStatus { phase: forward, silent_ms: 700_000, gone: true, ..there },
            RankStatus {
                rank: 1,
                phase: WorkerPhase::Starting as i32,
                silent_ms: 2_500,
                ..RankStatus::default()
            },
        ]);
        let expected = [
            "rank  host  pid  device  phase           step  leased   silent  peak",
            "   0         77  cpu     gone (forward)     4   0..32  11m 40s   0 B",
            "   1          -  -       starting           -       -    2.5 s     -",
        ];
        assert_eq!(shown, expected.join("\n"));
    }

    #[test]
    fn memory_is_shown_by_rank_and_by_phase() {
        assert!(memory(&GetMemoryResponse::default()).contains("no rank has reported"));
        let phase = |phase: i32| PhaseMemory { phase, peak_in_use: 8 << 20, ..PhaseMemory::default() };
        let shown = |of: i32| {
            let rank = v1::RankMemory { rank: 3, phases: vec![phase(of)], ..v1::RankMemory::default() };
            memory(&GetMemoryResponse { ranks: vec![rank] })
        };
        let text = shown(WorkerPhase::Loading as i32);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("   3 ") && lines[4].starts_with("load   "), "{text}");
        assert!(shown(99).contains("phases[0].phase: 99 is unknown to this version"));
    }
}
