//! Reports as messages of the contract. This way round it cannot fail; back it can, and the reader's errors
//! name the field.

use std::time::Duration;

use super::{
    CacheUse, CheckpointState, Merge, Metric, PhaseMemory, Skip, SkipCause, StateSource, StepReport,
    StepTimes, WorkerPhase,
};
use crate::{ids::Bytes, limits::MAX_SKIPPED_SAMPLES, v1};

impl From<WorkerPhase> for v1::WorkerPhase {
    fn from(phase: WorkerPhase) -> Self {
        match phase {
            WorkerPhase::Starting => Self::Starting,
            WorkerPhase::Joining => Self::Joining,
            WorkerPhase::Loading => Self::Loading,
            WorkerPhase::Connecting => Self::Connecting,
            WorkerPhase::Data => Self::Data,
            WorkerPhase::Forward => Self::Forward,
            WorkerPhase::Backward => Self::Backward,
            WorkerPhase::Communication => Self::Communication,
            WorkerPhase::Optimizer => Self::Optimizer,
            WorkerPhase::Checkpoint => Self::Checkpoint,
            WorkerPhase::CacheBuild => Self::CacheBuild,
            WorkerPhase::Evaluation => Self::Evaluation,
            WorkerPhase::Paused => Self::Paused,
            WorkerPhase::Done => Self::Done,
        }
    }
}

impl From<StateSource> for v1::StateSource {
    fn from(source: StateSource) -> Self {
        match source {
            StateSource::Fresh => Self::Fresh,
            StateSource::Carried => Self::Carried,
            StateSource::Replica => Self::Replica,
            StateSource::Checkpoint => Self::Checkpoint,
        }
    }
}

impl From<CheckpointState> for v1::CheckpointState {
    fn from(state: CheckpointState) -> Self {
        match state {
            CheckpointState::Complete => Self::Complete,
            CheckpointState::Failed => Self::Failed,
        }
    }
}

impl From<&PhaseMemory> for v1::PhaseMemory {
    fn from(peak: &PhaseMemory) -> Self {
        let PhaseMemory { phase, in_use: Bytes(in_use), reserved, driver } = *peak;
        let phase = v1::WorkerPhase::from(phase).into();
        Self { phase, peak_in_use: in_use, peak_reserved: reserved.0, peak_driver: driver.0 }
    }
}

impl From<&StepTimes> for v1::StepTimes {
    fn from(times: &StepTimes) -> Self {
        Self {
            total_ms: ms(times.total),
            data_ms: ms(times.data),
            optimizer_ms: ms(times.optimizer),
            communication_ms: ms(times.communication),
        }
    }
}

impl From<&CacheUse> for v1::CacheUse {
    fn from(of: &CacheUse) -> Self {
        let CacheUse { hits, misses, kept, read, fill } = *of;
        Self { hits, misses, read_ms: ms(read), fill_ms: ms(fill), kept }
    }
}

impl From<&Metric> for v1::Metric {
    fn from(Metric { name, unit, value, merge }: &Metric) -> Self {
        let merge = match merge {
            Merge::Mean => v1::MetricMerge::Mean,
            Merge::Sum => v1::MetricMerge::Sum,
            Merge::Max => v1::MetricMerge::Max,
            Merge::FromRankZero => v1::MetricMerge::Same,
        };
        Self { name: name.to_string(), unit: unit.to_string(), value: *value, merge: merge.into() }
    }
}

/// What is to be checked of it, [`Metric::problem`] tells. A way to combine values that this version does not
/// have is none.
impl From<v1::Metric> for Metric {
    fn from(wire: v1::Metric) -> Self {
        let merge = match v1::MetricMerge::try_from(wire.merge) {
            Ok(v1::MetricMerge::Mean) => Merge::Mean,
            Ok(v1::MetricMerge::Sum) => Merge::Sum,
            Ok(v1::MetricMerge::Max) => Merge::Max,
            Ok(v1::MetricMerge::Same | v1::MetricMerge::Unspecified) | Err(_) => Merge::FromRankZero,
        };
        Self { name: wire.name.into(), unit: wire.unit.into(), value: wire.value, merge }
    }
}

impl From<&StepReport> for v1::StepReport {
    fn from(report: &StepReport) -> Self {
        let samples = report.positions.iter().map(|p| v1::SampleRange { begin: p.start, end: p.end });
        Self {
            generation: report.generation.0,
            step: report.step.0,
            epoch: report.epoch,
            samples: samples.collect(),
            loss_sum: report.totals.loss_sum,
            valid_count: report.totals.valid_count,
            grad_norm: report.totals.grad_norm,
            times: Some((&report.times).into()),
            metrics: report.metrics.iter().map(Into::into).collect(),
            tokens: report.tokens,
            memory_peak: report.memory_peak.0,
            cache_generation: report.cache_generation,
            retries: report.retries,
            cache: Some((&report.cache).into()),
            skipped: report.skipped.as_ref().map(Into::into),
        }
    }
}

impl From<&Skip> for v1::SkippedStep {
    fn from(Skip { cause, samples }: &Skip) -> Self {
        let cause = match cause {
            SkipCause::Loss => v1::SkipCause::Loss,
            SkipCause::Gradient => v1::SkipCause::Gradient,
            SkipCause::Asked => v1::SkipCause::Asked,
            SkipCause::Overflow => v1::SkipCause::Overflow,
            SkipCause::Spike => v1::SkipCause::Spike,
        };
        Self { cause: cause.into(), samples: samples.clone() }
    }
}

/// None if it says no cause that this version knows.
impl TryFrom<v1::SkippedStep> for Skip {
    type Error = i32;

    fn try_from(wire: v1::SkippedStep) -> Result<Self, i32> {
        let cause = match v1::SkipCause::try_from(wire.cause) {
            Ok(v1::SkipCause::Loss) => SkipCause::Loss,
            Ok(v1::SkipCause::Gradient) => SkipCause::Gradient,
            Ok(v1::SkipCause::Asked) => SkipCause::Asked,
            Ok(v1::SkipCause::Overflow) => SkipCause::Overflow,
            Ok(v1::SkipCause::Spike) => SkipCause::Spike,
            Ok(v1::SkipCause::Unspecified) | Err(_) => return Err(wire.cause),
        };
        let mut samples = wire.samples;
        samples.truncate(MAX_SKIPPED_SAMPLES);
        Ok(Self { cause, samples })
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
