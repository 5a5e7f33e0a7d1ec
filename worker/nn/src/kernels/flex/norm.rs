//! RMS norm and layer norm over contiguous rows, and what their backward passes return.
//!
//! Each row is read into the first-level cache once per pass over it; the statistics are computed again in
//! the backward pass, which costs less than a second tensor to keep.

use super::{rows, simd};

/// `x * r * gain` with `r = (mean x^2 + eps)^-1/2`.
pub fn rms(x_nd: &[f32], gain_d: &[f32], eps: f32) -> Vec<f32> {
    let dim = gain_d.len();
    rows::build(x_nd.len() / dim.max(1), dim, |first, out| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (x, y) in x_nd[first * dim..].chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
                    let r = inverse_rms(x, eps);
                    for ((y, &x), &gain) in y.iter_mut().zip(x).zip(gain_d) {
                        *y = x * r * gain;
                    }
                }
            },
        );
    })
}

/// With `h = dy * gain`: `dx = r h - x r^3 mean(h x)`.
pub fn rms_backward(x_nd: &[f32], gain_d: &[f32], dy_nd: &[f32], eps: f32) -> Vec<f32> {
    let dim = gain_d.len();
    rows::build(x_nd.len() / dim.max(1), dim, |first, out| {
        simd::vectorised(
            #[inline(always)]
            || {
                let (x_rows, dy_rows) =
                    (x_nd[first * dim..].chunks_exact(dim), dy_nd[first * dim..].chunks_exact(dim));
                for ((x, dy), dx) in x_rows.zip(dy_rows).zip(out.chunks_exact_mut(dim)) {
                    let r = inverse_rms(x, eps);
                    for ((h, &dy), &gain) in dx.iter_mut().zip(dy).zip(gain_d) {
                        *h = dy * gain;
                    }
                    let slope = r * r * r * simd::sum2(dx, x, |h, x| h * x) / dim as f32;
                    for (dx, &x) in dx.iter_mut().zip(x) {
                        *dx = *dx * r - x * slope;
                    }
                }
            },
        );
    })
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (simd::sum(x, |x| x * x) / x.len() as f32 + eps).sqrt()
}

/// Scale and shift of a layer norm, one row of each per batch row; `None` for `1` and `0`.
#[derive(Clone, Copy)]
pub struct Modulation<'a> {
    /// The output is multiplied by `1 + scale`, `[b, d]`.
    pub scale_bd: &'a [f32],
    /// Then added to this, `[b, d]`.
    pub shift_bd: &'a [f32],
}

/// `(x - mean) * r`, modulated; `r = (variance + eps)^-1/2`.
pub fn layer(x_nd: &[f32], dim: usize, modulation: Option<Modulation<'_>>, eps: f32) -> Vec<f32> {
    let count = x_nd.len() / dim.max(1);
    rows::build(count, dim, |first, out| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (i, y) in out.chunks_exact_mut(dim).enumerate() {
                    let x = &x_nd[(first + i) * dim..][..dim];
                    let (mean, r) = moments(x, eps);
                    match modulation {
                        None => y.iter_mut().zip(x).for_each(|(y, &x)| *y = (x - mean) * r),
                        Some(m) => {
                            let at = batch_row(first + i, count, m.scale_bd.len() / dim) * dim;
                            let (scale, shift) = (&m.scale_bd[at..][..dim], &m.shift_bd[at..][..dim]);
                            for (((y, &x), &scale), &shift) in y.iter_mut().zip(x).zip(scale).zip(shift) {
                                *y = (x - mean) * r * (1.0 + scale) + shift;
                            }
                        }
                    }
                }
            },
        );
    })
}

/// With `h = dy * (1 + scale)` and `n = (x - mean) r`: `dx = r (h - mean(h) - n mean(h n))`. `scale` is `[b,
/// d]`.
pub fn layer_backward(
    x_nd: &[f32],
    dim: usize,
    scale_bd: Option<&[f32]>,
    dy_nd: &[f32],
    eps: f32,
) -> Vec<f32> {
    let count = x_nd.len() / dim.max(1);
    rows::build(count, dim, |first, out| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (i, dx) in out.chunks_exact_mut(dim).enumerate() {
                    let (x, dy) = (&x_nd[(first + i) * dim..][..dim], &dy_nd[(first + i) * dim..][..dim]);
                    let (mean, r) = moments(x, eps);
                    dx.copy_from_slice(dy);
                    if let Some(scale_bd) = scale_bd {
                        let at = batch_row(first + i, count, scale_bd.len() / dim) * dim;
                        for (h, &scale) in dx.iter_mut().zip(&scale_bd[at..][..dim]) {
                            *h *= 1.0 + scale;
                        }
                    }
                    let mean_h = simd::sum(dx, |h| h) / dim as f32;
                    let slope = simd::sum2(dx, x, |h, x| h * ((x - mean) * r)) / dim as f32;
                    for (dx, &x) in dx.iter_mut().zip(x) {
                        *dx = r * (*dx - mean_h - (x - mean) * r * slope);
                    }
                }
            },
        );
    })
}

/// `(dscale, dshift)`: the sums over a batch row's tokens of `dy * n` and of `dy`, each `[b, d]`.
pub fn modulation_backward(
    x_nd: &[f32],
    [batch, dim]: [usize; 2],
    dy_nd: &[f32],
    eps: f32,
) -> (Vec<f32>, Vec<f32>) {
    let tokens = x_nd.len() / (batch * dim).max(1);
    rows::build2(batch, dim, |first, dscale, dshift| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (i, (dscale, dshift)) in
                    dscale.chunks_exact_mut(dim).zip(dshift.chunks_exact_mut(dim)).enumerate()
                {
                    let start = (first + i) * tokens * dim;
                    let (x_rows, dy_rows) =
                        (x_nd[start..].chunks_exact(dim), dy_nd[start..].chunks_exact(dim));
                    for (x, dy) in x_rows.zip(dy_rows).take(tokens) {
                        let (mean, r) = moments(x, eps);
                        for (((dscale, dshift), &x), &dy) in
                            dscale.iter_mut().zip(dshift.iter_mut()).zip(x).zip(dy)
                        {
                            *dscale += dy * ((x - mean) * r);
                            *dshift += dy;
                        }
                    }
                }
            },
        );
    })
}

/// Which of `batch` equal runs of rows a row is in.
#[inline(always)]
fn batch_row(row: usize, rows: usize, batch: usize) -> usize {
    row / (rows / batch)
}

/// Mean, and inverse standard deviation.
#[inline(always)]
fn moments(x: &[f32], eps: f32) -> (f32, f32) {
    let count = x.len() as f32;
    let mean = simd::sum(x, |x| x) / count;
    let variance = simd::sum(x, |x| (x - mean) * (x - mean)) / count;
    (mean, 1.0 / (variance + eps).sqrt())
}
