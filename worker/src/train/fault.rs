//! A loss that is not a number, on purpose, for tests of what happens then.
//!
//! `COX_FAULT_LOSS="rank=1 step=3 times=1"` makes the loss of rank 1's next micro-batch NaN from step 3 on,
//! so many times. With `times=1` that is a slip of the machine, which a second attempt does not repeat; with
//! many times it is a run that has diverged. It is part of the program because the program is what is tested,
//! as `COX_FAULT_MEMORY` is. Nothing else reads the variable, and no run depends on it.

use coxswain_proto::ids::{Rank, Step};

const VARIABLE: &str = "COX_FAULT_LOSS";

/// The fault that this process was given, as far as it is still to come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct InjectedLoss {
    rank: Rank,
    from: Step,
    times: u32,
}

impl InjectedLoss {
    /// What the variable says. A value that cannot be read is said so and ignored.
    pub fn from_environment() -> Self {
        let Some(text) = std::env::var(VARIABLE).ok().filter(|text| !text.is_empty()) else {
            return Self::default();
        };
        Self::parse(&text).unwrap_or_else(|| {
            tracing::error!("{VARIABLE}={text:?} is ignored: write `rank=1 step=3 times=1`");
            Self::default()
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.split_whitespace().find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
        };
        Some(Self {
            rank: Rank(field("rank")?.parse().ok()?),
            from: Step(field("step")?.parse().ok()?),
            times: field("times")?.parse().ok()?,
        })
    }

    /// The loss of a micro-batch, or NaN in its place.
    pub fn on(&mut self, rank: Rank, step: Step, loss: f64) -> f64 {
        if self.times == 0 || rank != self.rank || step < self.from {
            return loss;
        }
        self.times -= 1;
        f64::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_for_one_rank_and_later_steps_and_ends() {
        let mut fault = InjectedLoss::parse("times=2 rank=1 step=3").expect("complete");
        let [one, two] = [Rank(1), Rank(2)];
        assert_eq!(fault.on(one, Step(2), 0.5), 0.5);
        assert_eq!(fault.on(two, Step(3), 0.5), 0.5);
        assert!(fault.on(one, Step(3), 0.5).is_nan() && fault.on(one, Step(9), 0.5).is_nan());
        assert_eq!(fault.on(one, Step(9), 0.5), 0.5);
        assert_eq!(InjectedLoss::parse("rank=1 step=3"), None);
    }
}
