//! Answers of the coordinator as JSON: the names of the wire contract, enumerations as plain words.

use coxswain_proto::{
    memory::Comparison,
    report::{Metric, Skip},
    v1::{
        self, CheckpointRecord, Failure, GetMemoryResponse, GetStatusResponse, RankStatus, StepCommitted,
        WatchEvent, WorkerPhase, watch_event::Kind,
    },
};
use serde_json::{Value, json};

use super::{cache, names};
use crate::bucket::Record;

/// A run's status, and what is kept of it in a bucket.
pub fn status(status: &GetStatusResponse, kept: Option<&Record>) -> Value {
    json!({
        "bucket": kept.map(|kept| json!({"address": kept.address, "step": kept.step, "bytes": kept.bytes})),
        "run_id": status.run_id,
        "run_name": status.run_name,
        "spec_digest": status.spec_digest,
        "version": status.version,
        "phase": names::run_phase(status.phase),
        "reason": status.reason,
        "generation": status.generation,
        "world_size": status.world_size,
        "committed_steps": status.committed_steps,
        "skipped_steps": status.skipped_steps,
        "held_out": metrics(&status.held_out),
        "total_steps": status.total_steps,
        "epoch": status.epoch,
        "loss": status.loss,
        "samples_per_second": status.samples_per_second,
        "tokens_per_second": status.tokens_per_second,
        "eta_s": status.eta_s,
        "output_dir": status.output_dir,
        "training_samples": status.training_samples,
        "global_batch": status.global_batch,
        "restarts": status.restarts,
        "max_restarts": status.max_restarts,
        "rescales": status.rescales,
        "ranks": status.ranks.iter().map(rank).collect::<Vec<_>>(),
        "checkpoints": status.checkpoints.iter().map(checkpoint).collect::<Vec<_>>(),
        "cache": status.cache.as_ref().map(cache::json),
        "hardware": status.hardware,
        "leaving": status.leaving,
        "metrics": metrics(&status.metrics),
        "first_failure": status.first_failure.as_ref().map(failure),
    })
}

/// A process that has not made itself known has no number here: a script that signals number 0 would signal
/// itself.
fn rank(rank: &RankStatus) -> Value {
    let known = rank.phase != WorkerPhase::Starting as i32;
    json!({
        "rank": rank.rank,
        "worker_id": known.then_some(rank.worker_id),
        "host": rank.host,
        "pid": known.then_some(rank.pid),
        "node_rank": rank.node_rank,
        "local_rank": rank.local_rank,
        "device": known.then_some(&rank.device),
        "phase": names::worker_phase(rank.phase),
        "gone": rank.gone,
        "step": known.then_some(rank.step),
        "silent_ms": rank.silent_ms,
        "lease_first_step": known.then_some(rank.lease_first_step),
        "lease_end_step": known.then_some(rank.lease_end_step),
        "memory_peak": known.then_some(rank.memory_peak),
        "times": rank.times,
        "spare": rank.spare,
        "slow": rank.slow.as_ref().map(|slow| json!({"part": slow.part, "factor": slow.factor})),
        "metrics": metrics(&rank.metrics),
    })
}

/// Whatever there is: `[{"name": "time/vision", "unit": "s", "value": 0.0079}, ..]`.
fn metrics(metrics: &[v1::Metric]) -> Value {
    metrics.iter().map(|metric| json!(Metric::from(metric.clone()))).collect()
}

fn checkpoint(record: &CheckpointRecord) -> Value {
    json!({
        "step": record.step,
        "state": names::checkpoint_state(record.state),
        "path": record.path,
        "bytes": record.bytes,
    })
}

/// A failure with everything that is known of its cause.
pub fn failure(failure: &Failure) -> Value {
    let mut shown = json!(failure);
    shown["phase"] = json!(names::worker_phase(failure.phase));
    shown["samples"] = failure.samples.iter().map(|range| json!([range.begin, range.end])).collect();
    shown["kind"] = json!(names::failure_kind(failure.kind));
    shown
}

/// Peaks of every rank by phase.
pub fn memory(memory: &GetMemoryResponse) -> Value {
    let ranks = memory.ranks.iter().map(|rank| {
        let phases = rank.phases.iter().map(|phase| {
            json!({
                "phase": names::worker_phase(phase.phase),
                "peak_in_use": phase.peak_in_use,
                "peak_reserved": phase.peak_reserved,
                "peak_driver": phase.peak_driver,
            })
        });
        json!({
            "rank": rank.rank,
            "host": rank.host,
            "phases": phases.collect::<Vec<_>>(),
            "comparison": rank.comparison.clone().map(|comparison| compared(&comparison.into())),
        })
    });
    json!({"ranks": ranks.collect::<Vec<_>>()})
}

/// Predicted beside measured, in bytes; errors are signed and relative to what was measured.
fn compared(comparison: &Comparison) -> Value {
    let categories = comparison.categories.iter().map(|of| {
        json!({"category": of.category, "predicted": of.predicted, "measured": of.measured, "error": of.error()})
    });
    json!({
        "predicted": comparison.predicted,
        "measured": comparison.measured,
        "error": comparison.error(),
        "earlier_runs": comparison.runs,
        "categories": categories.collect::<Vec<_>>(),
    })
}

fn step(step: &StepCommitted) -> Value {
    json!({
        "step": step.step,
        "total_steps": step.total_steps,
        "epoch": step.epoch,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "learning_rate": step.learning_rate,
        "samples_per_second": step.samples_per_second,
        "tokens_per_second": step.tokens_per_second,
        "times": step.times,
        "metrics": metrics(&step.metrics),
        "memory_peak": step.memory_peak,
        "memory_peak_rank": step.memory_peak_rank,
        "cache_generation": step.cache_generation,
        "cache": step.cache.as_ref().map(cache::used_json),
        "skipped": step.skipped.clone().and_then(|skipped| Skip::try_from(skipped).ok()),
    })
}

/// One event: `{"unix_ms": .., "<kind>": {..}}`.
pub fn event(event: &WatchEvent) -> Value {
    let (kind, value) = match &event.kind {
        Some(Kind::Status(now)) => ("status", status(now, None)),
        Some(Kind::Step(done)) => ("step", step(done)),
        Some(Kind::Checkpoint(record)) => ("checkpoint", checkpoint(record)),
        Some(Kind::Phase(changed)) => {
            ("phase", json!({"phase": names::run_phase(changed.phase), "reason": changed.reason}))
        }
        Some(Kind::Membership(changed)) => ("membership", json!(changed)),
        Some(Kind::Failure(failed)) => ("failure", failure(failed)),
        Some(Kind::Cache(changed)) => ("cache", json!(changed)),
        Some(Kind::Note(note)) => ("note", json!({"rank": note.rank, "text": note.text})),
        Some(Kind::Missed(count)) => ("missed", json!(count)),
        None => ("unknown", Value::Null),
    };
    json!({"unix_ms": event.unix_ms, kind: value})
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{PhaseChanged, RunPhase};

    use super::*;

    #[test]
    fn an_event_is_an_object_with_its_kind_as_key() {
        let changed = PhaseChanged { phase: RunPhase::Paused as i32, reason: "asked to".into() };
        let shown = event(&WatchEvent { unix_ms: 5, kind: Some(Kind::Phase(changed)) });
        assert_eq!(shown.to_string(), r#"{"unix_ms":5,"phase":{"phase":"paused","reason":"asked to"}}"#);
    }

    #[test]
    fn a_metric_that_no_line_of_this_program_names_is_shown() {
        let made_up = v1::Metric::from(&Metric::same("made_up/thing", 0.5));
        let wanted = json!([{"name": "made_up/thing", "unit": "1", "value": 0.5}]);
        let done = StepCommitted { metrics: vec![made_up.clone()], ..Default::default() };
        assert_eq!(step(&done)["metrics"], wanted);
        let there = RankStatus { metrics: vec![made_up.clone()], ..Default::default() };
        let now = GetStatusResponse { metrics: vec![made_up], ranks: vec![there], ..Default::default() };
        let shown = status(&now, None);
        assert_eq!((&shown["metrics"], &shown["ranks"][0]["metrics"]), (&wanted, &wanted));
    }

    #[test]
    fn a_process_that_is_being_started_has_no_number_that_could_be_signalled() {
        let starting =
            RankStatus { rank: 1, phase: WorkerPhase::Starting as i32, silent_ms: 40, ..Default::default() };
        let shown = rank(&starting);
        assert_eq!(
            (&shown["pid"], &shown["step"], &shown["memory_peak"]),
            (&Value::Null, &Value::Null, &Value::Null)
        );
        assert_eq!((&shown["phase"], &shown["silent_ms"]), (&json!("starting"), &json!(40)));
        let known = rank(&RankStatus { pid: 7, phase: WorkerPhase::Joining as i32, ..Default::default() });
        assert_eq!((&known["pid"], &known["step"]), (&json!(7), &json!(0)));
    }

    #[test]
    fn a_status_without_a_failure_says_null() {
        let shown = status(&GetStatusResponse::default(), None);
        assert_eq!(shown["first_failure"], Value::Null);
        assert_eq!(shown["phase"], "unknown");
        assert!(shown["ranks"].as_array().unwrap().is_empty());
    }
}
