//! The feature cache on the wire, both ways.

use coxswain_proto::{
    cache_plan::{CacheDrift, CacheReport, CacheUse, Drift},
    ids::{Bytes, Step, WorkerId},
    run_spec::CacheMode,
    v1,
};

use super::fields::{FieldError, FieldResult, count, milliseconds};
use crate::{
    core::{
        action::{CacheKey, LeaseCachePhase},
        cache::{GenerationEntry, GenerationState},
        event::Ask,
        news::CacheNews,
        status::CacheStatus,
    },
    log::{cache_line, why},
};

impl TryFrom<v1::ReportCacheRequest> for Ask {
    type Error = FieldError;

    fn try_from(wire: v1::ReportCacheRequest) -> FieldResult<Self> {
        let report = wire.report.ok_or_else(|| FieldError::new("report", "is missing"))?;
        let report = self::report(report).map_err(|error| error.below("report"))?;
        Ok(Self::Cache(WorkerId(wire.worker_id), report))
    }
}

fn report(wire: v1::CacheReport) -> FieldResult<CacheReport> {
    if wire.generation == 0 {
        return Err(FieldError::new("generation", "is 0, but generations of the cache count from 1"));
    }
    if wire.stored > wire.total {
        let problem = format!("is {}, but there are only {} samples", wire.stored, wire.total);
        return Err(FieldError::new("stored", problem));
    }
    if wire.namespace.len() > MAX_NAMESPACE {
        return Err(FieldError::new("namespace", format!("is longer than {MAX_NAMESPACE} bytes")));
    }
    Ok(CacheReport {
        generation: wire.generation,
        namespace: wire.namespace,
        stored: wire.stored,
        total: count("total", wire.total)?,
        bytes: Bytes(count("bytes", wire.bytes)?),
        fill_batch: wire.fill_batch,
        damaged: count("damaged", wire.damaged)?,
        drift: wire.drift.map(drift).transpose()?,
        lost: wire.stale_unavailable,
    })
}

/// The name of a directory is half of this.
const MAX_NAMESPACE: usize = 64;

/// A loss that is not a number is told as it is; so is a drift, which then decides for a new generation.
fn drift(wire: v1::CacheDrift) -> FieldResult<CacheDrift> {
    if wire.relative_l2 < 0.0 {
        return Err(FieldError::new(
            "drift.relative_l2",
            format!("is {}, but a norm is never negative", wire.relative_l2),
        ));
    }
    let v1::CacheDrift { at_step, relative_l2, cosine, loss_fresh, loss_cached, probes } = wire;
    let drift = Drift { relative_l2, cosine, loss_fresh, loss_cached };
    Ok(CacheDrift { at: Step(at_step), drift, probes })
}

/// What the cache did for one rank in one step.
pub fn cache_use(wire: v1::CacheUse) -> FieldResult<CacheUse> {
    let v1::CacheUse { hits, misses, kept, read_ms, fill_ms } = wire;
    Ok(CacheUse {
        hits: count("cache.hits", hits)?,
        misses: count("cache.misses", misses)?,
        kept: count("cache.kept", kept)?,
        read: milliseconds("cache.read_ms", read_ms)?,
        fill: milliseconds("cache.fill_ms", fill_ms)?,
    })
}

/// Where the steps of a lease take their features from.
pub fn cache_phase(cache_phase: LeaseCachePhase) -> v1::CachePhase {
    let generation = |key: CacheKey| v1::CacheGeneration {
        number: key.generation.number,
        since_step: key.generation.since.0,
        namespace: key.namespace.unwrap_or_default(),
    };
    match cache_phase {
        LeaseCachePhase::Live { kept } => v1::CachePhase { serving: None, kept: kept.map(generation) },
        LeaseCachePhase::Cached(key) => v1::CachePhase { serving: Some(generation(key)), kept: None },
    }
}

/// News of the cache.
pub fn changed(news: &CacheNews) -> v1::CacheChanged {
    let (generation, step) = match news {
        CacheNews::Decided(decided) => (decided.generation.number, decided.first),
        CacheNews::Live(step, kept) => (kept.unwrap_or(0), *step),
        CacheNews::Reported(entry, _) => (entry.number, entry.since),
        CacheNews::Drift(entry) => (entry.generation, entry.at),
    };
    v1::CacheChanged { generation, step: step.0, what: cache_line(news) }
}

/// The cache at one moment.
pub fn status(status: CacheStatus) -> v1::CacheStatus {
    let mode = match status.mode {
        CacheMode::Off => v1::CacheMode::Off,
        CacheMode::Exact => v1::CacheMode::Exact,
        CacheMode::Periodic => v1::CacheMode::Periodic,
    };
    let drifts = status.drifts.into_iter().map(|(entry, then)| v1::CacheDriftRecord {
        generation: entry.generation,
        drift: Some(v1::CacheDrift {
            at_step: entry.at.0,
            relative_l2: entry.drift.relative_l2,
            cosine: entry.drift.cosine,
            loss_fresh: entry.drift.loss_fresh,
            loss_cached: entry.drift.loss_cached,
            probes: entry.probes,
        }),
        then: then.map_or(0, |decided| decided.generation.number),
        why: then.map_or_else(String::new, |decided| why(&decided.why)),
    });
    v1::CacheStatus {
        mode: mode.into(),
        tap: status.tap.to_string(),
        serving: status.serving,
        cache_phase_ends: status.cache_phase_ends.map(|step| step.0),
        waits_at: status.waits_at.map(|step| step.0),
        generations: status.generations.iter().map(|(entry, state)| generation(entry, *state)).collect(),
        drifts: drifts.collect(),
    }
}

fn generation(entry: &GenerationEntry, state: GenerationState) -> v1::CacheGenerationRecord {
    let state = match state {
        GenerationState::Building => v1::CacheState::Building,
        GenerationState::Complete => v1::CacheState::Complete,
        GenerationState::Retired => v1::CacheState::Retired,
    };
    v1::CacheGenerationRecord {
        number: entry.number,
        since_step: entry.since.0,
        state: state.into(),
        stored: entry.stored_so_far(),
        total: entry.total,
        bytes: entry.bytes.0,
        hits: entry.used.hits,
        misses: entry.used.misses,
        damaged: entry.damaged,
        fill_batch: entry.fill_batch,
        namespace: entry.namespace.clone().unwrap_or_default(),
        why: entry.why.as_ref().map_or_else(String::new, why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(report: v1::CacheReport) -> Result<Ask, String> {
        Ask::try_from(v1::ReportCacheRequest { worker_id: 1, report: Some(report) })
            .map_err(|error| error.to_string())
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_field() {
        let none = v1::CacheReport::default();
        assert_eq!(
            asked(none).unwrap_err(),
            "report.generation: is 0, but generations of the cache count from 1"
        );
        let surplus = v1::CacheReport { generation: 1, stored: 5, total: 4, ..Default::default() };
        assert_eq!(asked(surplus).unwrap_err(), "report.stored: is 5, but there are only 4 samples");
        let drift = Some(v1::CacheDrift { relative_l2: -0.5, ..Default::default() });
        let negative = v1::CacheReport { generation: 1, drift, ..Default::default() };
        assert!(asked(negative).unwrap_err().starts_with("report.drift.relative_l2: is -0.5"));
        let missing = Ask::try_from(v1::ReportCacheRequest::default()).unwrap_err();
        assert_eq!(missing.to_string(), "report: is missing");
    }

    #[test]
    fn times_that_are_no_times_are_refused() {
        let wire = v1::CacheUse { fill_ms: f64::NAN, ..Default::default() };
        assert!(cache_use(wire).unwrap_err().to_string().starts_with("cache.fill_ms: NaN ms"));
    }
}
