//! The short-time Fourier transform, its inverse, and the gradient through the inverse.
//!
//! The conventions are `torch.stft`'s and `torch.istft`'s with `center=True`, `normalized=True` and a
//! periodic Hann window: a signal of `l` samples, reflected by `n / 2` at both ends, in `1 + l / hop` frames
//! of `n` samples and `n / 2 + 1` frequencies.
//!
//! ```text
//! X_tk = n^-1/2 sum_m w_m x_(t hop + m) e^(-2 pi i k m / n)
//! x    = sum_t w irfft(n^1/2 X_t) / sum_t w^2                       at its place, without the reflected ends
//! ```
//!
//! The inverse is linear, so its gradient is its transpose: with `g` the gradient by `x`,
//! `dX_tk = c_k n^-1/2 rfft(w g / sum_t w^2)_tk`, where `c_k` is 1 at both ends of the spectrum and 2 between
//! them, which stand for their negative frequencies, too.

use std::sync::Arc;

use realfft::{ComplexToReal, RealFftPlanner, RealToComplex, num_complex::Complex32};

/// The crate refuses buffers of other lengths than its own.
const LENGTHS: &str = "buffers made by the transform have its lengths";

/// Transforms of signals of one length.
#[derive(Clone)]
pub struct Stft {
    n_fft: usize,
    hop: usize,
    samples: usize,
    forward: Arc<dyn RealToComplex<f32>>,
    inverse: Arc<dyn ComplexToReal<f32>>,
    window: Arc<[f32]>,
    /// One over what the squared windows add up to, at the samples.
    envelope: Arc<[f32]>,
}

impl Stft {
    /// Transforms of `samples` samples (more than `n_fft / 2`), by frames of `n_fft` (even), `hop` apart (at
    /// most a quarter, so that no sample is at the foot of all its windows).
    pub fn new(n_fft: usize, hop: usize, samples: usize) -> Self {
        let angle = |m: usize| std::f64::consts::TAU * m as f64 / n_fft as f64;
        let window: Vec<f32> = (0..n_fft).map(|m| (0.5 - 0.5 * angle(m).cos()) as f32).collect();
        let mut sums = vec![0.0f32; samples + 2 * n_fft];
        for frame in 0..1 + samples / hop {
            let at = &mut sums[frame * hop..][..n_fft];
            at.iter_mut().zip(&window).for_each(|(sum, w)| *sum += w * w);
        }
        let envelope = sums[n_fft / 2..][..samples].iter().map(|sum| 1.0 / sum).collect();
        let mut planner = RealFftPlanner::new();
        let (forward, inverse) = (planner.plan_fft_forward(n_fft), planner.plan_fft_inverse(n_fft));
        Self { n_fft, hop, samples, forward, inverse, window: window.into(), envelope }
    }

    /// Frames of a signal.
    pub fn frames(&self) -> usize {
        1 + self.samples / self.hop
    }

    /// Frequencies of a frame.
    pub fn bins(&self) -> usize {
        self.n_fft / 2 + 1
    }

    /// Samples of a signal.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// The spectrum of a signal, frame by frame.
    pub fn spectrum(&self, signal: &[f32], mut each: impl FnMut(usize, &[Complex32])) {
        let (half, last) = (self.n_fft / 2, self.samples - 1);
        let reflected = |at: usize| {
            // Before the start the distance from it is the reflected place.
            let inside = at.abs_diff(half);
            signal[if inside > last { 2 * last - inside } else { inside }]
        };
        let scale = 1.0 / (self.n_fft as f32).sqrt();
        self.each_frame(reflected, |frame, spectrum| {
            spectrum.iter_mut().for_each(|value| *value *= scale);
            each(frame, spectrum);
        });
    }

    /// The signal of a spectrum `[t, k]`.
    pub fn signal(&self, spectrum: &[Complex32]) -> Vec<f32> {
        let scale = 1.0 / (self.n_fft as f32).sqrt();
        let mut padded = vec![0.0f32; self.padded()];
        let (mut values, mut scratch) = (self.inverse.make_output_vec(), self.inverse.make_scratch_vec());
        let mut input = self.inverse.make_input_vec();
        for (frame, spectrum) in spectrum.chunks_exact(self.bins()).enumerate() {
            input.copy_from_slice(spectrum);
            // The imaginary parts at both ends are taken for zero, as torch does; the crate would refuse
            // them.
            (input[0].im, input[self.n_fft / 2].im) = (0.0, 0.0);
            self.inverse.process_with_scratch(&mut input, &mut values, &mut scratch).expect(LENGTHS);
            let at = &mut padded[frame * self.hop..][..self.n_fft];
            at.iter_mut().zip(&values).zip(&*self.window).for_each(|((sum, x), w)| *sum += x * w * scale);
        }
        let inside = &padded[self.n_fft / 2..][..self.samples];
        inside.iter().zip(&*self.envelope).map(|(sum, one)| sum * one).collect()
    }

    /// The gradient by a spectrum of something whose gradient by [`Stft::signal`] of it is `slope`, frame by
    /// frame.
    pub fn backward(&self, slope: &[f32], mut each: impl FnMut(usize, &[Complex32])) {
        let half = self.n_fft / 2;
        let weighed = |at: usize| match at.checked_sub(half) {
            Some(inside) if inside < self.samples => slope[inside] * self.envelope[inside],
            _ => 0.0,
        };
        let scale = 1.0 / (self.n_fft as f32).sqrt();
        self.each_frame(weighed, |frame, spectrum| {
            for (k, value) in spectrum.iter_mut().enumerate() {
                *value *= if k == 0 || k == half { scale } else { 2.0 * scale };
            }
            each(frame, spectrum);
        });
    }

    fn padded(&self) -> usize {
        ((self.frames() - 1) * self.hop + self.n_fft).max(self.n_fft / 2 + self.samples)
    }

    /// Transforms windowed frames of what `value` says of places that begin half a frame before the signal.
    fn each_frame(&self, value: impl Fn(usize) -> f32, mut each: impl FnMut(usize, &mut [Complex32])) {
        let (mut values, mut scratch) = (self.forward.make_input_vec(), self.forward.make_scratch_vec());
        let mut spectrum = self.forward.make_output_vec();
        for frame in 0..self.frames() {
            for (m, (slot, w)) in values.iter_mut().zip(&*self.window).enumerate() {
                *slot = w * value(frame * self.hop + m);
            }
            self.forward.process_with_scratch(&mut values, &mut spectrum, &mut scratch).expect(LENGTHS);
            each(frame, &mut spectrum);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whole(stft: &Stft, signal: &[f32]) -> Vec<Complex32> {
        let mut spectrum = Vec::new();
        stft.spectrum(signal, |_, frame| spectrum.extend_from_slice(frame));
        spectrum
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn a_signal_comes_back(
            half in 2usize..40, hop in 1usize..20, more in 1usize..300, seed in any::<u32>(),
        ) {
            let (n_fft, samples) = (2 * half, half + more);
            let stft = Stft::new(n_fft, hop.min(half / 2), samples);
            let draw = |at: usize| ((seed as usize).wrapping_add(at * 7919) % 1013) as f32 / 506.0 - 1.0;
            let signal: Vec<f32> = (0..samples).map(draw).collect();
            let spectrum = whole(&stft, &signal);
            prop_assert_eq!(spectrum.len(), stft.frames() * stft.bins());
            for (found, wanted) in stft.signal(&spectrum).iter().zip(&signal) {
                prop_assert!((found - wanted).abs() < 1e-4, "{} is not {}", found, wanted);
            }
            // <signal(S), g> = <S, backward(g)>, whatever S.
            let other: Vec<Complex32> =
                (0..spectrum.len()).map(|at| Complex32::new(draw(3 * at), draw(5 * at + 1))).collect();
            let dot = |a: f32, b: f32| f64::from(a) * f64::from(b);
            let left: f64 = stft.signal(&other).iter().zip(&signal).map(|(a, b)| dot(*a, *b)).sum();
            let mut right = 0.0;
            stft.backward(&signal, |frame, gradient| {
                let values = &other[frame * stft.bins()..][..stft.bins()];
                let products = values.iter().zip(gradient).map(|(s, d)| dot(s.re, d.re) + dot(s.im, d.im));
                right += products.sum::<f64>();
            });
            prop_assert!((left - right).abs() < 1e-3 * (1.0 + left.abs()), "{} is not {}", left, right);
        }
    }
}
