//! Flow matching: noising, targets, loss and sampling, in the field's two sign conventions.
//!
//! With `A` a clean action chunk, `eps ~ N(0, I)` and `u = U^(2/3)`, which is Beta(1.5, 1) since its
//! distribution function is `u^1.5` (draws crowd towards the noisy end, as arXiv 2410.24164 proposes):
//!
//! ```text
//! NoiseAtZero (GR00T, starVLA)         NoiseAtOne (openpi, SmolVLA, LeRobot)
//! t   = 0.999 (1 - u)                  t   = 0.001 + 0.999 u
//! x_t = (1 - t) eps + t A              x_t = t eps + (1 - t) A
//! target = A - eps                     target = eps - A
//! sampling: x += v / N, t from 0 to 1  sampling: x -= v / N, t from 1 to 0
//! ```
//!
//! The two replica each other: the same draw `u` gives times `t` and `1 - t`, the same `x_t`, and opposite
//! targets.
//!
//! Action chunks are small (horizon x action values), so everything here is host arithmetic; the model sees
//! one upload of `noisy` and one of the loss gradient. Draws are keyed by (seed, step, sample, repeat) and by
//! nothing else. What this module does not do: know the network that predicts the velocity.

use crate::vla_flow::config::FlowConvention;

use coxswain_nn::rng::{Key, Purpose};

/// Both conventions stay this far from the clean end, where the time embedding of a noisy input would be
/// unused.
const MARGIN: f64 = 0.001;

/// What the draws of one micro-batch are keyed by, besides the samples themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowKeys {
    /// `run.seed`.
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Independent draws of each sample, `R`.
    pub repeats: usize,
}

/// The clean side of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct CleanActions<'a> {
    /// Sample indices, `[b]`.
    pub samples: &'a [u64],
    /// `[b, horizon, action]`.
    pub actions: &'a [f32],
    /// `[b, horizon]`, 1 where the step counts and 0 where it does not.
    pub valid: &'a [f32],
    /// Values of one action.
    pub action: usize,
    /// `[b]`, how many of them count, from the first on; the rest is padding, 0.
    pub widths: &'a [usize],
}

impl CleanActions<'_> {
    fn horizon(&self) -> usize {
        self.valid.len() / self.samples.len().max(1)
    }

    /// Elements that count towards the loss; the same for every `R`.
    pub fn valid_count(&self) -> f64 {
        let of_sample =
            |(valid, width): (&[f32], &usize)| valid.iter().filter(|&&v| v != 0.0).count() * width;
        self.valid.chunks(self.horizon().max(1)).zip(self.widths).map(of_sample).sum::<usize>() as f64
    }
}

/// A micro-batch on its way along the flow. Rows are in the order sample, repeat, action step.
#[derive(Clone, Debug, PartialEq)]
pub struct NoisyActions {
    /// Flow time of each draw, `[b, r]`.
    pub times: Vec<f32>,
    /// `x_t`, `[b, r, horizon, action]`.
    pub noisy: Vec<f32>,
    /// What the network should predict, `[b, r, horizon, action]`.
    pub target: Vec<f32>,
}

/// The loss of a micro-batch and how it changes with the prediction.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowLoss {
    /// Sum of errors over valid elements, averaged over the repeats; one per sample.
    pub per_sample: Vec<f64>,
    /// Derivative of the sum of `per_sample` by the prediction, `[b, r, horizon, action]`.
    pub gradient: Vec<f32>,
}

impl FlowLoss {
    /// The whole micro-batch's sum.
    pub fn sum(&self) -> f64 {
        self.per_sample.iter().sum()
    }
}

/// Maps a draw `u` in `[0, 1)` to a flow time: large `u` is the noisy end.
fn time(convention: FlowConvention, u: f64) -> f64 {
    match convention {
        FlowConvention::NoiseAtZero => (1.0 - MARGIN) * (1.0 - u),
        FlowConvention::NoiseAtOne => MARGIN + (1.0 - MARGIN) * u,
    }
}

/// The weight of the clean end at flow time `t`.
fn cleanness(convention: FlowConvention, t: f32) -> f32 {
    match convention {
        FlowConvention::NoiseAtZero => t,
        FlowConvention::NoiseAtOne => 1.0 - t,
    }
}

/// The sign of `A - eps` in the target.
fn sign(convention: FlowConvention) -> f32 {
    match convention {
        FlowConvention::NoiseAtZero => 1.0,
        FlowConvention::NoiseAtOne => -1.0,
    }
}

/// Draws noise and time for every sample and repeat, and places the chunks on their flows.
pub fn noise(convention: FlowConvention, keys: FlowKeys, clean: CleanActions<'_>) -> NoisyActions {
    let chunk = clean.horizon() * clean.action;
    let draws = clean.samples.len() * keys.repeats;
    let mut out = NoisyActions {
        times: Vec::with_capacity(draws),
        noisy: Vec::with_capacity(draws * chunk),
        target: Vec::with_capacity(draws * chunk),
    };
    let mut eps = vec![0.0; chunk];
    for (&sample, actions) in clean.samples.iter().zip(clean.actions.chunks_exact(chunk.max(1))) {
        for repeat in 0..keys.repeats as u32 {
            let key = |purpose| Key { seed: keys.seed, purpose, step: keys.step, sample, repeat };
            let u = f64::from(key(Purpose::FlowTime).draws().uniform()).powf(2.0 / 3.0);
            let t = time(convention, u) as f32;
            key(Purpose::FlowNoise).draws().normal(&mut eps);
            let (clean_part, sign) = (cleanness(convention, t), sign(convention));
            out.times.push(t);
            out.noisy.extend(eps.iter().zip(actions).map(|(e, a)| (1.0 - clean_part) * e + clean_part * a));
            out.target.extend(eps.iter().zip(actions).map(|(e, a)| sign * (a - e)));
        }
    }
    Padding { action: clean.action, widths: clean.widths }.blank(&mut out.noisy);
    out
}

/// Which values of actions are padding: a row of `[b, .., action]` has as many that count as its width says.
/// They are 0 wherever the network looks, in training as in sampling, whatever was drawn there.
#[derive(Clone, Copy, Debug)]
pub struct Padding<'a> {
    /// Values of one action.
    pub action: usize,
    /// `[b]`, how many of them count.
    pub widths: &'a [usize],
}

impl Padding<'_> {
    /// Sets padding to 0.
    pub fn blank(&self, values: &mut [f32]) {
        let each = values.len() / self.widths.len().max(1);
        let rows = values.chunks_mut(each.max(1)).zip(self.widths).filter(|(_, width)| **width < self.action);
        for (row, &width) in rows {
            row.chunks_mut(self.action).for_each(|action| action[width..].fill(0.0));
        }
    }
}

/// Squared error over valid elements: the sum over a sample's repeats, divided by their number.
///
/// `velocity` is the prediction in the layout of `target`. Elements that do not count have no part in the
/// loss and none in its gradient, whatever the network says there.
pub fn squared_error(velocity: &[f32], target: &[f32], clean: CleanActions<'_>) -> FlowLoss {
    error_of_valid(velocity, target, clean, |error| (error * error, 2.0 * error))
}

/// Any error over valid elements: `of` gives it and its derivative by the difference of two elements.
pub fn error_of_valid(
    predicted: &[f32],
    target: &[f32],
    clean: CleanActions<'_>,
    of: impl Fn(f64) -> (f64, f64),
) -> FlowLoss {
    assert_eq!(predicted.len(), target.len(), "the prediction has another size than the target");
    let (batch, horizon, action) = (clean.samples.len(), clean.horizon(), clean.action);
    let per_sample_len = predicted.len() / batch.max(1);
    let repeats = (per_sample_len / (horizon * action).max(1)).max(1);
    let mut loss = FlowLoss { per_sample: vec![0.0; batch], gradient: vec![0.0; predicted.len()] };
    for (row, gradient) in loss.gradient.chunks_exact_mut(action.max(1)).enumerate() {
        let (sample, step) = (row / (repeats * horizon), row % horizon);
        if clean.valid[sample * horizon + step] == 0.0 {
            continue;
        }
        let elements = row * action..row * action + clean.widths[sample];
        for ((g, p), t) in gradient.iter_mut().zip(&predicted[elements.clone()]).zip(&target[elements]) {
            let (error, derivative) = of(f64::from(p - t));
            loss.per_sample[sample] += error / repeats as f64;
            *g = (derivative / repeats as f64) as f32;
        }
    }
    loss
}

/// Where sampling starts: noise, and where a chunk goes on from the one before, that one's actions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingStart {
    /// `[b, horizon, action]`.
    pub values: Vec<f32>,
    /// `[b, horizon]`, by which part of the velocity a step moves: 0 leaves it where it starts. Without any,
    /// all steps move by all of it.
    pub strengths: Vec<f32>,
}

impl From<Vec<f32>> for SamplingStart {
    fn from(values: Vec<f32>) -> Self {
        Self { values, strengths: Vec::new() }
    }
}

/// Follows the flow from noise to actions in `steps` Euler steps. `velocity(x, t)` is the network.
pub fn sample(
    convention: FlowConvention,
    steps: usize,
    start: SamplingStart,
    mut velocity: impl FnMut(&[f32], f32) -> Vec<f32>,
) -> Vec<f32> {
    let SamplingStart { values: mut x, strengths } = start;
    let action = x.len() / strengths.len().max(1);
    for k in 0..steps {
        let progress = k as f64 / steps as f64;
        let t = match convention {
            FlowConvention::NoiseAtZero => progress,
            FlowConvention::NoiseAtOne => 1.0 - progress,
        };
        let stride = sign(convention) / steps as f32;
        let velocity = velocity(&x, t as f32);
        for (at, (x, v)) in x.iter_mut().zip(velocity).enumerate() {
            *x += stride * v * strengths.get(at / action).copied().unwrap_or(1.0);
        }
    }
    x
}

/// The noise that sampling starts from in evaluation: `[b, horizon * action]`, keyed by (seed, sample).
pub fn starting_noise(seed: u64, samples: &[u64], chunk: usize) -> Vec<f32> {
    let mut x = vec![0.0; samples.len() * chunk];
    for (&sample, x) in samples.iter().zip(x.chunks_exact_mut(chunk.max(1))) {
        Key { seed, purpose: Purpose::EvalNoise, step: 0, sample, repeat: 0 }.draws().normal(x);
    }
    x
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOTH: [FlowConvention; 2] = [FlowConvention::NoiseAtZero, FlowConvention::NoiseAtOne];

    fn keys(step: u64, repeats: usize) -> FlowKeys {
        FlowKeys { seed: 3, step, repeats }
    }

    /// Relative difference that f32 sums of a few terms may show.
    fn close(a: f32, b: f32) -> bool {
        (a - b).abs() <= 2e-5 * (1.0 + a.abs().max(b.abs()))
    }

    proptest! {
        #[test]
        fn sampling_with_the_exact_velocity_recovers_the_actions(
            pairs in prop::collection::vec((-3.0f32..3.0, -3.0f32..3.0), 1..20),
            steps in 1usize..12,
        ) {
            let (eps, actions): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
            for convention in BOTH {
                let exact = |x: &[f32], t: f32| {
                    let left = 1.0 - cleanness(convention, t);
                    x.iter().zip(&actions).map(|(x, a)| sign(convention) * (a - x) / left).collect()
                };
                let found = sample(convention, steps, eps.clone().into(), exact);
                for (found, wanted) in found.iter().zip(&actions) {
                    prop_assert!(close(*found, *wanted), "{convention:?}: {found} for {wanted}");
                }
            }
        }

        #[test]
        fn each_convention_is_the_other_one_reversed(
            actions in prop::collection::vec(-3.0f32..3.0, 12),
            step in 0u64..1000,
            repeats in 1usize..4,
        ) {
            let clean = CleanActions { samples: &[5, 9], actions: &actions, valid: &[1.0; 4], action: 3, widths: &[3; 2] };
            let [zero, one] = BOTH.map(|convention| noise(convention, keys(step, repeats), clean));
            prop_assert_eq!(zero.times.len(), 2 * repeats);
            for (a, b) in zero.times.iter().zip(&one.times) {
                prop_assert!((a + b - 1.0).abs() < 1e-6);
                prop_assert!(*a > 0.0 && *a <= 0.999 && *b >= 0.001 && *b < 1.0);
            }
            prop_assert!(zero.noisy.iter().zip(&one.noisy).all(|(a, b)| close(*a, *b)));
            prop_assert!(zero.target.iter().zip(&one.target).all(|(a, b)| *a == -b));
        }

        #[test]
        fn draws_do_not_depend_on_how_the_batch_is_split(
            actions in prop::collection::vec(-1.0f32..1.0, 24),
            cut in 1usize..4,
        ) {
            let samples = [8, 2, 77, 30];
            let of = |rows: std::ops::Range<usize>| noise(FlowConvention::NoiseAtZero, keys(6, 2), CleanActions {
                samples: &samples[rows.clone()],
                actions: &actions[rows.start * 6..rows.end * 6],
                valid: &vec![1.0; rows.len() * 2],
                action: 3,
                widths: &vec![3; rows.len()],
            });
            let (whole, first, second) = (of(0..4), of(0..cut), of(cut..4));
            prop_assert_eq!(whole.noisy, [first.noisy, second.noisy].concat());
            prop_assert_eq!(whole.times, [first.times, second.times].concat());
            prop_assert_eq!(whole.target, [first.target, second.target].concat());
        }

        #[test]
        fn the_loss_gradient_is_its_derivative(
            velocity in prop::collection::vec(-2.0f32..2.0, 16),
            target in prop::collection::vec(-2.0f32..2.0, 16),
            element in 0usize..16,
        ) {
            // Two samples, two repeats, two action steps of two values; the second step of sample 0 does not
            // count.
            let clean = CleanActions { samples: &[0, 1], actions: &[0.0; 8], valid: &[1.0, 0.0, 1.0, 1.0], action: 2, widths: &[2; 2] };
            let at = |shift: f32| {
                let mut velocity = velocity.clone();
                velocity[element] += shift;
                squared_error(&velocity, &target, clean).sum()
            };
            let slope = (at(0.5) - at(-0.5)) as f32;
            let gradient = squared_error(&velocity, &target, clean).gradient[element];
            prop_assert!(close(slope, gradient), "{slope} for {gradient}");
        }
    }

    #[test]
    fn padded_steps_have_no_part_in_loss_or_count() {
        let clean =
            CleanActions { samples: &[0], actions: &[0.0; 4], valid: &[1.0, 0.0], action: 2, widths: &[2] };
        let loss = squared_error(&[1.0, 2.0, f32::NAN, f32::NAN], &[0.0; 4], clean);
        assert_eq!(loss.per_sample, [5.0]);
        assert_eq!(loss.gradient, [2.0, 4.0, 0.0, 0.0]);
        assert_eq!(clean.valid_count(), 2.0);
    }

    #[test]
    fn padding_to_the_widest_action_has_no_part_in_input_loss_or_count() {
        // Two samples, two steps of three values; the second sample's actions have two, and its second step
        // does not count.
        let clean = CleanActions {
            samples: &[4, 9],
            actions: &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.0, 0.9, 1.0, 0.0],
            valid: &[1.0, 1.0, 1.0, 0.0],
            action: 3,
            widths: &[3, 2],
        };
        let noised = noise(FlowConvention::NoiseAtZero, keys(5, 1), clean);
        let zeros: Vec<_> = noised.noisy.iter().enumerate().filter(|(_, x)| **x == 0.0).collect();
        assert_eq!(zeros.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [8, 11]);
        let whole = noise(FlowConvention::NoiseAtZero, keys(5, 1), CleanActions { widths: &[3, 3], ..clean });
        assert_eq!((&noised.noisy[..8], &noised.times), (&whole.noisy[..8], &whole.times), "the same draws");
        let velocity = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, f32::NAN, f32::NAN, f32::NAN, f32::NAN];
        let loss = squared_error(&velocity, &[0.0; 12], clean);
        // 1 + 4 + 9 + 16 + 25 + 36, and 49 + 64.
        assert_eq!((loss.per_sample, clean.valid_count()), (vec![91.0, 113.0], 8.0));
        assert_eq!(loss.gradient, [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn repeats_are_averaged() {
        let clean =
            CleanActions { samples: &[0], actions: &[0.0; 2], valid: &[1.0], action: 2, widths: &[2] };
        let once = squared_error(&[1.0, 3.0], &[0.0; 2], clean);
        let twice = squared_error(&[1.0, 3.0, 1.0, 3.0], &[0.0; 4], clean);
        assert_eq!(once.sum(), twice.sum());
    }

    #[test]
    fn times_follow_beta_three_halves() {
        // P(u <= x) = x^1.5, so a quarter of the draws lies below 0.25^(2/3) = 0.397.
        let samples: Vec<u64> = (0..20_000).collect();
        let clean = CleanActions {
            samples: &samples,
            actions: &vec![0.0; 20_000],
            valid: &vec![1.0; 20_000],
            action: 1,
            widths: &vec![1; 20_000],
        };
        let times = noise(FlowConvention::NoiseAtOne, keys(0, 1), clean).times;
        let below = times.iter().filter(|&&t| t <= 0.001 + 0.999 * 0.25f32.powf(2.0 / 3.0)).count();
        assert!((4_800..5_200).contains(&below), "{below} of 20000 below the first quartile");
    }

    #[test]
    fn a_step_and_a_repeat_have_draws_of_their_own() {
        let clean =
            CleanActions { samples: &[4], actions: &[0.5; 6], valid: &[1.0; 2], action: 3, widths: &[3] };
        let draw = |step| noise(FlowConvention::NoiseAtZero, keys(step, 2), clean);
        let (now, later) = (draw(1), draw(2));
        assert_ne!(now.noisy[..6], now.noisy[6..]);
        assert_ne!(now.noisy, later.noisy);
        assert_eq!(now, draw(1));
    }
}
