//! A low-rank update by the registered library, on tensor cores: where the input that is reduced, or the
//! product that is raised onto, is of half precision.
//!
//! ```text
//! stacked   the matrices of all updates, rounded as autocast rounds them, one behind the other: one kernel
//! reduced   x m, times a factor: one product, or one for each layer whose columns are its own
//! raised    y += (x m) m': likewise
//! ```
//!
//! Sums are float32. On an H200 the kernels beside this file took 58 to 154 us for what should take 10 to 50
//! so, by arithmetic: it has not been timed on a GPU.
//!
//! What it does not do: finish a product; multiply where there is no library.

use burn::tensor::DType;
use burn_cubecl::{CubeElement, CubeRuntime, ops::permute, tensor::CubeTensor};
use cubecl::prelude::*;
use half::{bf16, f16};

use super::{
    super::{
        launch::{UNITS, empty, len, narrowed, width},
        library,
    },
    factor::{Factor, ScaledFactor, VECTOR},
};

/// Bytes at multiples of which columns begin that the library is asked to add to: it takes all or none.
const ALIGNED: usize = 256;

/// `factor * x m` of all matrices side by side, as [`reduced_side_by_side`](super::reduced_side_by_side) has
/// it. None where the library does not.
pub fn reduced<R: CubeRuntime>(x: &CubeTensor<R>, ms: &[ScaledFactor<R>]) -> Option<CubeTensor<R>> {
    let (rank, rows) = (ms[0].0.rank(), len(x) / width(x));
    if !is_half(x.dtype) || !library::is_there() {
        return None;
    }
    let stack = stacked(ms, x.dtype);
    let down = empty(x, [rows, ms.len() * rank].into(), x.dtype);
    if ms[0].0.long_rows {
        return library::multiplied([x, &permute(stack, &[1, 0]), &down], false).then_some(down);
    }
    let mut from = 0;
    for (number, (m, _)) in ms.iter().enumerate() {
        let own = [from, m.long()];
        from += m.long();
        let [x, m, down] = [
            narrowed(x.clone(), 1, own),
            narrowed(stack.clone(), 0, own),
            narrowed(down.clone(), 1, [number * rank, rank]),
        ];
        if !library::multiplied([&x, &m, &down], false) {
            return None;
        }
    }
    Some(down)
}

/// Whether `y` had `down m'` added where it lies, as [`raised`](super::raised) has it.
pub fn raised<R: CubeRuntime>(y: &CubeTensor<R>, down: &CubeTensor<R>, ms: &[Factor<R>]) -> bool {
    let (rank, long) = (ms[0].rank(), ms[0].long());
    let evenly = ms.iter().all(|m| m.long() == long) && (long * y.dtype.size()).is_multiple_of(ALIGNED);
    // Onto float32, in columns of each layer's own, our kernel is as fast.
    if !is_half(down.dtype) || !library::is_there() || !(ms[0].long_rows || is_half(y.dtype) && evenly) {
        return false;
    }
    let scaled: Vec<_> = ms.iter().map(|m| (Factor { values: m.values.clone(), ..*m }, 1.0)).collect();
    let stack = stacked(&scaled, down.dtype);
    if ms[0].long_rows {
        return library::finished([down, &stack, y], [None, Some(y)], false);
    }
    // All are of one shape: what the library says of the first it says of the others.
    (0..ms.len()).all(|number| {
        let own = [number * long, long];
        let y = narrowed(y.clone(), 1, own);
        let down = narrowed(down.clone(), 1, [number * rank, rank]);
        let m = permute(narrowed(stack.clone(), 0, own), &[1, 0]);
        library::finished([&down, &m, &y], [None, Some(&y)], false)
    })
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// `factor * m` of all matrices in half precision, rows behind rows.
fn stacked<R: CubeRuntime>(ms: &[ScaledFactor<R>], dtype: DType) -> CubeTensor<R> {
    match dtype {
        DType::F16 => launch::<R, f16>(ms),
        _ => launch::<R, bf16>(ms),
    }
}

fn launch<R: CubeRuntime, O: CubeElement + Float>(ms: &[ScaledFactor<R>]) -> CubeTensor<R> {
    let all = || ms.iter().map(|(m, _)| &m.values);
    let shape = [all().map(|m| len(m) / width(m)).sum(), width(&ms[0].0.values)];
    let most = all().map(|m| len(m) / VECTOR).max().unwrap_or(0);
    let stack = empty(&ms[0].0.values, shape.into(), O::dtype());
    stack_kernel::launch::<O, R>(
        &stack.client.clone(),
        CubeCount::Static(most.div_ceil(UNITS) as u32, ms.len() as u32, 1),
        CubeDim::new_1d(UNITS as u32),
        VECTOR,
        all().map(|m| m.clone().into_array_arg()).collect(),
        ms.iter().map(|(_, factor)| *factor as f32).collect(),
        stack.clone().into_array_arg(),
    );
    stack
}

#[cube(launch)]
fn stack_kernel<N: Size, O: Float>(
    ms: &Sequence<Array<Vector<f32, N>>>,
    factors: &Sequence<f32>,
    stack: &mut Array<Vector<O, N>>,
) {
    let at = ABSOLUTE_POS_X as usize;
    let mut before = 0usize;
    #[unroll]
    for number in 0..ms.len() {
        let m = ms.index(number);
        if CUBE_POS_Y as usize == number && at < m.len() {
            stack[before + at] = Vector::cast_from(m[at] * Vector::new(*factors.index(number)));
        }
        before += m.len();
    }
}
