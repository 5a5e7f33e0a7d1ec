//! A run's status and memory as text.

use coxswain_proto::v1::{CheckpointRecord, Failure, GetMemoryResponse, GetStatusResponse, RankStatus};

use super::{cache, names, table::table, units};

/// The whole status, several lines.
pub fn status(status: &GetStatusResponse) -> String {
    let mut parts = vec![headline(status)];
    if !status.reason.is_empty() {
        parts.push(status.reason.clone());
    }
    if !status.ranks.is_empty() {
        parts.push(String::new());
        parts.push(ranks(&status.ranks));
    }
    if !status.checkpoints.is_empty() {
        parts.push(String::new());
        parts.extend(status.checkpoints.iter().map(checkpoint));
    }
    if let Some(cache) = &status.cache {
        parts.push(String::new());
        parts.push(cache::text(cache));
    }
    if let Some(first) = &status.first_failure {
        parts.push(String::new());
        parts.push(format!("first failure: {}", failure(first)));
    }
    parts.join("\n")
}

/// One line: what, where, how fast, how long.
pub fn headline(status: &GetStatusResponse) -> String {
    let mut parts = vec![
        format!("{} (run {}) {}", status.run_name, status.run_id, names::run_phase(status.phase)),
        format!("step {}/{}", status.committed_steps, status.total_steps),
    ];
    if status.committed_steps > 0 {
        parts.push(format!("epoch {}", status.epoch));
        parts.push(format!("loss {:.4}", status.loss));
        parts.push(format!("{} samples/s", units::count(status.samples_per_second)));
        parts.push(format!("{} tokens/s", units::count(status.tokens_per_second)));
    }
    if status.restarts > 0 {
        parts.push(format!("restarts {} of {}", status.restarts, status.max_restarts));
    }
    if status.eta_s > 0.0 {
        parts.push(format!("eta {}", units::seconds(status.eta_s)));
    }
    parts.join(" · ")
}

fn ranks(ranks: &[RankStatus]) -> String {
    let rows: Vec<_> = ranks
        .iter()
        .map(|rank| {
            [
                rank.rank.to_string(),
                rank.host.clone(),
                rank.pid.to_string(),
                rank.device.clone(),
                names::worker_phase(rank.phase),
                rank.step.to_string(),
                format!("{}..{}", rank.lease_first_step, rank.lease_end_step),
                format!("{} ms", rank.silent_ms),
                units::bytes(rank.memory_peak),
            ]
        })
        .collect();
    table(["rank", "host", "pid", "device", "phase", "step", "leased", "silent", "peak"], &rows)
}

/// One line about a checkpoint.
pub fn checkpoint(record: &CheckpointRecord) -> String {
    let state = names::checkpoint_state(record.state);
    format!("checkpoint {} {state} · {} · {}", record.step, units::bytes(record.bytes), record.path)
}

/// One line about a failure: who, where in the work, what.
pub fn failure(failure: &Failure) -> String {
    let kind = names::failure_kind(failure.kind).replace('_', " ");
    let mut parts = Vec::new();
    if let Some(rank) = failure.rank {
        parts.push(format!("rank {rank} on {}", failure.host));
        parts.push(format!("in {} of step {}", names::worker_phase(failure.phase), failure.step));
    }
    parts.insert(parts.len().min(1), kind);
    if failure.memory_in_use > 0 {
        parts.push(format!("{} in use", units::bytes(failure.memory_in_use)));
    }
    let victims: Vec<_> = failure.victims.iter().map(u32::to_string).collect();
    let victims = match victims.is_empty() {
        true => String::new(),
        false => format!(" (victims: rank {})", victims.join(", ")),
    };
    format!("{}: {}{victims}", parts.join(", "), failure.message.trim())
}

/// Peaks of every rank by phase.
pub fn memory(memory: &GetMemoryResponse) -> String {
    let rows: Vec<_> = memory
        .ranks
        .iter()
        .flat_map(|rank| rank.phases.iter().map(move |phase| (rank, phase)))
        .map(|(rank, phase)| {
            [
                rank.rank.to_string(),
                rank.host.clone(),
                names::worker_phase(phase.phase),
                units::bytes(phase.peak_in_use),
                units::bytes(phase.peak_reserved),
                units::bytes(phase.peak_driver),
            ]
        })
        .collect();
    match rows.is_empty() {
        true => "no rank has reported its memory yet".to_owned(),
        false => table(["rank", "host", "phase", "in use", "reserved", "resident"], &rows),
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{FailureKind, PhaseMemory, RankMemory, RunPhase, WorkerPhase};

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
            reason: "all workers are there".into(),
            committed_steps: 4,
            total_steps: 10,
            loss: 0.5,
            samples_per_second: 12.0,
            tokens_per_second: 3_400.0,
            eta_s: 60.0,
            ranks: vec![rank],
            first_failure: Some(failed),
            ..GetStatusResponse::default()
        });
        assert_eq!(
            shown,
            "demo (run r1) training · step 4/10 · epoch 0 · loss 0.5000 · 12.0 samples/s · 3400 tokens/s · eta 1m 00s\n\
             all workers are there\n\n\
             rank  host  pid  device  phase    step  leased  silent     peak\n   \
             1  n4     77  cpu     forward     4   0..32  120 ms  3.0 MiB\n\n\
             first failure: rank 1 on n4, out of memory, in backward of step 4, 1.0 GiB in use: cannot allocate"
        );
    }

    #[test]
    fn memory_is_a_row_for_each_rank_and_phase() {
        assert!(memory(&GetMemoryResponse::default()).contains("no rank has reported"));
        let phases = vec![PhaseMemory {
            phase: WorkerPhase::Loading as i32,
            peak_in_use: 1 << 20,
            ..Default::default()
        }];
        let ranks = vec![RankMemory { rank: 0, host: "n4".into(), phases }];
        let shown = memory(&GetMemoryResponse { ranks });
        assert!(shown.lines().nth(1).unwrap().contains("loading  1.0 MiB"), "{shown}");
    }
}
