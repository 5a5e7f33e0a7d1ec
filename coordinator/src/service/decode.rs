//! From the wire to the core: every value is checked here, and an error names the field.

use std::{ops::Range, sync::Arc, time::Duration};

use super::fields::{
    FieldError, FieldResult, at_most, count, cut, filled, milliseconds, name, short_name, unknown,
};
use crate::{
    core::{
        event::{
            Ask, Beat, CheckpointReport, CheckpointState, DataSet, KillingSample, NodeClaim, Origin,
            ProcessExit, Readiness, StartReport, WorkerClaim,
        },
        failure::Failure,
        memory::{MemoryReport, RankMemory},
        quarantine::BadSample,
        report::{
            CacheUse, Metric, PhaseMemory, Skip, StateSource, StepReport, StepTimes, Totals, WorkerPhase,
        },
    },
    options::CauseKind,
};
use coxswain_proto::{
    ids::{Bytes, Generation, Slot, Step, WorkerId},
    limits::{
        MAX_ERROR_TEXT, MAX_METRICS, MAX_SAMPLE_RANGES, MAX_SAMPLES_OF_ROW, MAX_SETS, MAX_SKIPPED_SAMPLES,
        MAX_WORLD, REPORT_QUEUE,
    },
    order::{DamagedRow, SetShare},
    v1,
};

impl TryFrom<v1::JoinNodeRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::JoinNodeRequest) -> FieldResult<Self> {
        Ok(Self::JoinNode(NodeClaim {
            origin: origin(wire.version, wire.run_id)?,
            node_id: name("node_id", wire.node_id)?,
            host: short_name("host", wire.host)?,
            local_world: wire.local_world_size,
            node_rank: wire.node_rank,
            returns: wire.returns,
        }))
    }
}

/// Who asks.
pub fn origin(version: String, run_id: String) -> FieldResult<Origin> {
    Ok(Origin { version: name("version", version)?, run_id: name("run_id", run_id)? })
}

impl TryFrom<v1::RegisterRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::RegisterRequest) -> FieldResult<Self> {
        filled("incarnation", &wire.incarnation)?;
        filled("data_address", &wire.data_address)?;
        filled("dataset_fingerprint", &wire.dataset_fingerprint)?;
        Ok(Self::Register(WorkerClaim {
            origin: origin(wire.version, wire.run_id)?,
            incarnation: name("incarnation", wire.incarnation)?,
            slot: Slot(wire.rank),
            local_rank: wire.local_rank,
            node_rank: wire.node_rank,
            host: short_name("host", wire.host)?,
            pid: wire.pid,
            data_address: name("data_address", wire.data_address)?,
            device: short_name("device", wire.device)?,
            dataset: DataSet {
                training_samples: wire.training_samples,
                fingerprint: name("dataset_fingerprint", wire.dataset_fingerprint)?,
                order_key: wire.order_key,
                sets: sets(wire.sets, wire.training_samples)?,
            },
        }))
    }
}

/// The sets of a mixture, of which an epoch takes so many samples.
fn sets(wire: Vec<v1::SetShare>, epoch: u64) -> FieldResult<Vec<SetShare>> {
    if wire.len() > MAX_SETS {
        let problem = format!("has {} data sets; at most {MAX_SETS} are possible", wire.len());
        return Err(FieldError::new("sets", problem));
    }
    let mut left = epoch;
    for share in &wire {
        name("sets.name", share.name.clone())?;
        count("sets.samples", share.samples)?;
        if !(1..=share.samples).contains(&share.taken) {
            let problem =
                format!("is {}, but must be between 1 and the set's {} samples", share.taken, share.samples);
            return Err(FieldError::new("sets.taken", problem));
        }
        left = left.wrapping_sub(share.taken);
    }
    match wire.is_empty() || left == 0 {
        true => Ok(wire.into_iter().map(Into::into).collect()),
        false => Err(FieldError::new("sets", format!("do not add up to an epoch of {epoch} samples"))),
    }
}

impl TryFrom<v1::ReadyRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::ReadyRequest) -> FieldResult<Self> {
        Ok(Self::Ready(Readiness {
            worker: WorkerId(wire.worker_id),
            incarnation: name("incarnation", wire.incarnation)?,
            left: Generation(wire.left_generation),
            reason: cut(wire.reason, MAX_ERROR_TEXT),
        }))
    }
}

impl TryFrom<v1::ReportStartRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::ReportStartRequest) -> FieldResult<Self> {
        let source = match v1::StateSource::try_from(wire.source) {
            Ok(v1::StateSource::Fresh) => StateSource::Fresh,
            Ok(v1::StateSource::Carried) => StateSource::Carried,
            Ok(v1::StateSource::Replica) => StateSource::Replica,
            Ok(v1::StateSource::Checkpoint) => StateSource::Checkpoint,
            Ok(v1::StateSource::Unspecified) | Err(_) => return Err(unknown("source", wire.source)),
        };
        Ok(Self::Start(StartReport {
            worker: WorkerId(wire.worker_id),
            generation: Generation(wire.generation),
            first_step: Step(wire.first_step),
            source,
        }))
    }
}

impl TryFrom<v1::HeartbeatRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::HeartbeatRequest) -> FieldResult<Self> {
        let incarnation = name("incarnation", wire.incarnation.clone())?.into();
        beat(&wire, incarnation, Duration::ZERO).map(Self::Heartbeat)
    }
}

/// The sign of life of this process, which it gave so long ago.
pub fn beat(wire: &v1::HeartbeatRequest, incarnation: Arc<str>, age: Duration) -> FieldResult<Beat> {
    Ok(Beat {
        phase: phase("phase", wire.phase)?,
        worker: WorkerId(wire.worker_id),
        incarnation,
        age,
        generation: Generation(wire.generation),
        step: Step(wire.step),
        collective: (wire.collective_entered, wire.collective_finished),
        memory_in_use: Bytes(count("memory_in_use", wire.memory_in_use)?),
        still: Duration::from_millis(wire.still_ms),
        in_phase: Duration::from_millis(wire.in_phase_ms),
        paces: paces(&wire.paces)?,
        waits: wire.waits_for_coordinator,
    })
}

/// Lists with an entry for each phase are no longer than this.
const PHASES: usize = v1::WorkerPhase::Done as usize;

fn paces(wire: &[v1::PhasePace]) -> FieldResult<Vec<(WorkerPhase, Duration)>> {
    at_most(PHASES, "paces", wire.len())?;
    let paces = wire.iter().enumerate();
    paces
        .map(|(i, pace)| {
            let phase = phase(&format!("paces[{i}].phase"), pace.phase)?;
            Ok((phase, Duration::from_millis(pace.longest_ms)))
        })
        .collect()
}

impl TryFrom<v1::ReportStepsRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::ReportStepsRequest) -> FieldResult<Self> {
        Ok(Self::Steps(WorkerId(wire.worker_id), step_reports(wire.steps)?))
    }
}

/// Finished steps of one worker.
pub fn step_reports(wire: Vec<v1::StepReport>) -> FieldResult<Vec<StepReport>> {
    at_most(REPORT_QUEUE, "steps", wire.len())?;
    let reports = wire.into_iter().enumerate();
    let reports =
        reports.map(|(i, step)| step_report(step).map_err(|error| error.below(format_args!("steps[{i}]"))));
    reports.collect()
}

impl TryFrom<v1::ReportMemoryRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::ReportMemoryRequest) -> FieldResult<Self> {
        let (peaks, comparison) = (peaks(wire.phases)?, wire.comparison.map(Into::into));
        Ok(Self::Memory(WorkerId(wire.worker_id), MemoryReport { peaks, comparison }))
    }
}

/// What the coordinator tells people of a rank, read back.
impl TryFrom<v1::RankMemory> for RankMemory {
    type Error = FieldError;

    fn try_from(wire: v1::RankMemory) -> FieldResult<Self> {
        let (phases, comparison) = (peaks(wire.phases)?, wire.comparison.map(Into::into));
        Ok(Self { slot: Slot(wire.rank), host: wire.host, phases, comparison })
    }
}

fn peaks(wire: Vec<v1::PhaseMemory>) -> FieldResult<Vec<PhaseMemory>> {
    at_most(PHASES, "phases", wire.len())?;
    let peaks = wire.into_iter().enumerate().map(|(i, peak)| {
        Ok(PhaseMemory {
            phase: phase(&format!("phases[{i}].phase"), peak.phase)?,
            in_use: Bytes(count("phases.peak_in_use", peak.peak_in_use)?),
            reserved: Bytes(count("phases.peak_reserved", peak.peak_reserved)?),
            driver: Bytes(count("phases.peak_driver", peak.peak_driver)?),
        })
    });
    peaks.collect()
}

impl TryFrom<v1::ReportCheckpointRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::ReportCheckpointRequest) -> FieldResult<Self> {
        let state = match v1::CheckpointState::try_from(wire.state) {
            Ok(v1::CheckpointState::Complete) => CheckpointState::Complete,
            Ok(v1::CheckpointState::Failed) => CheckpointState::Failed,
            Ok(v1::CheckpointState::Unspecified) | Err(_) => return Err(unknown("state", wire.state)),
        };
        let (path, bytes) = (name("path", wire.path)?, Bytes(count("bytes", wire.bytes)?));
        let report = CheckpointReport { step: Step(wire.step), state, path, bytes };
        Ok(Self::Checkpoint(WorkerId(wire.worker_id), report))
    }
}

impl From<v1::ReportNoteRequest> for Ask {
    fn from(wire: v1::ReportNoteRequest) -> Self {
        Self::Note {
            worker: WorkerId(wire.worker_id),
            sequence: wire.sequence,
            text: cut(wire.text, MAX_ERROR_TEXT),
            hardware: wire.hardware_fault,
        }
    }
}

impl TryFrom<v1::ReportFailureRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::ReportFailureRequest) -> FieldResult<Self> {
        let failure = wire.failure.ok_or_else(|| FieldError::new("failure", "is missing"))?;
        Ok(Self::Failure {
            run_id: name("run_id", wire.run_id)?,
            worker: wire.worker_id.map(WorkerId),
            failure: self::failure(failure).map_err(|error| error.below("failure"))?,
            sample: wire.bad_sample.map(bad_sample).transpose().map_err(|error| error.below("bad_sample"))?,
        })
    }
}

fn bad_sample(wire: v1::BadSample) -> FieldResult<BadSample> {
    let v1::DamagedRow { row, begin, end } = wire.row.ok_or_else(|| FieldError::new("row", "is missing"))?;
    if begin >= end {
        return Err(FieldError::new(
            "row",
            format!("its samples begin at {begin}, but end at {end}: the end must be larger"),
        ));
    }
    if end - begin > MAX_SAMPLES_OF_ROW {
        let problem =
            format!("{} samples depend on this row; the maximum is {MAX_SAMPLES_OF_ROW}", end - begin);
        return Err(FieldError::new("row", problem));
    }
    Ok(BadSample { epoch: wire.epoch, position: wire.position, row: DamagedRow { row, begin, end } })
}

impl From<v1::LeaveRequest> for Ask {
    fn from(wire: v1::LeaveRequest) -> Self {
        Self::Leave {
            worker: WorkerId(wire.worker_id),
            exit_code: wire.exit_code,
            reason: cut(wire.reason, MAX_ERROR_TEXT),
        }
    }
}

impl TryFrom<v1::ReportExitRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::ReportExitRequest) -> FieldResult<Self> {
        let ended = match wire.ended {
            Some(v1::report_exit_request::Ended::ExitCode(code)) => ProcessExit::Code(code),
            Some(v1::report_exit_request::Ended::Signal(9)) if wire.out_of_memory => ProcessExit::OutOfMemory,
            Some(v1::report_exit_request::Ended::Signal(signal)) => ProcessExit::Signal(signal),
            None => return Err(FieldError::new("ended", "is missing")),
        };
        let pid = (wire.pid != 0).then_some(wire.pid);
        let node_id = name("node_id", wire.node_id)?;
        let sample = wire.sample.map(killing_sample).transpose().map_err(|error| error.below("sample"))?;
        Ok(Self::Exit { node_id, slot: Slot(wire.rank), pid, ended, sample })
    }
}

fn killing_sample(wire: v1::KillingSample) -> FieldResult<KillingSample> {
    let sample = wire.sample.ok_or_else(|| FieldError::new("sample", "is missing"))?;
    let sample = bad_sample(sample).map_err(|error| error.below("sample"))?;
    Ok(KillingSample { sample, generation: Generation(wire.generation) })
}

fn step_report(wire: v1::StepReport) -> FieldResult<StepReport> {
    Ok(StepReport {
        generation: Generation(wire.generation),
        step: Step(wire.step),
        epoch: wire.epoch,
        positions: positions(wire.samples)?,
        totals: Totals { loss_sum: wire.loss_sum, valid_count: wire.valid_count, grad_norm: wire.grad_norm },
        times: wire.times.map_or(Ok(StepTimes::default()), times)?,
        metrics: metrics(wire.metrics)?,
        tokens: count("tokens", wire.tokens)?,
        memory_peak: Bytes(count("memory_peak", wire.memory_peak)?),
        retries: wire.retries,
        cache_generation: wire.cache_generation,
        cache: wire.cache.map_or(Ok(CacheUse::default()), super::cache::cache_use)?,
        skipped: wire.skipped.map(skipped).transpose()?,
    })
}

fn skipped(wire: v1::SkippedStep) -> FieldResult<Skip> {
    at_most(MAX_SKIPPED_SAMPLES, "skipped.samples", wire.samples.len())?;
    Skip::try_from(wire).map_err(|cause| unknown("skipped.cause", cause))
}

fn times(wire: v1::StepTimes) -> FieldResult<StepTimes> {
    Ok(StepTimes {
        total: milliseconds("times.total_ms", wire.total_ms)?,
        data: milliseconds("times.data_ms", wire.data_ms)?,
        optimizer: milliseconds("times.optimizer_ms", wire.optimizer_ms)?,
        communication: milliseconds("times.communication_ms", wire.communication_ms)?,
    })
}

fn metrics(wire: Vec<v1::Metric>) -> FieldResult<Arc<[Metric]>> {
    at_most(MAX_METRICS, "metrics", wire.len())?;
    let metrics = wire.into_iter().enumerate().map(|(i, wire)| {
        let metric = Metric::from(wire);
        match metric.problem() {
            Some((field, problem)) => Err(FieldError::new(format!("metrics[{i}].{field}"), problem)),
            None => Ok(metric),
        }
    });
    metrics.collect()
}

fn failure(wire: v1::Failure) -> FieldResult<Failure> {
    let kind = match v1::FailureKind::try_from(wire.kind) {
        Ok(v1::FailureKind::OutOfMemory) => CauseKind::OutOfMemory,
        Ok(v1::FailureKind::PeerLost) => CauseKind::PeerLost,
        Ok(v1::FailureKind::BadInput) => CauseKind::BadInput,
        Ok(v1::FailureKind::Numeric) => CauseKind::Numeric,
        Ok(v1::FailureKind::Io) => CauseKind::Io,
        Ok(v1::FailureKind::Internal) => CauseKind::Internal,
        Ok(v1::FailureKind::Hardware) => CauseKind::Hardware,
        Ok(
            v1::FailureKind::WorkerLost
            | v1::FailureKind::Disagreement
            | v1::FailureKind::Rendezvous
            | v1::FailureKind::NoProgress,
        ) => {
            return Err(FieldError::new("kind", "is set by the coordinator alone"));
        }
        Ok(v1::FailureKind::Unspecified) | Err(_) => return Err(unknown("kind", wire.kind)),
    };
    at_most(MAX_WORLD, "victims", wire.victims.len())?;
    Ok(Failure {
        kind,
        slot: wire.rank.map(Slot),
        host: short_name("host", wire.host)?,
        generation: Generation(wire.generation),
        phase: phase("phase", wire.phase)?,
        step: Step(wire.step),
        collective: wire.collective,
        positions: positions(wire.samples)?,
        memory_in_use: Bytes(wire.memory_in_use),
        message: cut(wire.message, MAX_ERROR_TEXT),
        victims: wire.victims.into_iter().map(Slot).collect(),
        fatal: false,
    })
}

fn positions(wire: Vec<v1::SampleRange>) -> FieldResult<Vec<Range<u64>>> {
    at_most(MAX_SAMPLE_RANGES, "samples", wire.len())?;
    let ranges = wire.into_iter().enumerate().map(|(i, range)| {
        if range.begin > range.end {
            let problem = format!("begins at {}, after its end {}", range.begin, range.end);
            return Err(FieldError::new(format!("samples[{i}]"), problem));
        }
        Ok(range.begin..range.end)
    });
    ranges.collect()
}

fn phase(field: &str, wire: i32) -> FieldResult<WorkerPhase> {
    if wire == i32::from(v1::WorkerPhase::Starting) {
        return Err(FieldError::new(field, "is set by the coordinator alone"));
    }
    let known = WorkerPhase::ALL.into_iter().find(|known| i32::from(v1::WorkerPhase::from(*known)) == wire);
    known.ok_or_else(|| unknown(field, wire))
}

#[cfg(test)]
mod tests;
