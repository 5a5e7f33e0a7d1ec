//! What is done to the flat parameter buffer in a GPU's memory: a kernel for each, in place.

use std::ops::Range;

use burn::tensor::{DType, Tensor};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, tensor::CubeTensor};
use cubecl::prelude::*;
use half::bf16;

use super::launch::{UNITS, by_element, cube_sum, elements, empty, floats, len, primitive, width, wrapped};
use crate::kernels::flat::{
    Run,
    tensors::{BLOCK, Origins, Updates},
};

/// Gradients that one kernel adds, and runs that one updates. A kernel is compiled for each number that comes
/// up: those of a block's halves.
const AT_ONCE: usize = 16;

/// A gradient, and where it goes.
pub struct Addend<R: CubeRuntime> {
    /// First element.
    pub start: usize,
    /// Whether it overwrites what is there.
    pub first: bool,
    /// A matrix of float32 whose rows lie whole.
    pub values: CubeTensor<R>,
}

/// `flat[start..] += values` of each addend, or `= values` of a first one. They lie apart from each other.
pub fn accumulate<R: CubeRuntime>(flat: CubeTensor<R>, addends: Vec<Addend<R>>) -> CubeTensor<R> {
    let flat = owned(flat);
    let (mut addends, client) = (addends.into_iter().peekable(), flat.client.clone());
    while addends.peek().is_some() {
        let (mut gradients, mut places) = (SequenceArg::new(), SequenceArg::new());
        let (mut cubes, mut firsts) = (0, 0);
        for (number, Addend { start, first, values }) in addends.by_ref().take(AT_ONCE).enumerate() {
            let (count, columns) = (len(&values), width(&values));
            let apart = if values.is_contiguous() { columns } else { values.meta.strides()[0] };
            cubes += count.div_ceil(UNITS);
            firsts |= u32::from(first) << number;
            gradients.push(elements(values).into_array_arg());
            places.push(AddendPlaceLaunch::new(start as u64, count as u32, columns as u32, apart as u32));
        }
        accumulate_kernel::launch::<R>(
            &client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            flat.clone().into_array_arg(),
            gradients,
            places,
            firsts,
        );
    }
    flat
}

/// Where a gradient goes, its elements, those of a row, and from one row to the next.
#[derive(CubeType, CubeLaunch)]
struct AddendPlace {
    start: u64,
    count: u32,
    columns: u32,
    apart: u32,
}

/// Cubes are dealt to gradients one after another; bits of `firsts` say which overwrite.
#[cube(launch)]
fn accumulate_kernel(
    flat: &mut Array<f32>,
    gradients: &Sequence<Array<f32>>,
    places: &Sequence<AddendPlace>,
    firsts: u32,
) {
    let mut before = 0usize;
    #[unroll]
    for number in 0..gradients.len() {
        let gradient = gradients.index(number);
        let place = places.index(number);
        let (count, columns) = (place.count as usize, place.columns as usize);
        let cubes = count.div_ceil(UNITS);
        if CUBE_POS >= before && CUBE_POS < before + cubes {
            let i = (CUBE_POS - before) * UNITS + UNIT_POS as usize;
            if i < count {
                let at = place.start as usize + i;
                let mut sum = gradient[i / columns * place.apart as usize + i % columns];
                if (firsts >> comptime!(number as u32)) & 1 == 0 {
                    sum += flat[at];
                }
                flat[at] = sum;
            }
        }
        before += cubes;
    }
}

/// Gradients of a table's rows, `[places, d]`, added to the table that begins at `start`. `indices` are the
/// rows that were looked up, where the places of each begin, and places; no row comes twice.
pub fn add_rows<R: CubeRuntime>(
    flat: CubeTensor<R>,
    start: usize,
    values: CubeTensor<R>,
    indices: [CubeTensor<R>; 3],
) -> CubeTensor<R> {
    let (flat, width) = (owned(flat), width(&values));
    let [rows, starts, places] = indices;
    let (cubes, dim) = by_element(len(&rows) * width);
    add_rows_kernel::launch::<R>(
        &flat.client,
        cubes,
        dim,
        flat.clone().into_array_arg(),
        values.into_array_arg(),
        rows.into_array_arg(),
        starts.into_array_arg(),
        places.into_array_arg(),
        start as u64,
        width as u32,
    );
    flat
}

/// One unit for each element of a row: additions of one element are in the order of its lookups.
#[cube(launch)]
fn add_rows_kernel(
    flat: &mut Array<f32>,
    values: &Array<f32>,
    rows: &Array<u32>,
    starts: &Array<u32>,
    places: &Array<u32>,
    start: u64,
    width: u32,
) {
    let (number, column) = (ABSOLUTE_POS / width as usize, ABSOLUTE_POS % width as usize);
    if number < rows.len() {
        let at = start as usize + rows[number] as usize * width as usize + column;
        let mut sum = flat[at];
        for place in starts[number]..starts[number + 1] {
            sum += values[places[place as usize] as usize * width as usize + column];
        }
        flat[at] = sum;
    }
}

/// `flat[range] = halves[range]`, in float32, without memory of its own: a refusal in the middle of a step
/// would leave a rank behind.
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

/// AdamW on runs of a part.
pub fn adamw<R, F, I, BT>(
    state: Updates<CubeBackend<R, F, I, BT>>,
    grads: &Tensor<CubeBackend<R, F, I, BT>, 1>,
    from: Origins,
    runs: &[Run],
) -> Updates<CubeBackend<R, F, I, BT>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let Updates { weights, state: [exp_avg, exp_avg_sq] } = state;
    let [weights, exp_avg, exp_avg_sq] = [weights, exp_avg, exp_avg_sq].map(|x| owned(primitive(x)));
    let grads = floats(grads.clone());
    for runs in runs.chunks(AT_ONCE) {
        let (mut places, mut coefficients) = (SequenceArg::new(), SequenceArg::new());
        for Run { range, coefficients: c } in runs {
            places.push(PlaceLaunch::new(range.start as u64, range.len() as u64));
            coefficients.push(KernelCoefficientsLaunch::new(
                c.factor,
                c.one_minus_beta1,
                c.beta2,
                c.one_minus_beta2,
                c.keep,
                c.step_size,
                c.root_factor,
                c.eps,
            ));
        }
        let cubes = runs.iter().map(|run| run.range.len().div_ceil(UNITS)).sum::<usize>().max(1);
        adamw_kernel::launch::<R>(
            &weights.client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            weights.clone().into_array_arg(),
            exp_avg.clone().into_array_arg(),
            exp_avg_sq.clone().into_array_arg(),
            grads.clone().into_array_arg(),
            places,
            coefficients,
            from.weights as u64,
            from.grads as u64,
        );
    }
    Updates { weights: wrapped(weights), state: [wrapped(exp_avg), wrapped(exp_avg_sq)] }
}

/// A [`Run`]'s range.
#[derive(CubeType, CubeLaunch)]
struct Place {
    start: u64,
    len: u64,
}

/// The numbers of [`flat::Coefficients`](crate::kernels::flat::Coefficients), as a kernel takes them.
#[derive(CubeType, CubeLaunch)]
struct KernelCoefficients {
    factor: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    keep: f32,
    step_size: f32,
    root_factor: f32,
    eps: f32,
}

/// Cubes are dealt to runs one after another.
#[cube(launch)]
fn adamw_kernel(
    weights: &mut Array<f32>,
    exp_avg: &mut Array<f32>,
    exp_avg_sq: &mut Array<f32>,
    grads: &Array<f32>,
    places: &Sequence<Place>,
    coefficients: &Sequence<KernelCoefficients>,
    weights_from: u64,
    grads_from: u64,
) {
    let mut before = 0usize;
    #[unroll]
    for number in 0..places.len() {
        let place = places.index(number);
        let c = coefficients.index(number);
        let cubes = (place.len as usize).div_ceil(UNITS);
        if CUBE_POS >= before && CUBE_POS < before + cubes {
            let i = (CUBE_POS - before) * UNITS + UNIT_POS as usize;
            if i < place.len as usize {
                let at = place.start as usize + i;
                let (w_at, g_at) = (weights_from as usize + at, grads_from as usize + at);
                let g = grads[g_at] * c.factor;
                let m = exp_avg[at] + c.one_minus_beta1 * (g - exp_avg[at]);
                let v = exp_avg_sq[at] * c.beta2 + c.one_minus_beta2 * (g * g);
                exp_avg[at] = m;
                exp_avg_sq[at] = v;
                weights[w_at] =
                    weights[w_at] * c.keep - c.step_size * (m / (v.sqrt() * c.root_factor + c.eps));
            }
        }
        before += cubes;
    }
}

/// A buffer that has no other owner: this one, or a copy of it.
fn owned<R: CubeRuntime>(flat: CubeTensor<R>) -> CubeTensor<R> {
    if flat.can_mut() { flat } else { flat.copy() }
}
