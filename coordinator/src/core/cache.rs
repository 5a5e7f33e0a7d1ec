//! What the coordinator knows of the feature cache: where steps take their features from, how far each
//! generation is, how far features have drifted.
//!
//! ```text
//! building ── all samples are stored ──▶ complete ── a newer generation is decided ──▶ retired
//!     └──────────────────── a newer generation is decided ─────────────────────────────▶ retired
//! ```
//!
//! A generation serves from its first step on, complete or not: what is missing is computed when it is
//! needed. So nothing here ever waits for a build; the one thing that is waited for is a measurement of
//! drift, where it decides whether a generation is kept. Cache phases, and what leases need of a generation,
//! outlive the coordinator; counts are said again by rank 0.

use std::collections::{BTreeMap, VecDeque};

use coxswain_proto::{
    cache_plan::{
        CacheDecision, CacheDrift, CacheGeneration, CachePhaseTable, CacheReport, CacheUse, Cause, Drift,
        Evidence, StepCachePhase,
    },
    ids::{Bytes, Step},
    limits::MAX_LISTED_CACHE,
    plan::Plan,
    run_spec::{Cache, CacheMode},
};
use serde::{Deserialize, Serialize};

use super::leases::{self, CacheKey, LeaseCachePhase};

/// Generations that are remembered: those that are shown, and as many before them.
pub const GENERATIONS_KEPT: usize = 2 * MAX_LISTED_CACHE;

/// The cache of one run.
#[derive(Clone, Debug)]
pub struct CacheBook {
    cache: Cache,
    cache_phases: CachePhaseTable,
    generations: BTreeMap<u64, GenerationEntry>,
    drifts: VecDeque<DriftEntry>,
    reached: HighWaterMark,
}

/// How far a run has been: before its furthest rollback, or in an earlier life of the coordinator. A rank
/// that repeats these steps takes the cache phases that were leased, so nothing new begins before their end.
/// It outlives the coordinator, and costs a record at a rollback: elsewhere the end of the leases follows
/// from the commits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HighWaterMark {
    /// Steps below this one were committed.
    pub committed: Step,
    /// Steps below this one may have been leased.
    pub leased: Step,
}

impl HighWaterMark {
    /// The further of both.
    pub fn max(self, other: Self) -> Self {
        Self { committed: self.committed.max(other.committed), leased: self.leased.max(other.leased) }
    }
}

/// One generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerationEntry {
    /// Counts from 1.
    pub number: u64,
    /// Adapter is the one before this step.
    pub since: Step,
    /// Why it was begun; none in mode `exact`, where there is no other.
    pub why: Option<Cause>,
    /// Directory in the store, once it is known.
    #[serde(rename = "space")]
    pub namespace: Option<String>,
    /// Samples whose features are stored.
    pub stored: u64,
    /// Samples in all; 0 before rank 0 has reported.
    pub total: u64,
    /// Bytes they take.
    pub bytes: Bytes,
    /// Records that were damaged, and computed again.
    pub damaged: u64,
    /// Samples of one forward pass when missing features are computed.
    pub fill_batch: u32,
    /// Adapter cannot be had any more.
    pub lost: bool,
    /// Over the committed steps that it served. Not durable.
    #[serde(skip)]
    pub used: CacheUse,
    /// Samples that were stored when that was first heard of. Not durable.
    #[serde(skip)]
    found: Option<u64>,
}

/// How far a generation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerationState {
    /// Features of some samples are missing.
    Building,
    /// Features of all samples are stored.
    Complete,
    /// A newer one serves.
    Retired,
}

/// A measurement of drift, and what followed from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriftEntry {
    /// What the features were compared with.
    pub generation: u64,
    /// The step before which it was measured.
    pub at: Step,
    /// What came out.
    pub drift: Drift,
    /// On how many probes.
    pub probes: u32,
}

/// What a report changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CacheChange {
    /// Something that outlives the coordinator.
    pub durable: bool,
    /// All samples are stored now, and were not before.
    pub completed: bool,
    /// The adapter is lost now, and was not before.
    pub lost: bool,
    /// The first report of this drift.
    pub drift: Option<DriftEntry>,
}

impl DriftEntry {
    fn new(generation: u64, measured: CacheDrift) -> Self {
        let CacheDrift { at, drift, probes } = measured;
        Self { generation, at, drift, probes }
    }
}

impl GenerationEntry {
    /// One that has just begun.
    pub fn new(number: u64, since: Step, why: Option<Cause>) -> Self {
        Self {
            number,
            since,
            why,
            namespace: None,
            stored: 0,
            total: 0,
            bytes: Bytes(0),
            damaged: 0,
            fill_batch: 0,
            lost: false,
            used: CacheUse::default(),
            found: None,
        }
    }

    /// Samples whose features are stored, as far as that is known between two reports: those that were found,
    /// and those that steps have written since. Two ranks may write the same sample, so it is bounded by what
    /// there is.
    pub fn stored_so_far(&self) -> u64 {
        let written = self.found.unwrap_or(0).saturating_add(self.used.kept);
        self.stored.max(written.min(self.total))
    }

    /// Whether the features of all samples are stored, and can be seen.
    pub fn complete(&self) -> bool {
        self.total > 0 && self.stored >= self.total
    }
}

impl CacheBook {
    /// The book of a run whose earlier lives have decided `cache_phases`, recorded `generations`, and come so
    /// far.
    pub fn new<'a>(
        cache: &Cache,
        plan: Option<&Plan>,
        cache_phases: impl Iterator<Item = &'a CacheDecision>,
        generations: impl Iterator<Item = &'a GenerationEntry>,
        reached: HighWaterMark,
    ) -> Self {
        let mut table = CachePhaseTable::new(cache, plan);
        cache_phases.for_each(|decided| table.insert(*decided));
        let mut generations: BTreeMap<_, _> =
            generations.map(|entry| (entry.number, entry.clone())).collect();
        if let Some(newest) = generations.keys().next_back() {
            table.used(*newest);
        }
        if cache.mode == CacheMode::Exact {
            generations.entry(1).or_insert_with(|| GenerationEntry::new(1, Step(0), None));
        }
        Self { cache: cache.clone(), cache_phases: table, generations, drifts: VecDeque::new(), reached }
    }

    /// As configured.
    pub fn config(&self) -> &Cache {
        &self.cache
    }

    /// Where steps take their features from.
    pub fn cache_phases(&self) -> &CachePhaseTable {
        &self.cache_phases
    }

    /// The plan is known now.
    pub fn planned(&mut self, plan: &Plan) {
        self.cache_phases.planned(plan);
    }

    /// A step's cache phase as a lease says it, and where it ends; none if it is not decided.
    pub fn lease_cache_phase(&self, step: Step) -> Option<(LeaseCachePhase, Step)> {
        let key = |generation: CacheGeneration| CacheKey {
            generation,
            namespace: self.generations.get(&generation.number).and_then(|entry| entry.namespace.clone()),
        };
        let cache_phase = match self.cache_phases.cache_phase(step)? {
            StepCachePhase::Live { kept } => LeaseCachePhase::Live { kept: kept.map(key) },
            StepCachePhase::Cached(generation) => LeaseCachePhase::Cached(key(generation)),
        };
        Some((cache_phase, self.cache_phases.end(step)))
    }

    /// Decides about the cached steps from `at` on; nothing if a drift must be waited for.
    pub fn decide(&mut self, at: Step, given_up: bool) -> Option<CacheDecision> {
        let kept = self.kept(at);
        let measured =
            self.drifts.iter().rev().find(|entry| entry.at == at && Some(entry.generation) == kept);
        let lost = kept.and_then(|kept| self.generations.get(&kept)).is_some_and(|entry| entry.lost);
        let evidence = Evidence { drift: measured.map(|entry| entry.drift), lost, given_up };
        let decided = self.cache_phases.decide(at, &evidence)?;
        self.begun(&decided);
        Some(decided)
    }

    /// Steps up to here were committed, or leased, and may be repeated. How far the run has ever been.
    pub fn reached(&mut self, reached: HighWaterMark) -> HighWaterMark {
        self.reached = self.reached.max(reached);
        self.reached
    }

    /// How far leases may reach that an earlier life of the coordinator has granted, of which so many steps
    /// are committed: what was leased was decided before.
    pub fn leased_at_most(&self, committed: Step, total: Step) -> Step {
        let end = leases::furthest(committed, total);
        self.cache_phases.undecided(committed, end).unwrap_or(end)
    }

    /// A new generation is asked for; see [`CachePhaseTable::ask`].
    pub fn ask(&mut self, committed: Step, from: Step, total: Step) -> Option<(CacheDecision, bool)> {
        let HighWaterMark { committed: reached, leased } = self.reached;
        let (decided, new) = self.cache_phases.ask(committed.max(reached), from.max(leased), total)?;
        if new {
            self.begun(&decided);
        }
        Some((decided, new))
    }

    /// The entry that a decision concerns.
    pub fn entry(&self, number: u64) -> Option<&GenerationEntry> {
        self.generations.get(&number)
    }

    /// The newest ones, oldest first.
    pub fn newest(&self) -> impl Iterator<Item = &GenerationEntry> {
        let surplus = self.generations.len().saturating_sub(MAX_LISTED_CACHE);
        self.generations.values().skip(surplus)
    }

    /// The newest measurements, oldest first.
    pub fn drifts(&self) -> impl Iterator<Item = &DriftEntry> {
        self.drifts.iter()
    }

    /// How far a generation is, when `step` is next.
    pub fn state(&self, entry: &GenerationEntry, step: Step) -> GenerationState {
        let serving = match self.cache_phases.cache_phase(step) {
            Some(StepCachePhase::Cached(generation)) => Some(generation.number),
            Some(StepCachePhase::Live { kept }) => kept.map(|kept| kept.number),
            None => self.kept(step),
        };
        match serving {
            Some(serving) if serving > entry.number => GenerationState::Retired,
            _ if entry.complete() => GenerationState::Complete,
            _ => GenerationState::Building,
        }
    }

    /// Takes a report in; nothing if no such generation was ever begun.
    pub fn apply_report(&mut self, report: CacheReport) -> Option<CacheChange> {
        let entry = self.generations.get_mut(&report.generation)?;
        let (complete, lost) = (entry.complete(), entry.lost);
        let mut changed = CacheChange::default();
        if !report.namespace.is_empty() && entry.namespace.as_deref() != Some(report.namespace.as_str()) {
            entry.namespace = Some(report.namespace);
            changed.durable = true;
        }
        entry.found.get_or_insert(report.stored);
        (entry.stored, entry.total, entry.bytes) = (report.stored, report.total, report.bytes);
        (entry.damaged, entry.fill_batch) = (report.damaged, report.fill_batch);
        entry.lost |= report.lost;
        changed.completed = entry.complete() && !complete;
        changed.lost = entry.lost && !lost;
        changed.durable |= changed.lost || entry.complete() != complete;
        let known = |drift: &DriftEntry| {
            self.drifts.iter().any(|old| (old.generation, old.at) == (drift.generation, drift.at))
        };
        let measured = report.drift.map(|drift| DriftEntry::new(report.generation, drift));
        if let Some(drift) = measured.filter(|drift| !known(drift)) {
            self.drifts.push_back(drift);
            if self.drifts.len() > MAX_LISTED_CACHE {
                self.drifts.pop_front();
            }
            changed.drift = Some(drift);
        }
        Some(changed)
    }

    /// A committed step was served.
    pub fn used(&mut self, number: u64, by_step: &CacheUse) {
        if let Some(entry) = self.generations.get_mut(&number) {
            entry.used.add(by_step);
        }
    }

    /// The generation that served last before `at`.
    fn kept(&self, at: Step) -> Option<u64> {
        self.cache_phases.before(at).map(|decided| decided.generation.number)
    }

    fn begun(&mut self, decided: &CacheDecision) {
        let number = decided.generation.number;
        if decided.begins() {
            let entry = GenerationEntry::new(number, decided.first, Some(decided.why));
            self.generations.insert(number, entry);
        }
        while self.generations.len() > GENERATIONS_KEPT {
            self.generations.pop_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(stored: u64) -> CacheReport {
        CacheReport { generation: 1, stored, total: 30, ..CacheReport::default() }
    }

    #[test]
    fn a_generation_grows_with_the_steps_that_write_it_and_never_beyond_all_samples() {
        let cache = Cache { mode: CacheMode::Exact, ..Cache::default() };
        let mut book = CacheBook::new(&cache, None, [].iter(), [].iter(), HighWaterMark::default());
        let so_far = |book: &CacheBook| book.entry(1).map(GenerationEntry::stored_so_far);
        let step = CacheUse { misses: 8, kept: 8, ..CacheUse::default() };
        book.used(1, &step);
        assert_eq!(so_far(&book), Some(0), "nobody has said yet how many samples there are");
        book.apply_report(report(2));
        assert_eq!(so_far(&book), Some(10), "two were found, and a step has written eight");
        book.used(1, &step);
        assert_eq!(so_far(&book), Some(18));
        book.apply_report(report(20));
        assert_eq!(so_far(&book), Some(20), "what rank 0 sees counts");
        book.used(1, &step);
        book.used(1, &step);
        assert_eq!(so_far(&book), Some(30), "of two ranks that write the same sample one counts");
        assert!(book.entry(1).is_some_and(|entry| !entry.complete()), "some of it cannot be seen yet");
    }
}
