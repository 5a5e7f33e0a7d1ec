//! The table of cache phases: where each step of a run takes its features from, as far as that is decided.
//!
//! ```text
//! schedule   live      cached                 live      cached
//! decided              |generation 1  |2                |3              by schedule
//!                      first          asked for         |2  |2 or 3     by drift, which is measured while
//!                                                                       the old generation goes on
//! ```
//!
//! Live steps follow from the schedule alone. For a cached step it must have been decided which generation
//! serves: a [`CacheDecision`] holds from its step on, to the next one or to the end of its cached phase;
//! where drift decides, also in the first steps of the next one, in which it is measured. What is decided
//! stays decided, also for steps that are repeated after a rollback: a step takes the same cache phase
//! whenever it is run. Pure: the coordinator owns one and journals what is decided; a worker without a
//! coordinator owns one, too.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{CachePhaseKind, CacheSchedule, Decision, Drift, decide};
use crate::{
    ids::Step,
    limits::MAX_CACHE_PHASES,
    plan::Plan,
    run_spec::{Cache, CacheMode},
};

/// A generation of the cache: which, and since when its adapter is what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CacheGeneration {
    /// Counts from 1.
    pub number: u64,
    /// Adapter is the one before this step.
    pub since: Step,
}

/// Where a step's features come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepCachePhase {
    /// Computed in the step; everything trains.
    Live {
        /// The generation that served last, against which drift is measured when the live phase is over.
        kept: Option<CacheGeneration>,
    },
    /// Taken from this generation.
    Cached(CacheGeneration),
}

impl StepCachePhase {
    /// The number of the generation that serves; 0 in a live step.
    pub fn number(&self) -> u64 {
        match self {
            Self::Live { .. } => 0,
            Self::Cached(generation) => generation.number,
        }
    }
}

/// Why a generation serves from a step on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// There was none before.
    First,
    /// The schedule says so: every cached phase has its own.
    Schedule,
    /// The features have moved by more than the threshold.
    Moved {
        /// Relative L2 of the probes.
        drift: f64,
        /// What it was held against.
        threshold: f64,
    },
    /// They have not: the generation goes on.
    Stayed {
        /// Relative L2 of the probes.
        drift: f64,
        /// What it was held against.
        threshold: f64,
    },
    /// How far they have moved is not known.
    Unmeasured,
    /// The adapter of the old generation cannot be had any more.
    Lost,
    /// It was asked for.
    Asked,
}

/// From a step on, a generation serves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheDecision {
    /// From this step on.
    pub first: Step,
    /// Which one.
    pub generation: CacheGeneration,
    /// Why.
    pub why: Cause,
}

impl CacheDecision {
    /// Whether the generation begins here; else an older one goes on.
    pub fn begins(&self) -> bool {
        self.first == self.generation.since
    }
}

/// What is known when it is decided about a cached phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evidence {
    /// How far the features have moved, if it was measured.
    pub drift: Option<Drift>,
    /// The old generation's adapter cannot be had any more.
    pub lost: bool,
    /// A measurement is no longer waited for.
    pub given_up: bool,
}

/// The table of cache phases of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct CachePhaseTable {
    cache: Cache,
    schedule: Option<CacheSchedule>,
    decided: BTreeMap<Step, CacheDecision>,
    newest: u64,
}

impl CachePhaseTable {
    /// An empty table. Without a plan, which the first worker brings, a periodic schedule in epochs is not
    /// known yet: all is live.
    pub fn new(cache: &Cache, plan: Option<&Plan>) -> Self {
        let schedule = plan.and_then(|plan| CacheSchedule::new(cache, plan));
        Self { cache: cache.clone(), schedule, decided: BTreeMap::new(), newest: 0 }
    }

    /// The plan is known now.
    pub fn planned(&mut self, plan: &Plan) {
        self.schedule = CacheSchedule::new(&self.cache, plan);
    }

    /// The cache phase of a step; none if it is not decided yet.
    pub fn cache_phase(&self, step: Step) -> Option<StepCachePhase> {
        match (self.cache.mode, &self.schedule) {
            (CacheMode::Exact, _) => {
                Some(StepCachePhase::Cached(CacheGeneration { number: 1, since: Step(0) }))
            }
            (CacheMode::Off, _) | (CacheMode::Periodic, None) => Some(StepCachePhase::Live { kept: None }),
            (CacheMode::Periodic, Some(schedule)) => match schedule.cache_phase(step) {
                CachePhaseKind::Live => {
                    Some(StepCachePhase::Live { kept: self.before(step).map(|decided| decided.generation) })
                }
                CachePhaseKind::Cached => self.serving(schedule, step).map(StepCachePhase::Cached),
            },
        }
    }

    /// The first step after `step` that may take another cache phase; saturates at `u64::MAX`.
    pub fn end(&self, step: Step) -> Step {
        let Some(schedule) = &self.schedule else { return Step(u64::MAX) };
        let decided = self.decided.range(Step(step.0.saturating_add(1))..).next().map(|(first, _)| *first);
        let change = self.goes_on_until(schedule, step).unwrap_or_else(|| schedule.next_change(step));
        decided.map_or(change, |first| first.min(change))
    }

    /// The first step of `from..until` whose cache phase is not decided.
    pub fn undecided(&self, from: Step, until: Step) -> Option<Step> {
        let mut step = from;
        while step < until {
            if self.cache_phase(step).is_none() {
                return Some(step);
            }
            step = self.end(step);
        }
        None
    }

    /// Whether, at `at`, it depends on a measurement whether a generation begins.
    pub fn asks_for_drift(&self, at: Step) -> bool {
        let here = self.schedule.is_some_and(|schedule| schedule.decides_at(at));
        here && self.drift_decides() && self.before(at).is_some()
    }

    /// Decides about the cached steps from `at` on; nothing if that has to wait for a measurement, or is
    /// decided.
    pub fn decide(&mut self, at: Step, evidence: &Evidence) -> Option<CacheDecision> {
        if self.cache_phase(at).is_some() {
            return None;
        }
        let before = self.before(at).copied();
        let restless = before.is_some_and(|before| matches!(before.why, Cause::Moved { .. }));
        let above = self.cache.rebuild_above.unwrap_or(0.0);
        let threshold = if restless { self.cache.rebuild_below.unwrap_or(above) } else { above };
        let why = match (&before, evidence.drift) {
            (None, _) => Cause::First,
            (Some(_), _) if evidence.lost => Cause::Lost,
            (Some(_), _) if self.cache.rebuild_above.is_none() => Cause::Schedule,
            (Some(_), None) if evidence.given_up || !self.asks_for_drift(at) => Cause::Unmeasured,
            (Some(_), None) => return None,
            (Some(_), Some(drift)) if !drift.relative_l2.is_finite() => Cause::Unmeasured,
            (Some(_), Some(drift)) => match decide(&self.cache, Some(&drift), restless) {
                Decision::Keep => Cause::Stayed { drift: drift.relative_l2, threshold },
                Decision::Rebuild => Cause::Moved { drift: drift.relative_l2, threshold },
            },
        };
        let generation = match (why, before) {
            (Cause::Stayed { .. }, Some(before)) => before.generation,
            _ => CacheGeneration { number: self.newest + 1, since: at },
        };
        let decided = CacheDecision { first: at, generation, why };
        self.insert(decided);
        Some(decided)
    }

    /// A user asks for a new generation: it begins at `from`, the first step that no rank can have run, or
    /// with the next cached phase. One that was asked for and has not begun by `committed`, or that begins
    /// there anyway, is the answer again. The answer, and whether it is news; nothing if no cached step is
    /// left before `total`. After a rollback `committed` and `from` are those of before: steps that are
    /// repeated take the cache phases they took. What was decided last is not passed over either, whether or
    /// not a rank has run it.
    pub fn ask(&mut self, committed: Step, from: Step, total: Step) -> Option<(CacheDecision, bool)> {
        let schedule = self.schedule?;
        let newest = self.decided.keys().next_back().copied().unwrap_or_default();
        let from = from.max(newest);
        let asked = |decided: &&CacheDecision| decided.why == Cause::Asked;
        if let Some(pending) = self.decided.range(committed..).map(|(_, decided)| decided).find(asked) {
            return Some((*pending, false));
        }
        let at = match schedule.cache_phase(from) {
            CachePhaseKind::Cached => from,
            CachePhaseKind::Live => schedule.next_change(from),
        };
        if at >= total {
            return None;
        }
        if let Some(planned) = self.decided.get(&at).filter(|decided| decided.begins()) {
            return Some((*planned, false));
        }
        let generation = CacheGeneration { number: self.newest + 1, since: at };
        let decided = CacheDecision { first: at, generation, why: Cause::Asked };
        self.insert(decided);
        Some((decided, true))
    }

    /// Takes over what was decided. Whatever was decided for later steps is void.
    pub fn insert(&mut self, decided: CacheDecision) {
        self.decided.split_off(&decided.first);
        self.decided.insert(decided.first, decided);
        self.newest = self.newest.max(decided.generation.number);
        if self.decided.len() > MAX_CACHE_PHASES {
            self.decided.pop_first();
        }
    }

    /// Numbers up to this one are used.
    pub fn used(&mut self, number: u64) {
        self.newest = self.newest.max(number);
    }

    /// All that is decided, in order.
    pub fn decided(&self) -> impl Iterator<Item = &CacheDecision> {
        self.decided.values()
    }

    /// Whether `step` begins a phase of another kind than the step before it.
    pub fn changes_at(&self, step: Step) -> bool {
        let Some(schedule) = &self.schedule else { return step == Step(0) };
        step.0
            .checked_sub(1)
            .is_none_or(|before| schedule.cache_phase(Step(before)) != schedule.cache_phase(step))
    }

    /// The newest decision for steps before `step`.
    pub fn before(&self, step: Step) -> Option<&CacheDecision> {
        self.decided.range(..step).next_back().map(|(_, decided)| decided)
    }

    /// What serves a cached step: what was decided for its phase, or what served before, while drift is
    /// measured.
    fn serving(&self, schedule: &CacheSchedule, step: Step) -> Option<CacheGeneration> {
        let newest = self.decided.range(..=step).next_back().map(|(_, decided)| decided)?;
        let decided = schedule.cached_since(step) <= newest.first;
        (decided || self.goes_on_until(schedule, step).is_some()).then_some(newest.generation)
    }

    /// Where it is decided about a cached step's phase, if the generation before goes on until then.
    fn goes_on_until(&self, schedule: &CacheSchedule, step: Step) -> Option<Step> {
        if !self.drift_decides() || schedule.cache_phase(step) == CachePhaseKind::Live {
            return None;
        }
        let begins = schedule.cached_since(step);
        let newest = self.decided.range(..=step).next_back().map(|(first, _)| *first)?;
        Some(schedule.decided_at(begins)).filter(|at| newest < begins && step < *at)
    }

    /// Whether it depends on drift whether a generation begins.
    fn drift_decides(&self) -> bool {
        self.cache.rebuild_above.is_some()
    }
}

#[cfg(test)]
mod tests;
