//! The link's null object: a world of one, without a coordinator. It owns every sample, takes no commands
//! but its follower's, and drops its reports, but for those that decide where features come from: it keeps
//! the same table of cache phases as a coordinator would.

use coxswain_proto::{
    cache_plan::{CacheDecision, CacheGeneration, CachePhaseTable, CacheReport, Evidence, StepCachePhase},
    ids::{Generation, Rank, Step},
    plan::Plan,
    run_spec::Cache,
};

use super::{
    Assignment, CacheNamespace, CachePhase, Commands, Link, LinkError, Phase, Report, StepShare, spans,
};

/// A program that follows a world of one.
pub trait Follower {
    /// Hears where the trainer is.
    fn at(&mut self, _phase: Phase) {}

    /// Hears a report; an error ends training.
    fn report(&mut self, report: &Report) -> Result<(), LinkError>;

    /// Whether training is to finish.
    fn stops(&self) -> bool {
        false
    }
}

impl Follower for () {
    fn report(&mut self, _report: &Report) -> Result<(), LinkError> {
        Ok(())
    }
}

/// A world of one, without a coordinator.
#[derive(Clone, Debug)]
pub struct SoloLink<F = ()> {
    first_step: Step,
    cache_phases: CachePhaseTable,
    /// What was reported last of the generation that is kept.
    measured: Option<CacheReport>,
    /// Where the newest generation lies.
    namespace: (u64, String),
    follower: F,
}

impl SoloLink {
    /// Training that starts at `first_step`: 0, or the step of a checkpoint. Without a cache.
    pub fn new(first_step: Step) -> Self {
        let cache_phases = CachePhaseTable::new(&Cache::default(), None);
        Self { first_step, cache_phases, measured: None, namespace: (0, String::new()), follower: () }
    }

    /// Training with a cache. `decided` is what the checkpoint of `first_step` says was decided last: without
    /// a coordinator nothing else remembers which generation serves, or is to be compared with.
    pub fn with_cache(self, cache: &Cache, plan: &Plan, decided: Option<CacheDecision>) -> Self {
        let mut cache_phases = CachePhaseTable::new(cache, Some(plan));
        decided.into_iter().for_each(|decided| cache_phases.insert(decided));
        Self { cache_phases, ..self }
    }

    /// This link with somebody who follows it.
    pub fn followed_by<F: Follower>(self, follower: F) -> SoloLink<F> {
        let Self { first_step, cache_phases, measured, namespace, .. } = self;
        SoloLink { first_step, cache_phases, measured, namespace, follower }
    }
}

impl<F> SoloLink<F> {
    /// Decides about a step if that is possible now; with `given_up`, in any case.
    fn decide(&mut self, step: Step, given_up: bool) {
        let measured = self.measured.as_ref();
        let drift = measured.and_then(|report| report.drift).filter(|drift| drift.at == step);
        let lost = measured.is_some_and(|report| report.lost);
        let evidence = Evidence { drift: drift.map(|drift| drift.drift), lost, given_up };
        if let Some(decided) = self.cache_phases.decide(step, &evidence) {
            let number = decided.generation.number;
            tracing::info!(step = step.0, number, why = ?decided.why, "cached features of version {number} from this step on");
        }
    }

    fn leased(&self, step: Step, samples: u64) -> Option<StepShare> {
        let namespace = |generation: CacheGeneration| {
            let known = self.namespace.0 == generation.number && !self.namespace.1.is_empty();
            CacheNamespace { generation, namespace: known.then(|| self.namespace.1.clone()) }
        };
        let cache_phase = match self.cache_phases.cache_phase(step)? {
            StepCachePhase::Live { kept } => CachePhase::Live { kept: kept.map(namespace) },
            StepCachePhase::Cached(generation) => CachePhase::Cached(namespace(generation)),
        };
        Some(StepShare { slice: 0..samples, cache_phase })
    }
}

impl<F: Follower> Link for SoloLink<F> {
    fn assignment(&mut self, _why: Option<&str>) -> Result<Assignment, LinkError> {
        Ok(Assignment {
            generation: Generation(1),
            rank: Rank(0),
            world: 1,
            next: String::new(),
            quarantined: Vec::new(),
            checkpoint_step: self.first_step,
            closing: false,
            replica_distance: 1,
        })
    }

    fn has_generations(&self) -> bool {
        false
    }

    fn lease(&mut self, step: Step, samples: u64) -> Result<StepShare, LinkError> {
        self.decide(step, true);
        let undecided =
            || LinkError::Lost(format!("there is no decision about cached features for step {step}"));
        self.leased(step, samples).ok_or_else(undecided)
    }

    fn lease_ahead(&mut self, step: Step, samples: u64) -> Result<Option<StepShare>, LinkError> {
        self.decide(step, false);
        Ok(self.leased(step, samples))
    }

    fn decided(&self, step: Step) -> Option<CacheDecision> {
        self.cache_phases.before(step).copied()
    }

    fn commands(&mut self) -> Commands {
        Commands { stop: self.follower.stops(), ..Commands::default() }
    }

    fn wait_while_paused(&mut self) -> Result<(), LinkError> {
        Ok(())
    }

    fn at(&mut self, phase: Phase, step: Step) {
        spans::phase(phase, step);
        self.follower.at(phase);
    }

    fn report(&mut self, report: Report) -> Result<(), LinkError> {
        self.follower.report(&report)?;
        if let Report::Cache(report) = report {
            if !report.namespace.is_empty() && report.generation >= self.namespace.0 {
                self.namespace = (report.generation, report.namespace.clone());
            }
            self.measured = Some(report);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::{
        cache_plan::{CacheDrift, Drift},
        run_spec::{CacheMode, Span, Train},
    };

    use super::*;

    fn link(rebuild_above: Option<f64>) -> SoloLink {
        let steps = |steps| Span { epochs: None, steps: Some(steps) };
        let cache = Cache {
            mode: CacheMode::Periodic,
            interval: steps(4),
            live: steps(2),
            rebuild_above,
            ..Cache::default()
        };
        let train: Train =
            serde_json::from_value(serde_json::json!({"steps": 100, "global_batch": 4, "micro_batch": 1}))
                .expect("complete");
        SoloLink::new(Step(0)).with_cache(&cache, &Plan::new(&train, 16).expect("possible"), None)
    }

    fn cache_phases(link: &mut SoloLink, steps: std::ops::Range<u64>) -> Vec<u64> {
        let number = |step| link.lease(Step(step), 4).expect("alone").cache_phase.number();
        steps.map(number).collect()
    }

    fn drift(generation: u64, at: u64, relative_l2: f64) -> Report {
        let drift = Drift { relative_l2, cosine: 1.0, loss_fresh: 1.0, loss_cached: 1.0 };
        let drift = Some(CacheDrift { at: Step(at), drift, probes: 4 });
        Report::Cache(CacheReport { generation, drift, ..CacheReport::default() })
    }

    #[test]
    fn without_a_cache_every_step_is_live() {
        let mut link = SoloLink::new(Step(7));
        assert_eq!(link.lease(Step(7), 4), Ok(StepShare { slice: 0..4, cache_phase: CachePhase::LIVE }));
    }

    #[test]
    fn every_cached_phase_has_its_generation_if_drift_does_not_matter() {
        assert_eq!(cache_phases(&mut link(None), 0..12), [0, 0, 1, 1, 0, 0, 2, 2, 0, 0, 3, 3]);
    }

    #[test]
    fn a_step_that_depends_on_drift_is_not_leased_ahead_of_it() {
        let mut link = link(Some(0.1));
        assert_eq!(cache_phases(&mut link, 0..6), [0, 0, 1, 1, 0, 0]);
        assert_eq!(link.lease_ahead(Step(6), 4), Ok(None));
        link.report(drift(1, 6, 0.05)).expect("nobody is told");
        assert_eq!(
            link.lease_ahead(Step(6), 4).map(|leased| leased.map(|leased| leased.cache_phase.number())),
            Ok(Some(1))
        );
        assert_eq!(cache_phases(&mut link, 6..10), [1, 1, 0, 0]);
        link.report(drift(1, 10, 0.5)).expect("nobody is told");
        assert_eq!(cache_phases(&mut link, 10..12), [2, 2]);
    }

    #[test]
    fn nobody_waits_for_a_drift_that_was_not_measured() {
        let mut link = link(Some(0.1));
        assert_eq!(cache_phases(&mut link, 0..8), [0, 0, 1, 1, 0, 0, 2, 2]);
    }

    #[test]
    fn a_live_cache_phase_names_what_served_before_and_where_it_lies() {
        let mut link = link(None);
        cache_phases(&mut link, 0..4);
        let namespace = CacheReport { generation: 1, namespace: "5f".into(), ..CacheReport::default() };
        link.report(Report::Cache(namespace)).expect("nobody is told");
        let generation = CacheGeneration { number: 1, since: Step(2) };
        let kept = Some(CacheNamespace { generation, namespace: Some("5f".into()) });
        assert_eq!(link.lease(Step(4), 4).map(|leased| leased.cache_phase), Ok(CachePhase::Live { kept }));
    }

    #[test]
    fn what_a_checkpoint_remembers_goes_on_and_is_compared_with() {
        let mut before = link(Some(0.1));
        assert_eq!(cache_phases(&mut before, 0..5), [0, 0, 1, 1, 0]);
        let remembered = before.decided(Step(5));
        assert_eq!(remembered.map(|decided| decided.generation.number), Some(1));
        assert_eq!(before.decided(Step(2)), None, "the first cached phase begins at step 2");
        let mut resumed = link(Some(0.1));
        remembered.into_iter().for_each(|decided| resumed.cache_phases.insert(decided));
        assert_eq!(resumed.lease_ahead(Step(6), 4), Ok(None), "drift decides, as it did before");
        resumed.report(drift(1, 6, 0.05)).expect("nobody is told");
        assert_eq!(cache_phases(&mut resumed, 6..8), [1, 1]);
    }
}
