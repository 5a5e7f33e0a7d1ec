//! What the first step of a process on a GPU took beyond the ones after it: kernels are compiled, and
//! matmuls tuned.
//!
//! It is told apart, so that a short run's speed is a long run's.

use std::time::Duration;

use coxswain_proto::human;

/// Steps after the first that it is held against: their median.
const COMPARED: usize = 4;
/// What is worth a line: a first step that took so many times as long as the others.
const WORTH_TELLING: u32 = 2;

/// The first steps of this process.
#[derive(Clone, Debug, Default)]
pub(in crate::train) struct WarmUp {
    first: Option<Duration>,
    later: Vec<Duration>,
}

impl WarmUp {
    /// A step took this long. Returns what a log should say about the first, once it can be told.
    pub(in crate::train) fn add(&mut self, step: Duration) -> Option<String> {
        let Some(first) = self.first else {
            self.first = Some(step);
            return None;
        };
        if self.later.len() == COMPARED {
            return None;
        }
        self.later.push(step);
        let usual = self.usual().filter(|_| self.later.len() == COMPARED)?;
        (first >= usual * WORTH_TELLING).then(|| {
            format!(
                "warm-up: the first step took {}, the next ones {}: kernels were compiled and matmuls tuned",
                human::time(first),
                human::time(usual)
            )
        })
    }

    /// The first step's time beyond the median of those after it; zero before there are any.
    pub(in crate::train) fn excess(&self) -> Duration {
        let (Some(first), Some(usual)) = (self.first, self.usual()) else { return Duration::ZERO };
        first.saturating_sub(usual)
    }

    fn usual(&self) -> Option<Duration> {
        let mut sorted = self.later.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_first_step_is_told_once_and_told_apart() {
        let mut warm_up = WarmUp::default();
        let seconds = [40, 3, 1, 2, 2, 50];
        let told: Vec<_> = seconds.iter().filter_map(|s| warm_up.add(Duration::from_secs(*s))).collect();
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].contains("the first step took 40.0 s, the next ones 2.0 s"), "{}", told[0]);
        assert_eq!(warm_up.excess(), Duration::from_secs(38));
    }

    #[test]
    fn one_step_alone_and_steps_alike_have_no_warm_up() {
        let mut warm_up = WarmUp::default();
        warm_up.add(Duration::from_secs(9));
        assert_eq!(warm_up.excess(), Duration::ZERO);
        let mut even = WarmUp::default();
        assert!((0..9).all(|_| even.add(Duration::from_secs(1)).is_none()));
        assert_eq!(even.excess(), Duration::ZERO);
    }
}
