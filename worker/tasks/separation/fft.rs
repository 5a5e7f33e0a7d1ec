//! Fourier transforms of real signals of even length, by a complex transform of half of it (Sorensen et al.,
//! 1987), by decimation in time with any factors (Cooley and Tukey, 1965).
//!
//! Written here because the crates that do it change the features of crates at the root of our dependencies,
//! so that all of those would be built once more.

use std::f64::consts::TAU;

use num_complex::Complex32;

/// Transforms of one length.
#[derive(Clone, Debug)]
pub struct RealFft {
    half: usize,
    /// `e^(-2 pi i j / len)` of all `j` below the length.
    twiddles: Vec<Complex32>,
    /// Of half the length, in the order in which it is taken apart.
    factors: Vec<usize>,
}

/// What a transform works in; made for one length.
#[derive(Clone, Debug)]
pub struct FftBuffers {
    input: Vec<Complex32>,
    output: Vec<Complex32>,
    /// The terms of a butterfly of an odd factor.
    terms: Vec<Complex32>,
}

impl RealFft {
    /// Of `len` values, an even number.
    pub fn new(len: usize) -> Self {
        let twiddle = |j: usize| {
            let (sin, cos) = (-TAU * j as f64 / len as f64).sin_cos();
            Complex32::new(cos as f32, sin as f32)
        };
        let (mut rest, mut factors) = (len / 2, Vec::new());
        for factor in [4, 2].into_iter().chain(3..) {
            while rest > 1 && rest.is_multiple_of(factor) {
                factors.push(factor);
                rest /= factor;
            }
            if rest <= 1 {
                break;
            }
        }
        Self { half: len / 2, twiddles: (0..len).map(twiddle).collect(), factors }
    }

    /// What its transforms work in.
    pub fn buffers(&self) -> FftBuffers {
        let zeros = |len| vec![Complex32::default(); len];
        let most = self.factors.iter().copied().max().unwrap_or(1);
        FftBuffers { input: zeros(self.half), output: zeros(self.half), terms: zeros(most) }
    }

    /// `X_k = sum_m x_m e^(-2 pi i k m / len)` for `k` up to half the length.
    pub fn forward(&self, x: &[f32], spectrum: &mut [Complex32], buffers: &mut FftBuffers) {
        let FftBuffers { input, output, terms } = buffers;
        let pairs = x.chunks_exact(2).map(|pair| Complex32::new(pair[0], pair[1]));
        input.iter_mut().zip(pairs).for_each(|(slot, pair)| *slot = pair);
        self.complex(input, 1, &self.factors, output, terms);
        let half = self.half;
        for (k, slot) in spectrum.iter_mut().enumerate().take(half + 1) {
            let (z, other) = (output[k % half], output[(half - k) % half].conj());
            let odd = (z - other) * Complex32::new(0.0, -0.5);
            *slot = (z + other) * 0.5 + odd * self.twiddles[k];
        }
    }

    /// `x_m = sum_k X_k e^(2 pi i k m / len)` over the whole length, whose other half is the conjugate of
    /// this one: the inverse, times the length. The imaginary parts at both ends are taken for zero.
    pub fn inverse(&self, spectrum: &[Complex32], x: &mut [f32], buffers: &mut FftBuffers) {
        let FftBuffers { input, output, terms } = buffers;
        let half = self.half;
        let value =
            |k: usize| if k == 0 || k == half { Complex32::from(spectrum[k].re) } else { spectrum[k] };
        for (k, slot) in input.iter_mut().enumerate() {
            let (z, other) = (value(k), value(half - k).conj());
            let odd = (z - other) * self.twiddles[k].conj() * Complex32::i();
            // Conjugates turn the transform around.
            *slot = (z + other + odd).conj();
        }
        self.complex(input, 1, &self.factors, output, terms);
        for (pair, z) in x.chunks_exact_mut(2).zip(output.iter()) {
            (pair[0], pair[1]) = (z.re, -z.im);
        }
    }

    /// The transform of every `stride`-th value of `input`, as many as `output` has places.
    fn complex(
        &self,
        input: &[Complex32],
        stride: usize,
        factors: &[usize],
        output: &mut [Complex32],
        terms: &mut [Complex32],
    ) {
        let Some((&factor, rest)) = factors.split_first() else {
            output[0] = input[0];
            return;
        };
        let part = output.len() / factor;
        for (r, output) in output.chunks_exact_mut(part).enumerate() {
            self.complex(&input[r * stride..], stride * factor, rest, output, terms);
        }
        // Twiddles are of the whole length, twice that of the complex transform.
        let step = 2 * stride;
        let len = self.twiddles.len();
        for k in 0..part {
            for (r, term) in terms[..factor].iter_mut().enumerate() {
                *term = output[r * part + k] * self.twiddles[r * k * step];
            }
            match (factor, &terms[..factor]) {
                (2, &[a, b]) => (output[k], output[part + k]) = (a + b, a - b),
                (4, &[a, b, c, d]) => {
                    let (even, odd) = ([a + c, a - c], [b + d, (b - d) * -Complex32::i()]);
                    output[k] = even[0] + odd[0];
                    output[part + k] = even[1] + odd[1];
                    output[2 * part + k] = even[0] - odd[0];
                    output[3 * part + k] = even[1] - odd[1];
                }
                (_, terms) => {
                    for q in 0..factor {
                        let rotation = |r: usize| self.twiddles[q * r % factor * (len / factor)];
                        let sum: Complex32 =
                            terms.iter().enumerate().map(|(r, term)| term * rotation(r)).sum();
                        output[q * part + k] = sum;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_has_the_transform_of_its_definition() {
        for len in [2, 4, 6, 8, 10, 14, 16, 30, 44, 60, 64, 90, 98, 120, 256, 630] {
            let x: Vec<f32> = (0..len).map(|at| ((at * 7919 + 3) % 101) as f32 / 50.0 - 1.0).collect();
            let (fft, mut found) = (RealFft::new(len), vec![Complex32::default(); len / 2 + 1]);
            let mut buffers = fft.buffers();
            fft.forward(&x, &mut found, &mut buffers);
            for (k, found) in found.iter().enumerate() {
                let angle = |m: usize| -TAU * (k * m % len) as f64 / len as f64;
                let sum = |f: fn(f64) -> f64| -> f64 {
                    x.iter().enumerate().map(|(m, x)| f64::from(*x) * f(angle(m))).sum()
                };
                let (re, im) = (sum(f64::cos), sum(f64::sin));
                let off = (f64::from(found.re) - re).hypot(f64::from(found.im) - im);
                assert!(off < 1e-4 * (len as f64).sqrt(), "{len}, {k}: {found} is not {re} + {im} i");
            }
            let mut back = vec![0.0; len];
            fft.inverse(&found, &mut back, &mut buffers);
            for (back, x) in back.iter().zip(&x) {
                assert!((back / len as f32 - x).abs() < 1e-5, "{len}: {back} is not {len} times {x}");
            }
        }
    }
}
