//! The schedule of a cache that is filled anew from time to time, and the decision whether it is.

use std::ops::Range;

use crate::{
    ids::Step,
    plan::Plan,
    run_spec::{Cache, CacheMode},
};

/// Where a step's features come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachePhaseKind {
    /// Computed in the step; everything trains.
    Live,
    /// Kept; what lies below the tap rests.
    Cached,
}

/// Steps over which drift is measured at most: enough that the portions of the 32 probes that are usual are
/// no part of a step.
const MEASURING: u64 = 16;
/// Measuring takes no more than this part of a cached phase: meanwhile, where drift decides, the old features
/// serve.
const MEASURING_PART: u64 = 8;

/// The schedule of `cache.mode: periodic`, in steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSchedule {
    pub(super) interval: u64,
    pub(super) live: u64,
}

impl CacheSchedule {
    /// The schedule of a run; none if its cache has none: then all steps are alike.
    pub fn new(cache: &Cache, plan: &Plan) -> Option<Self> {
        if cache.mode != CacheMode::Periodic {
            return None;
        }
        let (interval, live) =
            (cache.interval.in_steps(plan.steps_per_epoch()), cache.live.in_steps(plan.steps_per_epoch()));
        Some(Self { interval, live })
    }

    /// Where `step` takes its features.
    pub fn cache_phase(&self, step: Step) -> CachePhaseKind {
        if step.0 % self.interval < self.live { CachePhaseKind::Live } else { CachePhaseKind::Cached }
    }

    /// Live steps before `step`.
    pub fn live_before(&self, step: Step) -> u64 {
        let live = self.live.min(self.interval);
        step.0 / self.interval * live + (step.0 % self.interval).min(live)
    }

    /// The first step after `step` whose cache phase is another than that of the step before it; saturates at
    /// `u64::MAX`.
    pub fn next_change(&self, step: Step) -> Step {
        // A live phase as long as the interval never ends.
        if self.live >= self.interval {
            return Step(u64::MAX);
        }
        let (begin, within) = (step.0 - step.0 % self.interval, step.0 % self.interval);
        Step(begin.saturating_add(if within < self.live { self.live } else { self.interval }))
    }

    /// Where the cached phase that holds `step` begins; `step` must be cached.
    pub fn cached_since(&self, step: Step) -> Step {
        Step(step.0 - step.0 % self.interval + self.live)
    }

    /// The steps of the cached phase begun at `begins` that each measure a portion of the drift since the
    /// generation before. Its first step has enough to do with the phase change, unless the phase is too
    /// short for portions.
    pub fn measured_in(&self, begins: Step) -> Range<Step> {
        match self.measuring() {
            0 => begins..Step(begins.0 + 1),
            steps => Step(begins.0 + 1)..Step(begins.0 + 1 + steps),
        }
    }

    /// The step from which on drift decides, where it does, about the features of the cached phase begun at
    /// `begins`: late enough that no rank waits for the decision. `begins` itself if the phase is too short
    /// for portions.
    pub fn decided_at(&self, begins: Step) -> Step {
        match self.measuring() {
            0 => begins,
            steps => Step(begins.0 + steps + 2),
        }
    }

    /// Whether drift decides, where it does, at `step`.
    pub fn decides_at(&self, step: Step) -> bool {
        self.cache_phase(step) == CachePhaseKind::Cached && self.decided_at(self.cached_since(step)) == step
    }

    /// Steps over which drift is measured; none if the cached phase is too short for that.
    fn measuring(&self) -> u64 {
        (self.interval.saturating_sub(self.live) / MEASURING_PART).min(MEASURING)
    }
}

/// How far the features of the probes have moved since the serving generation was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drift {
    /// Norm of the difference over the norm of the fresh features.
    pub relative_l2: f64,
    /// Cosine of fresh and kept features, mean over probes.
    pub cosine: f64,
    /// Loss per valid element with fresh features.
    pub loss_fresh: f64,
    /// Loss per valid element with kept features and the same noise.
    pub loss_cached: f64,
}

/// What happens to the generation that serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It goes on.
    Keep,
    /// A new one begins.
    Rebuild,
}

/// Whether a new generation begins. `drift` is none when there is no generation yet, or none that could be
/// compared; `restless` says whether the decision before was to rebuild because of drift (hysteresis).
pub fn decide(cache: &Cache, drift: Option<&Drift>, restless: bool) -> Decision {
    let (Some(above), Some(drift)) = (cache.rebuild_above, drift) else { return Decision::Rebuild };
    let threshold = if restless { cache.rebuild_below.unwrap_or(above) } else { above };
    // A drift that is not a number is no reason to trust the old features.
    if drift.relative_l2 <= threshold { Decision::Keep } else { Decision::Rebuild }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEDULE: CacheSchedule = CacheSchedule { interval: 10, live: 3 };

    #[test]
    fn an_interval_begins_live_and_goes_on_cached() {
        let cache_phases: Vec<_> = (0..20).map(|step| SCHEDULE.cache_phase(Step(step))).collect();
        assert_eq!(cache_phases[..3], [CachePhaseKind::Live; 3]);
        assert_eq!(cache_phases[3..10], [CachePhaseKind::Cached; 7]);
        assert_eq!(cache_phases[..10], cache_phases[10..]);
    }

    #[test]
    fn live_steps_are_counted_without_going_through_them() {
        for (interval, live) in [(10, 3), (4, 4), (7, 1), (3, 9)] {
            let schedule = CacheSchedule { interval, live };
            for step in 0..40 {
                let is_live = |step: &u64| schedule.cache_phase(Step(*step)) == CachePhaseKind::Live;
                assert_eq!(schedule.live_before(Step(step)), (0..step).filter(is_live).count() as u64);
            }
        }
    }

    #[test]
    fn the_next_change_is_where_the_cache_phase_changes() {
        for step in 0..40 {
            let next = SCHEDULE.next_change(Step(step)).0;
            assert!(next > step);
            let same =
                (step..next).all(|s| SCHEDULE.cache_phase(Step(s)) == SCHEDULE.cache_phase(Step(step)));
            assert!(
                same && SCHEDULE.cache_phase(Step(next)) != SCHEDULE.cache_phase(Step(step)),
                "after step {step}"
            );
            let before = step.checked_sub(1).map(|before| SCHEDULE.cache_phase(Step(before)));
            let begins = SCHEDULE.cache_phase(Step(step)) == CachePhaseKind::Cached
                && before == Some(CachePhaseKind::Live);
            assert_eq!(SCHEDULE.decides_at(Step(step)), begins, "too short for portions");
        }
    }

    #[test]
    fn a_live_phase_as_long_as_the_interval_never_ends() {
        let schedule = CacheSchedule { interval: 4, live: 4 };
        assert!((0..20).all(|step| schedule.cache_phase(Step(step)) == CachePhaseKind::Live
            && !schedule.decides_at(Step(step))));
        assert_eq!(schedule.next_change(Step(2)), Step(u64::MAX));
    }

    #[test]
    fn drift_is_measured_after_the_cache_phase_within_an_eighth_of_the_phase_and_decides_after_that() {
        for (interval, live, measured, decided) in
            [(10, 3, 3..4, 3), (10, 2, 3..4, 5), (120, 24, 25..37, 38), (10_000, 2000, 2001..2017, 2018)]
        {
            let schedule = CacheSchedule { interval, live };
            for round in [0, 5 * interval] {
                let begins = Step(round + live);
                let at = |step: u64| Step(round + step);
                assert_eq!(schedule.measured_in(begins), at(measured.start)..at(measured.end));
                assert_eq!(schedule.decided_at(begins), at(decided));
                assert!(
                    schedule.cache_phase(at(decided)) == CachePhaseKind::Cached
                        && schedule.decides_at(at(decided))
                );
                assert!(schedule.cached_since(at(decided)) == begins);
            }
        }
    }

    fn drift(relative_l2: f64) -> Drift {
        Drift { relative_l2, cosine: 1.0, loss_fresh: 1.0, loss_cached: 1.0 }
    }

    #[test]
    fn little_drift_keeps_a_generation_and_much_replaces_it() {
        let cache = Cache { rebuild_above: Some(0.1), rebuild_below: Some(0.05), ..Cache::default() };
        assert_eq!(decide(&cache, None, false), Decision::Rebuild);
        assert_eq!(decide(&cache, Some(&drift(0.08)), false), Decision::Keep);
        assert_eq!(decide(&cache, Some(&drift(0.08)), true), Decision::Rebuild);
        assert_eq!(decide(&cache, Some(&drift(0.05)), true), Decision::Keep);
        assert_eq!(decide(&cache, Some(&drift(f64::NAN)), false), Decision::Rebuild);
        assert_eq!(decide(&Cache::default(), Some(&drift(0.0)), false), Decision::Rebuild);
    }
}
