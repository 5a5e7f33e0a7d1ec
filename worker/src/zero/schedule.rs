//! The learning rate of a step: warm-up, then a cosine or the peak. A pure function of the step's number, so
//! a resumed run has nothing to restore.
//!
//! ```text
//! s < w     (s + 1) / (w + 1)                              w warm-up steps: from peak / (w + 1), as openpi
//!                                                          and LeRobot
//! cosine    m + (1 - m) (1 + cos(pi (s - w) / (T - w))) / 2       T steps in all, m = min_lr_ratio
//! constant  1
//! ```

use coxswain_nn::params::Group;
use std::collections::BTreeMap;

use coxswain_proto::run_spec::{Optimizer, Schedule};

/// A learning rate for each group of trainables, by its name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates(Vec<(String, f64)>);

impl Rates {
    /// That of a group; 0 for one that has none, which keeps it as it is.
    pub fn of(&self, group: Group) -> f64 {
        self.0.iter().find(|(name, _)| name == group.0).map_or(0.0, |(_, rate)| *rate)
    }

    /// All of them, times `factor`.
    pub fn scaled(&self, factor: f64) -> Self {
        Self(self.0.iter().map(|(name, rate)| (name.clone(), rate * factor)).collect())
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
    warmup: u64,
    total: u64,
    shape: Schedule,
    min_ratio: f64,
}

impl LearningRateSchedule {
    /// The schedule of a run of `total` steps.
    pub fn new(optimizer: &Optimizer, peak: Rates, total: u64) -> Self {
        Self {
            peak,
            warmup: optimizer.warmup_steps,
            total,
            shape: optimizer.schedule,
            min_ratio: optimizer.min_lr_ratio,
        }
    }

    /// The fraction of the peak at `step`, counted from 0. Steps beyond the end keep the last value.
    pub fn multiplier(&self, step: u64) -> f64 {
        if step < self.warmup {
            return (step + 1) as f64 / (self.warmup + 1) as f64;
        }
        match self.shape {
            Schedule::Constant => 1.0,
            Schedule::Cosine => {
                let length = self.total.saturating_sub(self.warmup).max(1);
                let progress = ((step - self.warmup) as f64 / length as f64).min(1.0);
                let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
                self.min_ratio + (1.0 - self.min_ratio) * cosine
            }
        }
    }

    /// The learning rate of each group at `step`, counted from 0.
    pub fn rates(&self, step: u64) -> Rates {
        self.peak.scaled(self.multiplier(step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a task's three groups.
    fn peak() -> Rates {
        Rates::from([("lora", 1e-4), ("expert", 5e-4), ("sensor", 2e-4)])
    }

    fn schedule(shape: Schedule, warmup_steps: u64, total: u64) -> LearningRateSchedule {
        let optimizer =
            Optimizer { schedule: shape, warmup_steps, min_lr_ratio: 0.1, ..Optimizer::default() };
        LearningRateSchedule::new(&optimizer, peak(), total)
    }

    #[test]
    fn warm_up_rises_in_equal_steps_to_the_peak() {
        let schedule = schedule(Schedule::Constant, 4, 100);
        let first: Vec<_> = (0..6).map(|step| schedule.multiplier(step)).collect();
        assert_eq!(first, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]);
    }

    #[test]
    fn the_cosine_falls_from_the_peak_through_the_middle_to_the_minimum() {
        let schedule = schedule(Schedule::Cosine, 10, 110);
        let close = |step, expected: f64| (schedule.multiplier(step) - expected).abs() < 1e-12;
        assert!(close(10, 1.0) && close(60, 0.55) && close(110, 0.1) && close(10_000, 0.1));
        assert!((10..110).all(|step| schedule.multiplier(step) > schedule.multiplier(step + 1)));
    }

    #[test]
    fn every_group_follows_the_same_curve() {
        let schedule = schedule(Schedule::Cosine, 2, 20);
        let (rates, multiplier) = (schedule.rates(7), schedule.multiplier(7));
        for group in [Group::LORA, Group("expert"), Group("sensor")] {
            assert_eq!(rates.of(group), peak().of(group) * multiplier);
        }
        assert!(rates.of(Group::LORA) > 0.0);
        assert_eq!(rates.of(Group("another")), 0.0);
    }

    #[test]
    fn a_run_shorter_than_its_warm_up_has_a_schedule() {
        let schedule = schedule(Schedule::Cosine, 10, 5);
        assert!((0..20).all(|step| (0.0..=1.0).contains(&schedule.multiplier(step))));
    }
}
