//! The exponential moving average (EMA) of the weights, of this rank's part.
//!
//! ```text
//! e = e + (1 - d) (w - e)                after every step that is taken, and none that is left out
//! d = ema_decay, or with ema_power p     min(ema_decay, 1 - (1 + t)^-p), t steps taken before
//! ```
//!
//! the order of operations of diffusers' `EMAModel`. The average begins with the weights that a run begins
//! with. It is a part of the state like the moments: cut like them, kept once more by the neighbour, which
//! repeats the owner's arithmetic on the owner's numbers, and saved with them. A group that rests stays, and
//! its average goes on towards it.
//!
//! A run without one holds nothing of it. It changes nothing of what is learned.

use coxswain_nn::kernels::flat::Flat;
use coxswain_proto::run_spec::Optimizer;

/// The average of one part of the flat parameter buffer.
#[derive(Clone, Debug)]
pub(super) struct Average<F: Flat> {
    pub values: F,
    decay: f64,
    power: Option<f64>,
}

impl<F: Flat> Average<F> {
    /// Without values yet, for a part of `len` elements; none if the run keeps none. `zeros` makes a buffer.
    pub fn wanted(settings: &Optimizer, zeros: impl FnOnce() -> F) -> Option<Self> {
        let decay = settings.ema_decay?;
        Some(Self { values: zeros(), decay, power: settings.ema_power })
    }

    /// How much of its way to the weights it goes after a step, `taken` with it.
    pub fn share(&self, taken: u64) -> f32 {
        let before = taken.saturating_sub(1) as f64;
        let risen = self.power.map_or(1.0, |power| 1.0 - (1.0 + before).powf(-power));
        (1.0 - self.decay.min(risen)) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(settings: &Optimizer, taken: &[u64]) -> Vec<f32> {
        let average = Average::<Vec<f32>>::wanted(settings, Vec::new).expect("it is asked for");
        taken.iter().map(|taken| average.share(*taken)).collect()
    }

    #[test]
    fn the_decay_rises_as_that_of_diffusers() {
        let settings = Optimizer { ema_decay: Some(0.999), ema_power: Some(0.75), ..Optimizer::default() };
        // EMAModel(decay=0.999, use_ema_warmup=True, power=0.75).get_decay(n) for n = 1, 2, 11, 1001, 100001.
        let decays = [0.0, 0.405_396_44, 0.834_439_97, 0.994_380_80, 0.999];
        let found = shares(&settings, &[1, 2, 11, 1_001, 100_001]);
        for (share, decay) in found.into_iter().zip(decays) {
            assert!((f64::from(share) - (1.0 - decay)).abs() < 1e-6, "{share} for {decay}");
        }
    }

    #[test]
    fn without_a_power_the_decay_is_there_from_the_first_step() {
        let settings = Optimizer { ema_decay: Some(0.75), ..Optimizer::default() };
        assert_eq!(shares(&settings, &[1, 2, 1_000]), [0.25; 3]);
        assert!(Average::<Vec<f32>>::wanted(&Optimizer::default(), Vec::new).is_none());
    }
}
