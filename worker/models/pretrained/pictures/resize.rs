//! Bicubic resizing of RGB images, bit for bit as Pillow's `Image.resize(.., BICUBIC)` does it, or as
//! PyTorch does it on bytes, with antialiasing, whose coefficients are shorter ([`KernelBits`]).
//!
//! Pillow widens the kernel (Catmull-Rom, a = -0.5) when it shrinks an image, rounds the kernel's
//! coefficients to 22 bits, and filters rows first, columns second, rounding to 8 bits after each. Resizers
//! that keep fewer bits, as fast ones do, miss about one pixel in a hundred by one grey level, which is ten
//! times the tolerance the golden fixtures allow.

/// 32 bits less 8 of the pixel and 2 for overshoot.
const PRECISION_BITS: u32 = 32 - 8 - 2;
/// The largest coefficient that 16 bits have room for, and one.
const SHORT: i32 = 1 << 15;
const CHANNELS: usize = 3;

/// An RGB image, `height * width * 3` bytes, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
    /// Pixels.
    pub pixels: Vec<u8>,
}

/// How many bits coefficients of kernels are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelBits {
    /// 22, as Pillow's.
    Most,
    /// As many as leave the largest of an axis within 16, as PyTorch's on bytes.
    Fewest,
}

/// `image` at another size.
pub fn resize(image: Rgb, height: usize, width: usize, bits: KernelBits) -> Rgb {
    let image = if image.width == width { image } else { resize_rows(&image, width, bits) };
    if image.height == height { image } else { resize_columns(&image, height, bits) }
}

/// Kernels of an axis, and the bits of their coefficients.
struct Kernels {
    taps: Vec<Taps>,
    bits: u32,
}

/// The kernel of one output pixel: the first input pixel and the weights from there on.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// Kernels of all output pixels along one axis (Pillow's `precompute_coeffs` and `normalize_coeffs_8bpc`).
fn kernels(input: usize, output: usize, bits: KernelBits) -> Kernels {
    let scale = input as f64 / output as f64;
    let stretch = scale.max(1.0);
    let support = 2.0 * stretch;
    let kernel = |x: usize| {
        let center = (x as f64 + 0.5) * scale;
        // Casts truncate towards zero and saturate at zero, as Pillow's do after its clamp.
        let first = (center - support + 0.5) as usize;
        let end = ((center + support + 0.5) as usize).min(input);
        let weight = |i: usize| cubic((i as f64 - center + 0.5) * (1.0 / stretch));
        let raw: Vec<f64> = (first..end).map(weight).collect();
        let sum: f64 = raw.iter().sum();
        let weights = raw.iter().map(|w| if sum == 0.0 { *w } else { w / sum });
        (first, weights.collect::<Vec<f64>>())
    };
    let all: Vec<_> = (0..output).map(kernel).collect();
    let bits = match bits {
        KernelBits::Most => PRECISION_BITS,
        KernelBits::Fewest => fewest(all.iter().flat_map(|(_, weights)| weights)),
    };
    let fixed = |w: &f64| (f64::from(1u32 << bits) * w + 0.5f64.copysign(*w)) as i32;
    let taps =
        |(first, weights): (usize, Vec<f64>)| Taps { first, weights: weights.iter().map(fixed).collect() };
    Kernels { taps: all.into_iter().map(taps).collect(), bits }
}

/// The bits of coefficients that 16 bits have room for.
fn fewest<'w>(weights: impl Iterator<Item = &'w f64>) -> u32 {
    let largest = weights.fold(0.0, |most: f64, w| most.max(*w));
    let fits = |bits: &u32| ((0.5 + largest * f64::from(1u32 << (bits + 1))) as i32) < SHORT;
    (0..PRECISION_BITS).find(|bits| !fits(bits)).unwrap_or(PRECISION_BITS)
}

/// The cubic convolution kernel of Keys (1981) with a = -0.5, as Pillow factors it.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

fn clip(sum: i32, bits: u32) -> u8 {
    (sum >> bits).clamp(0, 255) as u8
}

fn resize_rows(image: &Rgb, width: usize, bits: KernelBits) -> Rgb {
    let Kernels { taps, bits } = kernels(image.width, width, bits);
    let half = 1 << bits >> 1;
    let mut pixels = vec![0; image.height * width * CHANNELS];
    let rows = image.pixels.chunks_exact(image.width * CHANNELS);
    for (from, to) in rows.zip(pixels.chunks_exact_mut(width * CHANNELS)) {
        for (pixel, taps) in to.chunks_exact_mut(CHANNELS).zip(&taps) {
            let mut sums = [half; CHANNELS];
            for (weight, input) in
                taps.weights.iter().zip(from[taps.first * CHANNELS..].chunks_exact(CHANNELS))
            {
                for (sum, value) in sums.iter_mut().zip(input) {
                    *sum += weight * i32::from(*value);
                }
            }
            for (value, sum) in pixel.iter_mut().zip(sums) {
                *value = clip(sum, bits);
            }
        }
    }
    Rgb { height: image.height, width, pixels }
}

fn resize_columns(image: &Rgb, height: usize, bits: KernelBits) -> Rgb {
    let Kernels { taps, bits } = kernels(image.height, height, bits);
    let half = 1 << bits >> 1;
    let stride = image.width * CHANNELS;
    let mut pixels = vec![0; height * stride];
    let mut sums = vec![half; stride];
    for (to, taps) in pixels.chunks_exact_mut(stride).zip(taps) {
        sums.fill(half);
        for (weight, row) in taps.weights.iter().zip(image.pixels[taps.first * stride..].chunks_exact(stride))
        {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += weight * i32::from(*value);
            }
        }
        for (value, sum) in to.iter_mut().zip(&sums) {
            *value = clip(*sum, bits);
        }
    }
    Rgb { height, width: image.width, pixels }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flat_image_stays_flat_at_every_size() {
        let image = Rgb { height: 9, width: 31, pixels: vec![201; 9 * 31 * 3] };
        for (h, w) in [(1, 1), (9, 62), (28, 28), (140, 5), (9, 31)] {
            for bits in [KernelBits::Most, KernelBits::Fewest] {
                let out = resize(image.clone(), h, w, bits);
                assert_eq!((out.height, out.width, out.pixels.len()), (h, w, h * w * 3));
                assert!(out.pixels.iter().all(|p| *p == 201), "{h}x{w}");
            }
        }
    }

    #[test]
    fn kernels_sum_to_one() {
        for (input, output) in [(96, 84), (61, 140), (451, 56), (1, 28), (3000, 28)] {
            for taps in kernels(input, output, KernelBits::Most).taps {
                let sum: i64 = taps.weights.iter().map(|w| i64::from(*w)).sum();
                assert!((sum - (1 << PRECISION_BITS)).abs() <= taps.weights.len() as i64);
            }
        }
    }
}
