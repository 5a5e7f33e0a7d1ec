//! What a micro-batch sounds like, in host memory: spectra of its mixtures, estimates by masks, losses, and
//! the gradients by masks.
//!
//! ```text
//! X   = stft(mixture)                     S^ = m X                  s^ = istft(S^)
//! L   = sum over segments of a mean |s^ - s| + b mean (|Re(S^ - S)| + |Im(S^ - S)|) / 2
//! ```
//!
//! with means over stems, channels and samples, or frames and frequencies: the loss of BSRNN (arXiv
//! 2209.15174) with weights `a` and `b`, on a spectrum of the signal's own scale. Everything between
//! masks and loss is linear but for absolute values, so the gradient is written down: signs, through the
//! inverse transform's backward, times the conjugate of `X`.
//!
//! Signals of a batch are computed side by side on the compute threads, each by itself, so that no value
//! depends on how many there are.

use coxswain_task::MicroLoss;
use rayon::prelude::*;
use realfft::num_complex::Complex32;

use super::{
    config::LossWeights,
    data::{CHANNELS, SegmentBatch},
    network::SeparatorShape,
    stft::Stft,
};

/// Added to the mean square of a band, so that silence stays what it is.
const FLOOR: f64 = 1e-8;

/// A micro-batch and the spectra of its mixtures.
pub struct Scene<'a> {
    shape: &'a SeparatorShape,
    stft: &'a Stft,
    batch: &'a SegmentBatch,
    /// `[b, channels, t, f]`.
    mixtures: Vec<Vec<Complex32>>,
}

/// What masks have come to: a loss, and its gradients by the spectra that masks make of a mixture, times the
/// conjugate of that mixture.
pub struct MaskLoss {
    /// Loss of all segments.
    pub loss: MicroLoss,
    /// Loss of each segment.
    pub by_segment: Vec<f64>,
    /// `[b, stems, channels]`, `[t, f]` each.
    slopes: Vec<Vec<Complex32>>,
}

impl<'a> Scene<'a> {
    /// Transforms the mixtures.
    pub fn new(shape: &'a SeparatorShape, stft: &'a Stft, batch: &'a SegmentBatch) -> Self {
        let signals = batch.mixtures(stft.samples());
        let mixtures = signals.into_par_iter().map(|signal| {
            let mut spectrum = Vec::with_capacity(stft.frames() * stft.bins());
            stft.spectrum(signal, |_, frame| spectrum.extend_from_slice(frame));
            spectrum
        });
        Self { shape, stft, batch, mixtures: mixtures.collect() }
    }

    /// What the network sees: the spectra by band, `[b * t, channels * w * 2]` each, every band of a segment
    /// divided by its root mean square. So a loud segment is a quiet one's equal, and nothing of what happens
    /// within one is lost.
    pub fn inputs(&self) -> Vec<Vec<f32>> {
        let (bins, segments) = (self.stft.bins(), self.batch.indices.len());
        let input = |band: usize| {
            let range = &self.shape.bands[band];
            let mut values = Vec::with_capacity(segments * self.stft.frames() * self.shape.inputs(band));
            for channels in self.mixtures.chunks_exact(CHANNELS) {
                let first = values.len();
                for frame in 0..self.stft.frames() {
                    for spectrum in channels {
                        let band = &spectrum[frame * bins..][range.clone()];
                        values.extend(band.iter().flat_map(|value| [value.re, value.im]));
                    }
                }
                let squares: f64 = values[first..].iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
                let scale = (squares / (values.len() - first) as f64 + FLOOR).sqrt().recip() as f32;
                values[first..].iter_mut().for_each(|value| *value *= scale);
            }
            values
        };
        (0..self.shape.bands.len()).into_par_iter().map(input).collect()
    }

    /// Loss of masks, and what their gradients are made of.
    pub fn judge(&self, masks: &[Vec<f32>], weights: LossWeights) -> MaskLoss {
        let signals = self.batch.stems(self.stft.samples()).into_par_iter().enumerate();
        let judged: Vec<_> =
            signals.map(|(signal, wanted)| self.judge_one(masks, weights, signal, wanted)).collect();
        let (losses, slopes): (Vec<f64>, Vec<_>) = judged.into_iter().unzip();
        let by_segment: Vec<f64> =
            losses.chunks(self.shape.stems * CHANNELS).map(|losses| losses.iter().sum()).collect();
        let loss = MicroLoss { loss_sum: by_segment.iter().sum(), valid: by_segment.len() as f64 };
        MaskLoss { loss, by_segment, slopes }
    }

    /// What masks make of the mixtures: `[b, stems, channels]` signals.
    pub fn estimates(&self, masks: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let signals = self.batch.indices.len() * self.shape.stems * CHANNELS;
        let estimate = |signal| self.stft.signal(&self.masked(masks, signal));
        (0..signals).into_par_iter().map(estimate).collect()
    }

    /// The gradient of the loss by the masks of a band, `[b * t, m_k]`.
    pub fn slope(&self, judged: &MaskLoss, band: usize) -> Vec<f32> {
        let (range, bins) = (&self.shape.bands[band], self.stft.bins());
        let mut values =
            Vec::with_capacity(self.batch.indices.len() * self.stft.frames() * self.shape.outputs(band));
        for signals in judged.slopes.chunks_exact(self.shape.stems * CHANNELS) {
            for frame in 0..self.stft.frames() {
                for slopes in signals {
                    let slopes = &slopes[frame * bins..][range.clone()];
                    values.extend(slopes.iter().flat_map(|slope| [slope.re, slope.im]));
                }
            }
        }
        values
    }

    /// Loss of one signal, `[b, stems, channels]` counted through, and its gradient.
    fn judge_one(
        &self,
        masks: &[Vec<f32>],
        weights: LossWeights,
        signal: usize,
        wanted: &[f32],
    ) -> (f64, Vec<Complex32>) {
        let (stft, signals) = (self.stft, (self.shape.stems * CHANNELS) as f64);
        let mut spectrum = self.masked(masks, signal);
        let mut slope = stft.signal(&spectrum);
        let each = weights.waveform / (signals * stft.samples() as f64);
        let mut loss = 0.0;
        for (value, wanted) in slope.iter_mut().zip(wanted) {
            let off = *value - wanted;
            loss += each * f64::from(off.abs());
            *value = each as f32 * sign(off);
        }
        let each = weights.spectrum / (signals * 2.0 * spectrum.len() as f64);
        stft.spectrum(wanted, |frame, wanted| {
            for (value, wanted) in spectrum[frame * stft.bins()..].iter_mut().zip(wanted) {
                let off = *value - wanted;
                loss += each * f64::from(off.re.abs() + off.im.abs());
                *value = Complex32::new(sign(off.re), sign(off.im)) * each as f32;
            }
        });
        let mixture = &self.mixtures[self.mixture_of(signal)];
        stft.backward(&slope, |frame, of_waveform| {
            let places = frame * stft.bins()..(frame + 1) * stft.bins();
            let values = spectrum[places.clone()].iter_mut().zip(of_waveform).zip(&mixture[places]);
            values.for_each(|((value, more), x)| *value = (*value + more) * x.conj());
        });
        (loss, spectrum)
    }

    /// The mixture that a signal is estimated from: the same channel of its segment.
    fn mixture_of(&self, signal: usize) -> usize {
        signal / (self.shape.stems * CHANNELS) * CHANNELS + signal % CHANNELS
    }

    /// The mixture's spectrum under the masks of one signal, `[t, f]`.
    fn masked(&self, masks: &[Vec<f32>], signal: usize) -> Vec<Complex32> {
        let (frames, per_segment) = (self.stft.frames(), self.shape.stems * CHANNELS);
        let (segment, place) = (signal / per_segment, signal % per_segment);
        let mut spectrum = self.mixtures[self.mixture_of(signal)].clone();
        for (frame, values) in spectrum.chunks_exact_mut(self.stft.bins()).enumerate() {
            for (band, (range, masks)) in self.shape.bands.iter().zip(masks).enumerate() {
                let row = &masks[(segment * frames + frame) * self.shape.outputs(band)..];
                let masks = row[place * 2 * range.len()..].chunks_exact(2);
                let values = values[range.clone()].iter_mut().zip(masks);
                values.for_each(|(value, mask)| *value *= Complex32::new(mask[0], mask[1]));
            }
        }
        spectrum
    }
}

/// The sign of a number, zero for zero: where nothing is off, nothing pulls.
fn sign(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { x.signum() }
}
