//! Counter-based random draws: a draw is a function of its key, never of what was drawn before it.
//!
//! Every draw of training is keyed by (seed, purpose, step, sample, repeat). Splitting a micro-batch,
//! retrying after out-of-memory, another world size or a restart therefore give the same draws. ChaCha8 takes
//! the key as its seed.

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};

/// What a draw is for; keeps streams apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// Noise end of the flow.
    FlowNoise = 1,
    /// Time of the flow.
    FlowTime = 2,
    /// Initial values of a trainable tensor.
    Init = 3,
    /// Noise that sampling starts from in evaluation.
    EvalNoise = 4,
    /// Order of samples.
    Order = 5,
    /// What a task draws for a sample; `repeat` tells its streams apart.
    Task = 6,
    /// What dropout drops of a sample's rows.
    Dropout = 7,
}

/// The key of one stream of draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// `run.seed`.
    pub seed: u64,
    /// Stream.
    pub purpose: Purpose,
    /// Optimizer step, epoch, or parameter number.
    pub step: u64,
    /// Sample index in the data set; 0 where there is none.
    pub sample: u64,
    /// Which of the `repeated_noise` draws.
    pub repeat: u32,
}

/// A stream of draws.
pub struct Draws(ChaCha8Rng);

impl Key {
    /// The stream of this key.
    pub fn draws(self) -> Draws {
        let mut seed = [0u8; 32];
        seed[0..8].copy_from_slice(&self.seed.to_le_bytes());
        seed[8..16].copy_from_slice(&self.step.to_le_bytes());
        seed[16..24].copy_from_slice(&self.sample.to_le_bytes());
        seed[24..28].copy_from_slice(&self.repeat.to_le_bytes());
        seed[28..32].copy_from_slice(&(self.purpose as u32).to_le_bytes());
        Draws(ChaCha8Rng::from_seed(seed))
    }
}

impl Draws {
    /// Uniform in `[0, 1)` with 24 bits.
    pub fn uniform(&mut self) -> f32 {
        (self.0.next_u32() >> 8) as f32 * (1.0 / (1 << 24) as f32)
    }

    /// A 64-bit word.
    pub fn word(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Standard normal values by the Box-Muller transform, in f64 so that `ln` and `cos` round alike
    /// everywhere that matters.
    pub fn normal(&mut self, out: &mut [f32]) {
        for pair in out.chunks_mut(2) {
            let u = 1.0 - f64::from(self.uniform());
            let angle = std::f64::consts::TAU * f64::from(self.uniform());
            let radius = (-2.0 * u.ln()).sqrt();
            pair[0] = (radius * angle.cos()) as f32;
            if let Some(second) = pair.get_mut(1) {
                *second = (radius * angle.sin()) as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(step: u64, sample: u64) -> Key {
        Key { seed: 7, purpose: Purpose::FlowNoise, step, sample, repeat: 0 }
    }

    #[test]
    fn a_draw_depends_on_its_key_alone() {
        let (mut a, mut b, mut c) = ([0.0; 5], [0.0; 5], [0.0; 5]);
        key(3, 11).draws().normal(&mut a);
        key(4, 11).draws().normal(&mut c);
        key(3, 11).draws().normal(&mut b);
        assert_eq!(a, b);
        assert_ne!(a, c);
    }

    #[test]
    fn normal_draws_have_zero_mean_and_unit_variance() {
        let mut x = vec![0.0; 100_000];
        key(0, 0).draws().normal(&mut x);
        let n = x.len() as f64;
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let var = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
        assert!(mean.abs() < 0.02 && (var - 1.0).abs() < 0.02, "mean {mean}, variance {var}");
    }
}
