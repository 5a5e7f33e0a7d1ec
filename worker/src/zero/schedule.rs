//! The learning rate of a step: warm-up, then a cosine or the peak. A pure function of the step's number, so
//! a resumed run has nothing to restore.
//!
//! ```text
//! s < w     (s + 1) / (w + 1)                              w warm-up steps: from peak / (w + 1), as openpi
//!                                                          and LeRobot
//! cosine    m + (1 - m) (1 + cos(pi (s - w) / (T - w))) / 2       T = decay_steps, or the run's steps;
//! linear    m + (1 - m) (1 - (s - w) / (T - w))                   m = min_lr_ratio
//! inverse   max(m, sqrt(t / (s - w + t)))                         t = w, or 10,000 without a warm-up, as in
//!                                                                 Transformers
//! constant  1
//! ```
//!
//! `warmup_ratio` gives `w` as a fraction of the run's steps, rounded up, as Transformers does. A group that
//! trains in live steps alone may have `s` and `T` counted in those ([`LearningRateSchedule::over_live`]).

use std::collections::BTreeMap;

use coxswain_nn::params::Group;
use coxswain_proto::{
    cache_plan::CacheSchedule,
    ids::Step,
    run_spec::{Optimizer, PerGroup, Schedule},
};

/// Steps after which an inverse root without warm-up has fallen to `sqrt(1/2)`.
const TIMESCALE: f64 = 10_000.0;

/// A learning rate for each group of trainables, by its name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates(Vec<(String, f64)>);

impl Rates {
    /// The rate of a group; 0 for one that has none, which keeps it as it is.
    pub fn of(&self, group: Group) -> f64 {
        self.0.iter().find(|(name, _)| name == group.0).map_or(0.0, |(_, rate)| *rate)
    }

    /// Each of them, times the factor of its group.
    pub fn scaled(&self, factor: impl Fn(&str) -> f64) -> Self {
        Self(self.0.iter().map(|(name, rate)| (name.clone(), rate * factor(name))).collect())
    }
}

impl From<BTreeMap<String, f64>> for Rates {
    fn from(rates: BTreeMap<String, f64>) -> Self {
        Self(rates.into_iter().collect())
    }
}

impl<N: Into<String>, const GROUPS: usize> From<[(N, f64); GROUPS]> for Rates {
    fn from(rates: [(N, f64); GROUPS]) -> Self {
        Self(rates.into_iter().map(|(name, rate)| (name.into(), rate)).collect())
    }
}

/// Learning rates over a run.
#[derive(Clone, Debug, PartialEq)]
pub struct LearningRateSchedule {
    peak: Rates,
    warmup: PerGroup<u64>,
    warmup_ratio: Option<f64>,
    /// Steps of the run.
    total: u64,
    /// The step after which it is at its end.
    end: u64,
    shape: Schedule,
    min_ratio: f64,
    /// The group that counts its live steps alone.
    live: Option<(Group, CacheSchedule)>,
}

impl LearningRateSchedule {
    /// The schedule of a run of `total` steps.
    pub fn new(optimizer: &Optimizer, peak: Rates, total: u64) -> Self {
        Self {
            peak,
            warmup: optimizer.warmup_steps.clone(),
            warmup_ratio: optimizer.warmup_ratio,
            total,
            end: optimizer.decay_steps.unwrap_or(total),
            shape: optimizer.schedule,
            min_ratio: optimizer.min_lr_ratio,
            live: None,
        }
    }

    /// This schedule where the group counts its live steps alone, of those that there are before `step`,
    /// before the schedule's end and in the run.
    pub fn over_live(self, group: Group, schedule: CacheSchedule) -> Self {
        Self { live: Some((group, schedule)), ..self }
    }

    /// The fraction of a group's peak at `step`, counted from 0. Steps beyond the end keep the last value.
    pub fn multiplier(&self, step: u64, group: &str) -> f64 {
        let live = self.live.as_ref().filter(|(of, _)| of.0 == group);
        let count = |steps| live.map_or(steps, |(_, schedule)| schedule.live_before(Step(steps)));
        let (step, end) = (count(step), count(self.end));
        let warmup = match self.warmup_ratio {
            Some(ratio) => (ratio * count(self.total) as f64).ceil() as u64,
            None => self.warmup.of(group),
        };
        if step < warmup {
            return (step + 1) as f64 / (warmup + 1) as f64;
        }
        let after = (step - warmup) as f64;
        let progress = || (after / end.saturating_sub(warmup).max(1) as f64).min(1.0);
        let from_peak = |left: f64| self.min_ratio + (1.0 - self.min_ratio) * left;
        match self.shape {
            Schedule::Constant => 1.0,
            Schedule::Cosine => from_peak(0.5 * (1.0 + (std::f64::consts::PI * progress()).cos())),
            Schedule::Linear => from_peak(1.0 - progress()),
            Schedule::InverseSqrt => {
                let timescale = if warmup == 0 { TIMESCALE } else { warmup as f64 };
                (timescale / (after + timescale)).sqrt().max(self.min_ratio)
            }
        }
    }

    /// The learning rate of each group at `step`, counted from 0.
    pub fn rates(&self, step: u64) -> Rates {
        self.peak.scaled(|group| self.multiplier(step, group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Peak rates of a task's three groups.
    fn peak() -> Rates {
        Rates::from([("adapter", 1e-4), ("head", 5e-4), ("tail", 2e-4)])
    }

    fn schedule(shape: Schedule, warmup_steps: u64, total: u64) -> LearningRateSchedule {
        let optimizer = Optimizer {
            schedule: shape,
            warmup_steps: PerGroup::All(warmup_steps),
            min_lr_ratio: 0.1,
            ..Optimizer::default()
        };
        LearningRateSchedule::new(&optimizer, peak(), total)
    }

    #[test]
    fn warm_up_rises_in_equal_steps_to_the_peak() {
        let schedule = schedule(Schedule::Constant, 4, 100);
        let first: Vec<_> = (0..6).map(|step| schedule.multiplier(step, "adapter")).collect();
        assert_eq!(first, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]);
    }

    #[test]
    fn the_cosine_falls_from_the_peak_through_the_middle_to_the_minimum() {
        let schedule = schedule(Schedule::Cosine, 10, 110);
        let close = |step, expected: f64| (schedule.multiplier(step, "adapter") - expected).abs() < 1e-12;
        assert!(close(10, 1.0) && close(60, 0.55) && close(110, 0.1) && close(10_000, 0.1));
        assert!(
            (10..110)
                .all(|step| schedule.multiplier(step, "adapter") > schedule.multiplier(step + 1, "adapter"))
        );
    }

    #[test]
    fn the_line_falls_in_equal_steps_and_ends_where_decay_steps_says() {
        let optimizer = Optimizer {
            schedule: Schedule::Linear,
            warmup_ratio: Some(0.05),
            decay_steps: Some(25),
            min_lr_ratio: 0.0,
            ..Optimizer::default()
        };
        let schedule = LearningRateSchedule::new(&optimizer, peak(), 99);
        // 0.05 of 99 steps, rounded up, are 5; the other 20 are the line's.
        let found = [4, 5, 10, 15, 25, 60].map(|step| schedule.multiplier(step, "adapter"));
        for (found, expected) in found.into_iter().zip([5.0 / 6.0, 1.0, 0.75, 0.5, 0.0, 0.0]) {
            assert!((found - expected).abs() < 1e-12, "{found} for {expected}");
        }
    }

    #[test]
    fn the_inverse_root_is_that_of_transformers() {
        // get_inverse_sqrt_schedule: 1 / sqrt((step + shift) / timescale), shift = timescale - warmup.
        for (warmup, timescale) in [(100, 100.0), (0, 10_000.0)] {
            let schedule = schedule(Schedule::InverseSqrt, warmup, 1000);
            for step in [100, 101, 400, 5000] {
                let shift = timescale - warmup as f64;
                let expected = 1.0 / ((step as f64 + shift) / timescale).sqrt();
                assert!((schedule.multiplier(step, "adapter") - expected).abs() < 1e-12, "{step}");
            }
        }
        assert_eq!(
            schedule(Schedule::InverseSqrt, 10, 10).multiplier(1_000_000, "adapter"),
            0.1,
            "not below the minimum"
        );
    }

    #[test]
    fn every_group_follows_the_same_curve() {
        let schedule = schedule(Schedule::Cosine, 2, 20);
        let (rates, multiplier) = (schedule.rates(7), schedule.multiplier(7, "adapter"));
        for group in [Group("adapter"), Group("head"), Group("tail")] {
            assert_eq!(rates.of(group), peak().of(group) * multiplier);
        }
        assert!(rates.of(Group("adapter")) > 0.0);
        assert_eq!(rates.of(Group("another")), 0.0);
    }

    #[test]
    fn a_group_may_warm_up_for_itself() {
        let warmup_steps = PerGroup::Groups([("adapter".to_owned(), 9)].into());
        let schedule = Schedule::Constant;
        let optimizer = Optimizer { schedule, warmup_steps, ..Optimizer::default() };
        let schedule = LearningRateSchedule::new(&optimizer, peak(), 100);
        let rates = schedule.rates(4);
        assert_eq!(rates.of(Group("adapter")), 0.5 * peak().of(Group("adapter")));
        assert_eq!(rates.of(Group("head")), peak().of(Group("head")), "no warm-up is named for it");
    }

    #[test]
    fn a_group_that_trains_in_live_steps_has_the_curve_of_a_run_of_those() {
        use coxswain_proto::{
            plan::Plan,
            run_spec::{Cache, CacheMode, Span, Train},
        };
        let steps = |steps| Span { epochs: None, steps: Some(steps) };
        let cache =
            Cache { mode: CacheMode::Periodic, interval: steps(10), live: steps(3), ..Cache::default() };
        let train: Train =
            serde_json::from_value(serde_json::json!({"steps": 200, "global_batch": 4, "micro_batch": 1}))
                .expect("complete");
        let plan = Plan::new(&train, 64).expect("a plan");
        let live = CacheSchedule::new(&cache, &plan).expect("it is periodic");
        let shapes = [Schedule::Cosine, Schedule::Linear, Schedule::InverseSqrt, Schedule::Constant];
        for (shape, ratio) in shapes.into_iter().flat_map(|shape| [(shape, None), (shape, Some(0.1))]) {
            for decay_steps in [None, Some(100)] {
                let warmup_steps = PerGroup::All(if ratio.is_some() { 0 } else { 4 });
                let optimizer = Optimizer {
                    schedule: shape,
                    warmup_steps,
                    warmup_ratio: ratio,
                    decay_steps,
                    ..Optimizer::default()
                };
                let all = LearningRateSchedule::new(&optimizer, peak(), 200);
                let over_live = all.clone().over_live(Group("adapter"), live);
                // Of 200 steps 60 are live, of the first 100 thirty.
                let alone = Optimizer { decay_steps: decay_steps.map(|_| 30), ..optimizer };
                let alone = LearningRateSchedule::new(&alone, peak(), 60);
                let taken = (0..200).filter(|step| step % 10 < 3).zip(0..);
                for (step, counted) in taken {
                    let (found, due) =
                        (over_live.multiplier(step, "adapter"), alone.multiplier(counted, "adapter"));
                    assert!(
                        (found - due).abs() < 1e-15,
                        "{shape:?} {ratio:?} at step {step}: {found}, {due}"
                    );
                    assert_eq!(over_live.multiplier(step, "head"), all.multiplier(step, "head"));
                }
            }
        }
    }

    #[test]
    fn a_run_shorter_than_its_warm_up_has_a_schedule() {
        let schedule = schedule(Schedule::Cosine, 10, 5);
        assert!((0..20).all(|step| (0.0..=1.0).contains(&schedule.multiplier(step, "adapter"))));
    }
}
