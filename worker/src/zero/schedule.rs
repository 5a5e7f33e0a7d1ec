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
//! `warmup_ratio` gives `w` as a fraction of the run's steps, rounded up, as Transformers does.

use coxswain_nn::params::Group;
use std::collections::BTreeMap;

use coxswain_proto::run_spec::{Optimizer, PerGroup, Schedule};

/// Steps after which an inverse root without warm-up has fallen to `sqrt(1/2)`.
const TIMESCALE: f64 = 10_000.0;

/// A learning rate for each group of trainables, by its name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates(Vec<(String, f64)>);

impl Rates {
    /// That of a group; 0 for one that has none, which keeps it as it is.
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
    total: u64,
    shape: Schedule,
    min_ratio: f64,
}

impl LearningRateSchedule {
    /// The schedule of a run of `total` steps.
    pub fn new(optimizer: &Optimizer, peak: Rates, total: u64) -> Self {
        Self {
            peak,
            warmup: match optimizer.warmup_ratio {
                Some(ratio) => PerGroup::All((ratio * total as f64).ceil() as u64),
                None => optimizer.warmup_steps.clone(),
            },
            total: optimizer.decay_steps.unwrap_or(total),
            shape: optimizer.schedule,
            min_ratio: optimizer.min_lr_ratio,
        }
    }

    /// The fraction of a group's peak at `step`, counted from 0. Steps beyond the end keep the last value.
    pub fn multiplier(&self, step: u64, group: &str) -> f64 {
        let warmup = self.warmup.of(group);
        if step < warmup {
            return (step + 1) as f64 / (warmup + 1) as f64;
        }
        let after = (step - warmup) as f64;
        let progress = || (after / self.total.saturating_sub(warmup).max(1) as f64).min(1.0);
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

    /// Of a task's three groups.
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
    fn a_run_shorter_than_its_warm_up_has_a_schedule() {
        let schedule = schedule(Schedule::Cosine, 10, 5);
        assert!((0..20).all(|step| (0.0..=1.0).contains(&schedule.multiplier(step, "adapter"))));
    }
}
