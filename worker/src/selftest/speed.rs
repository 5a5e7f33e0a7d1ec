//! Bandwidth between host and device, and the rate of matrix products. The best of a few rounds: what a
//! device can do, not what else the machine was doing.

use std::time::Duration;

use burn::tensor::{DType, Tensor, TensorData};

use super::Finding;
use crate::clock;
use coxswain_nn::kernels::Tape;

/// Sizes that take a moment on the device at hand.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes copied.
    pub copy: usize,
    /// Side of the square matrices.
    pub side: usize,
    /// Rounds; the first one, which may compile and tune kernels, does not count.
    pub rounds: usize,
    /// Whether the device multiplies bfloat16 matrices itself.
    pub bf16: bool,
}

/// Measures a device with memory of its own.
pub fn speed<B: Tape<Base = B>>(device: &B::Device, sizes: Sizes) -> Vec<Finding> {
    let mut found = vec![copies::<B>(device, sizes)];
    found.extend(rates::<B>(device, sizes));
    found
}

/// Measures a device that computes in host memory: tensors are not copied to it, so a copy within that memory
/// stands in.
pub(crate) fn speed_in_host_memory<B: Tape<Base = B>>(device: &B::Device, sizes: Sizes) -> Vec<Finding> {
    let from = vec![1u8; sizes.copy];
    let mut to = vec![0u8; sizes.copy];
    let mut best = Duration::MAX;
    for _ in 0..=sizes.rounds {
        let begin = clock::now();
        to.copy_from_slice(&from);
        best = best.min(begin.elapsed());
    }
    let outcome = match to == from {
        true => Ok(format!("{} on one thread ({} MiB)", rate(sizes.copy, best), sizes.copy >> 20)),
        false => Err("the copy differs from its source".to_owned()),
    };
    let mut found = vec![Finding::checked("speed", "copies in memory", outcome)];
    found.extend(rates::<B>(device, sizes));
    found
}

fn rate(bytes: usize, time: Duration) -> String {
    format!("{:.1} GB/s", bytes as f64 / 1e9 / time.as_secs_f64().max(1e-9))
}

fn copies<B: Tape<Base = B>>(device: &B::Device, sizes: Sizes) -> Finding {
    let values = vec![1.0f32; sizes.copy / 4];
    let (mut up, mut down) = (Duration::MAX, Duration::MAX);
    let mut whole = true;
    for round in 0..=sizes.rounds {
        let data = TensorData::new(values.clone(), [values.len()]);
        let begin = clock::now();
        let there = Tensor::<B, 1>::from_data(data, device);
        synced::<B>(device);
        let (copied, begin) = (begin.elapsed(), clock::now());
        let back = there.into_data();
        let returned = begin.elapsed();
        whole &= back.as_slice::<f32>().is_ok_and(|back| back == values);
        if round > 0 {
            (up, down) = (up.min(copied), down.min(returned));
        }
    }
    let outcome = match whole {
        true => Ok(format!(
            "{} to the device, {} back ({} MiB)",
            rate(sizes.copy, up),
            rate(sizes.copy, down),
            sizes.copy >> 20
        )),
        false => Err("the data read back differs from the data sent".to_owned()),
    };
    Finding::checked("speed", "copies", outcome)
}

fn rates<B: Tape<Base = B>>(device: &B::Device, sizes: Sizes) -> Vec<Finding> {
    let mut found = Vec::new();
    let types = [(DType::F32, "float32"), (DType::BF16, "bfloat16")];
    for (dtype, name) in types.into_iter().filter(|(dtype, _)| *dtype == DType::F32 || sizes.bf16) {
        found.push(Finding::checked(
            "speed",
            format!("matmul in {name}"),
            products::<B>(device, sizes, dtype),
        ));
    }
    found
}

fn products<B: Tape<Base = B>>(device: &B::Device, sizes: Sizes, dtype: DType) -> Result<String, String> {
    let side = sizes.side;
    // Small whole numbers: every product and sum is exact in any order and any type.
    let pattern = |step: usize| (0..side * side).map(|at| ((at * step) % 5) as f32 - 2.0).collect::<Vec<_>>();
    let (a, b) = (pattern(3), pattern(7));
    let matrix = |values: &[f32]| {
        Tensor::<B, 2>::from_data(TensorData::new(values.to_vec(), [side, side]), device).cast(dtype)
    };
    let (left, right) = (matrix(&a), matrix(&b));
    let (mut best, mut corner) = (Duration::MAX, f32::NAN);
    for round in 0..=sizes.rounds {
        synced::<B>(device);
        let begin = clock::now();
        let product = B::product(left.clone(), right.clone());
        synced::<B>(device);
        let took = begin.elapsed();
        if round > 0 {
            best = best.min(took);
        }
        let first = product.narrow(0, side - 1, 1).narrow(1, side - 1, 1).into_data().convert::<f32>();
        corner = first.as_slice::<f32>().map_or(f32::NAN, |values| values[0]);
    }
    let exact: f32 = (0..side).map(|k| a[(side - 1) * side + k] * b[k * side + side - 1]).sum();
    // bfloat16 keeps 8 bits of the sum.
    let tolerance = if dtype == DType::BF16 { exact.abs().max(1.0) / 128.0 } else { 0.0 };
    if (corner - exact).abs() > tolerance {
        return Err(format!("an element of a {side} x {side} matmul is {corner} instead of {exact}"));
    }
    let operations = 2.0 * (side as f64).powi(3);
    let tera = operations / 1e12 / best.as_secs_f64().max(1e-9);
    Ok(match tera < 1.0 {
        true => format!("{:.0} GFLOP/s ({side} x {side})", tera * 1e3),
        false => format!("{tera:.1} TFLOP/s ({side} x {side})"),
    })
}

/// Waits for everything that the device was given; what it cannot say shows in the values that are read back.
fn synced<B: Tape<Base = B>>(device: &B::Device) {
    if let Err(error) = B::sync(device) {
        tracing::warn!(?error, "cannot synchronise the device");
    }
}
