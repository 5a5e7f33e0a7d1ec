//! What is done to the flat space in a card's memory: a kernel for each, in place.

use std::ops::Range;

use burn::tensor::{DType, Tensor};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, tensor::CubeTensor};
use cubecl::prelude::*;
use half::bf16;

use super::{
    launch::{UNITS, by_element, cube_sum, empty, floats, len, primitive},
    wrapped,
};
use crate::kernels::flat::{
    Run,
    tensors::{BLOCK, Origins, Updated},
};

/// `flat[start..] += gradient`; `first`: `flat[start..] = gradient`.
pub fn accumulate<R: CubeRuntime>(
    flat: CubeTensor<R>,
    start: usize,
    gradient: CubeTensor<R>,
    first: bool,
) -> CubeTensor<R> {
    let flat = owned(flat);
    let count = len(&gradient);
    let (cubes, dim) = by_element(count);
    accumulate_kernel::launch::<R>(
        &flat.client,
        cubes,
        dim,
        flat.clone().into_array_arg(),
        gradient.into_array_arg(),
        start as u64,
        first,
    );
    flat
}

#[cube(launch)]
fn accumulate_kernel(flat: &mut Array<f32>, gradient: &Array<f32>, start: u64, #[comptime] first: bool) {
    if ABSOLUTE_POS < gradient.len() {
        let at = start as usize + ABSOLUTE_POS;
        if first {
            flat[at] = gradient[ABSOLUTE_POS];
        } else {
            flat[at] += gradient[ABSOLUTE_POS];
        }
    }
}

/// `flat[range] = halves[range]`, in float32, without memory of its own: a refusal in the middle of a step would leave a rank behind.
pub fn widen<R: CubeRuntime>(
    flat: CubeTensor<R>,
    halves: CubeTensor<R>,
    range: &Range<usize>,
) -> CubeTensor<R> {
    let flat = owned(flat);
    let (cubes, dim) = by_element(range.len());
    widen_kernel::launch::<R>(
        &flat.client,
        cubes,
        dim,
        flat.clone().into_array_arg(),
        halves.into_array_arg(),
        range.start as u64,
        range.end as u64,
    );
    flat
}

#[cube(launch)]
fn widen_kernel(flat: &mut Array<f32>, halves: &Array<bf16>, start: u64, end: u64) {
    let at = start as usize + ABSOLUTE_POS;
    if at < end as usize {
        flat[at] = f32::cast_from(halves[at]);
    }
}

/// The sum of squares of each block of `range`, the last one short.
pub fn squares<R: CubeRuntime>(flat: CubeTensor<R>, range: &Range<usize>) -> CubeTensor<R> {
    let blocks = range.len().div_ceil(BLOCK);
    let sums = empty(&flat, [blocks].into(), DType::F32);
    squares_kernel::launch::<R>(
        &sums.client,
        CubeCount::Static(blocks as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        flat.into_array_arg(),
        sums.clone().into_array_arg(),
        range.start as u64,
        range.end as u64,
        BLOCK,
    );
    sums
}

#[cube(launch)]
fn squares_kernel(flat: &Array<f32>, sums: &mut Array<f32>, start: u64, end: u64, #[comptime] block: usize) {
    let begin = start as usize + CUBE_POS * block;
    let end = min(begin + block, end as usize);
    let mut sum = f32::new(0.0);
    let mut at = begin + UNIT_POS as usize;
    while at < end {
        sum += flat[at] * flat[at];
        at += CUBE_DIM as usize;
    }
    let sum = cube_sum(sum);
    if UNIT_POS == 0 {
        sums[CUBE_POS] = sum;
    }
}

/// AdamW on one run of a part.
pub fn adamw<R, F, I, BT>(
    state: Updated<CubeBackend<R, F, I, BT>>,
    grads: &Tensor<CubeBackend<R, F, I, BT>, 1>,
    from: Origins,
    run: &Run,
) -> Updated<CubeBackend<R, F, I, BT>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let Updated { weights, exp_avg, exp_avg_sq } = state;
    let [weights, exp_avg, exp_avg_sq] = [weights, exp_avg, exp_avg_sq].map(|x| owned(primitive(x)));
    let (cubes, dim) = by_element(run.range.len());
    let c = &run.coefficients;
    adamw_kernel::launch::<R>(
        &weights.client,
        cubes,
        dim,
        weights.clone().into_array_arg(),
        exp_avg.clone().into_array_arg(),
        exp_avg_sq.clone().into_array_arg(),
        floats(grads.clone()).into_array_arg(),
        run.range.start as u64,
        run.range.len() as u64,
        from.weights as u64,
        from.grads as u64,
        c.factor,
        c.one_minus_beta1,
        c.beta2,
        c.one_minus_beta2,
        c.keep,
        c.step_size,
        c.root_factor,
        c.eps,
    );
    Updated { weights: wrapped(weights), exp_avg: wrapped(exp_avg), exp_avg_sq: wrapped(exp_avg_sq) }
}

#[cube(launch)]
fn adamw_kernel(
    weights: &mut Array<f32>,
    exp_avg: &mut Array<f32>,
    exp_avg_sq: &mut Array<f32>,
    grads: &Array<f32>,
    start: u64,
    count: u64,
    weights_from: u64,
    grads_from: u64,
    factor: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    keep: f32,
    step_size: f32,
    root_factor: f32,
    eps: f32,
) {
    if ABSOLUTE_POS < count as usize {
        let at = start as usize + ABSOLUTE_POS;
        let (w_at, g_at) = (weights_from as usize + at, grads_from as usize + at);
        let g = grads[g_at] * factor;
        let m = exp_avg[at] + one_minus_beta1 * (g - exp_avg[at]);
        let v = exp_avg_sq[at] * beta2 + one_minus_beta2 * (g * g);
        exp_avg[at] = m;
        exp_avg_sq[at] = v;
        weights[w_at] = weights[w_at] * keep - step_size * (m / (v.sqrt() * root_factor + eps));
    }
}

/// A buffer that nobody else holds: this one, or a copy of it.
fn owned<R: CubeRuntime>(flat: CubeTensor<R>) -> CubeTensor<R> {
    if flat.can_mut() { flat } else { flat.copy() }
}
