//! Losses of the newest steps that were taken, and which loss is far above them.
//!
//! ```text
//! middle      the median of the mean losses of the last 64 steps that were taken
//! deviation   the median of their distances from it, at least a thousandth of the middle
//! far         loss > middle + spike_factor * deviation
//! ```
//!
//! Medians, so that the spikes that were let in do not widen what is let in next.

use std::collections::BTreeMap;

use coxswain_proto::ids::Step;

/// Losses that are remembered.
const KEPT: usize = 64;
/// Losses without which nothing is far.
const LEAST: usize = 16;
/// The least deviation, as a share of the middle: losses that hardly differ are no reason to leave a step
/// out.
const FLOOR: f64 = 1e-3;

/// Mean losses of the newest steps that were taken.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::train) struct LossHistory(pub BTreeMap<Step, f64>);

impl LossHistory {
    /// A step was taken.
    pub fn book(&mut self, step: Step, loss: f64) {
        self.0.insert(step, loss);
        while self.0.len() > KEPT {
            self.0.pop_first();
        }
    }

    /// The run goes on with `next`, which may have been done before.
    pub fn go_back(&mut self, next: Step) {
        self.0.split_off(&next);
    }

    /// How many losses are remembered, and above which the next one is a spike; infinite where too few are.
    pub fn limit(&self, factor: f64) -> (usize, f64) {
        let losses: Vec<f64> = self.0.values().copied().collect();
        let Some(middle) = median(losses.clone()).filter(|_| losses.len() >= LEAST) else {
            return (losses.len(), f64::INFINITY);
        };
        let distances = losses.iter().map(|loss| (loss - middle).abs()).collect();
        let deviation = median(distances).unwrap_or(0.0).max(FLOOR * middle.abs());
        (losses.len(), middle + factor * deviation)
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(losses: impl IntoIterator<Item = f64>) -> LossHistory {
        let mut history = LossHistory::default();
        losses.into_iter().zip(0..).for_each(|(loss, step)| history.book(Step(step), loss));
        history
    }

    #[test]
    fn what_is_far_follows_the_middle_of_the_newest_losses_and_not_their_spikes() {
        let noisy = |step: u32| 2.0 + 0.1 * f64::from(step % 5);
        assert_eq!(history((0..15).map(noisy)).limit(10.0), (15, f64::INFINITY), "too few");
        let (kept, limit) = history((0..200).map(noisy)).limit(10.0);
        assert_eq!(kept, KEPT);
        assert!((limit - 3.2).abs() < 1e-9, "2.2, and ten times 0.1: {limit}");
        let spiked = history((0..200).map(|step| if step % 10 == 0 { 1e6 } else { noisy(step) }));
        assert!(spiked.limit(10.0).1 < 4.0, "{:?}", spiked.limit(10.0));
        let even = history([5.0; 20]);
        assert_eq!(even.limit(20.0).1, 5.1, "a thousandth, twenty times");
        assert!(history([-30.0; 20]).limit(20.0).1 < -29.0, "decibels are below 0");
    }

    #[test]
    fn steps_that_come_again_are_forgotten() {
        let mut history = history([1.0; 20]);
        history.go_back(Step(4));
        assert_eq!(history.0.len(), 4);
    }
}
