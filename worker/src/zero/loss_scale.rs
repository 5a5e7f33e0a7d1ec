//! Dynamic loss scaling (arXiv 1710.03740), as PyTorch's `torch.amp.GradScaler` does it.
//!
//! ```text
//! a step is taken                    one more in a row; the growth_interval-th doubles the scale
//! its gradient overflows             the scale is halved, the row begins anew, the step is left out
//! it is left out for another reason  nothing
//! ```
//!
//! Float16 has no numbers below 6e-8: gradients that are smaller are lost, unless the loss is multiplied
//! before the backward pass. What it is multiplied by must not carry the largest gradient beyond 65504, so it
//! is found by trying. Whether a gradient is finite is seen by its global norm, which is the same on all
//! ranks, so all keep the same scale without a message of their own; it is a part of the optimizer's state,
//! in checkpoints and in what a new rank is given.
//!
//! What this file does not do: scale ([`FlatGrads::scale_loss`](coxswain_nn::params::FlatGrads::scale_loss)),
//! or say what becomes of a step.

use coxswain_proto::run_spec::LossScale;

/// The largest scale is 2 to the power of this.
const MOST: u32 = 126;

/// A scale, and how it came about as far as that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleState {
    /// The scale is 2 to the power of this.
    pub exponent: u32,
    /// Steps taken in a row since it last changed.
    pub good: u32,
}

impl ScaleState {
    /// The state with numbers that come from elsewhere; none if there can be no such state.
    pub fn checked(exponent: u32, good: u32) -> Option<Self> {
        (exponent <= MOST).then_some(Self { exponent, good })
    }

    /// What the mean loss of a micro-batch is multiplied by.
    pub fn scale(self) -> f64 {
        f64::from(self.exponent).exp2()
    }

    /// Whether it cannot be halved: an overflow is none of the scale's doing any more.
    pub fn is_least(self) -> bool {
        self.exponent == 0
    }
}

/// The scale of a run, step after step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossScaler {
    growth_interval: u32,
    now: ScaleState,
    /// Before the newest step that was left out.
    before: ScaleState,
}

impl LossScaler {
    /// The scaler of a run that scales its loss; none if nothing is said of it.
    pub fn wanted(settings: &LossScale) -> Option<Self> {
        (!settings.is_unsaid()).then(|| Self::new(settings))
    }

    /// With the scale that a run begins with.
    pub fn new(settings: &LossScale) -> Self {
        let LossScale { initial, growth_interval } = settings.filled();
        let exponent = initial.map_or(0, |initial| initial.log2() as u32).min(MOST);
        let now = ScaleState { exponent, good: 0 };
        Self { growth_interval: growth_interval.unwrap_or(1).max(1), now, before: now }
    }

    /// As it is now.
    pub fn state(&self) -> ScaleState {
        self.now
    }

    /// As it was before the newest step, which was left out.
    pub fn state_before(&self) -> ScaleState {
        self.before
    }

    /// Goes on from a state.
    pub fn restore(&mut self, state: ScaleState) {
        (self.now, self.before) = (state, state);
    }

    /// A step is taken.
    pub fn taken(&mut self) {
        self.now.good += 1;
        if self.now.good >= self.growth_interval {
            self.now = ScaleState { exponent: (self.now.exponent + 1).min(MOST), good: 0 };
        }
    }

    /// A step is left out, because its gradient overflows or for another reason.
    pub fn left_out(&mut self, overflows: bool) {
        self.before = self.now;
        if overflows {
            self.now = ScaleState { exponent: self.now.exponent.saturating_sub(1), good: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What may become of a step.
    #[derive(Clone, Copy, Debug)]
    enum Outcome {
        Taken,
        Overflows,
        LeftOut,
    }

    fn outcomes() -> impl Strategy<Value = Vec<Outcome>> {
        // Most steps are taken, or nothing would ever grow.
        let outcome = prop_oneof![
            6 => Just(Outcome::Taken),
            2 => Just(Outcome::Overflows),
            1 => Just(Outcome::LeftOut)
        ];
        prop::collection::vec(outcome, 0..400)
    }

    fn apply(scaler: &mut LossScaler, outcome: Outcome) {
        match outcome {
            Outcome::Taken => scaler.taken(),
            Outcome::Overflows => scaler.left_out(true),
            Outcome::LeftOut => scaler.left_out(false),
        }
    }

    /// `torch.amp.GradScaler`'s `_amp_update_scale_`, with what is ours: bounds, and steps that are left out
    /// for another reason.
    fn by_torch(initial: f64, interval: u32, outcomes: &[Outcome]) -> (f64, u32) {
        let (mut scale, mut tracker) = (initial, 0);
        for outcome in outcomes {
            match outcome {
                Outcome::Overflows => (scale, tracker) = ((scale * 0.5).max(1.0), 0),
                Outcome::Taken => {
                    tracker += 1;
                    if tracker == interval {
                        (scale, tracker) = ((scale * 2.0).min(2f64.powi(126)), 0);
                    }
                }
                Outcome::LeftOut => {}
            }
        }
        (scale, tracker)
    }

    proptest! {
        #[test]
        fn any_order_of_overflow_and_growth_gives_the_scale_of_torch(
            exponent in 0u32..=126, interval in 1u32..12, outcomes in outcomes(),
        ) {
            let initial = f64::from(exponent).exp2();
            let mut scaler = LossScaler::new(&LossScale { initial: Some(initial), growth_interval: Some(interval) });
            for (number, &outcome) in outcomes.iter().enumerate() {
                let was = scaler.state();
                apply(&mut scaler, outcome);
                let state = scaler.state();
                prop_assert_eq!((state.scale(), state.good), by_torch(initial, interval, &outcomes[..=number]));
                prop_assert!(ScaleState::checked(state.exponent, state.good).is_some());
                prop_assert!(state.good < interval);
                if !matches!(outcome, Outcome::Taken) {
                    prop_assert_eq!(scaler.state_before(), was);
                }
            }
        }

        #[test]
        fn a_resume_anywhere_changes_nothing(
            interval in 1u32..12, outcomes in outcomes(), cut in 0usize..400,
        ) {
            let settings = LossScale { initial: None, growth_interval: Some(interval) };
            let cut = cut.min(outcomes.len());
            let (mut whole, mut first) = (LossScaler::new(&settings), LossScaler::new(&settings));
            outcomes.iter().for_each(|outcome| apply(&mut whole, *outcome));
            outcomes[..cut].iter().for_each(|outcome| apply(&mut first, *outcome));
            let mut resumed = LossScaler::new(&settings);
            resumed.restore(first.state());
            outcomes[cut..].iter().for_each(|outcome| apply(&mut resumed, *outcome));
            prop_assert_eq!(resumed.state(), whole.state());
        }
    }

    #[test]
    fn defaults_are_those_of_grad_scaler() {
        assert_eq!(LossScaler::wanted(&LossScale::default()), None);
        let mut scaler = LossScaler::new(&LossScale::default());
        assert_eq!(scaler.state().scale(), 65_536.0);
        (1..2_000).for_each(|_| scaler.taken());
        assert_eq!((scaler.state().scale(), scaler.state().good), (65_536.0, 1_999));
        scaler.taken();
        assert_eq!((scaler.state().scale(), scaler.state().good), (131_072.0, 0));
        (0..17).for_each(|_| scaler.left_out(true));
        assert!(scaler.state().is_least() && scaler.state().scale() == 1.0);
        assert_eq!(ScaleState::checked(127, 0), None);
    }
}
