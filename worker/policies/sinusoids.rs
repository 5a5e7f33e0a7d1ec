//! The flow's time as openpi embeds it.

use std::f64::consts::TAU;

/// Sine and cosine of a time at periods that grow by a factor, `[width]`.
pub(crate) fn sinusoids(time: f32, width: usize, [shortest, longest]: [f64; 2]) -> Vec<f32> {
    let half = width / 2;
    let angle = |number: usize| {
        let fraction = number as f64 / (half.max(2) - 1) as f64;
        TAU / (shortest * (longest / shortest).powf(fraction)) * f64::from(time)
    };
    let angles: Vec<f64> = (0..half).map(angle).collect();
    let of = |function: fn(f64) -> f64| angles.iter().map(move |angle| function(*angle) as f32);
    of(f64::sin).chain(of(f64::cos)).collect()
}
