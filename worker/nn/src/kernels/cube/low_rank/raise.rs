//! The second kernel of a low-rank update: what it adds to a product, where the product lies, and what
//! finishes that.

use burn::tensor::DType;
use burn_cubecl::{CubeElement, CubeRuntime, tensor::CubeTensor};
use cubecl::prelude::*;
use half::{bf16, f16};

use super::{
    super::{
        launch::{UNITS, len, width},
        pointwise::Finish,
    },
    factor::{Factor, VECTOR},
};

/// Rows of a cube of [`raised`].
const RAISED_ROWS: usize = 32;
/// Rows that a unit of [`raised`] reads before it writes the first: loads wait for no stores.
const AT_ONCE: usize = 8;

/// See [`raised`](super::raised).
pub fn raised<R: CubeRuntime>(
    y: CubeTensor<R>,
    down: CubeTensor<R>,
    ms: Vec<Factor<R>>,
    finish: Finish<R>,
) -> CubeTensor<R> {
    use DType::{BF16, F16, F32};
    match (y.dtype, down.dtype) {
        (F32, F32) => launch_raise::<R, f32, f32>(y, down, ms, finish),
        (F32, F16) => launch_raise::<R, f32, f16>(y, down, ms, finish),
        (F32, _) => launch_raise::<R, f32, bf16>(y, down, ms, finish),
        (F16, _) => launch_raise::<R, f16, f16>(y, down, ms, finish),
        (BF16, _) => launch_raise::<R, bf16, bf16>(y, down, ms, finish),
        (other, _) => unreachable!("a product is not of {other:?}"),
    }
}

fn launch_raise<R: CubeRuntime, Y: CubeElement + Float, D: CubeElement + Float>(
    y: CubeTensor<R>,
    down: CubeTensor<R>,
    ms: Vec<Factor<R>>,
    finish: Finish<R>,
) -> CubeTensor<R> {
    let (long, rank, long_rows, count) = (width(&y), ms[0].rank(), ms[0].long_rows, ms.len());
    let rows = len(&y) / long;
    let (across, along) = (long.div_ceil(UNITS) as u32, rows.div_ceil(RAISED_ROWS) as u32);
    let Finish { bias_o, more_no, rounded } = finish;
    let (client, biased, summed) = (y.client.clone(), bias_o.is_some(), more_no.is_some());
    // What is absent is never read, but has to be something of its type.
    let absent = || ms[0].values.clone();
    let (bias_o, more_no) = (bias_o.unwrap_or_else(absent), more_no.unwrap_or_else(absent));
    // Columns lie side by side, or a column's ranks do.
    let step = if long_rows { 1 } else { VECTOR };
    raise_kernel::launch::<Y, D, R>(
        &client,
        CubeCount::Static(across, along, 1),
        CubeDim::new_1d(UNITS as u32),
        step,
        VECTOR,
        y.clone().into_array_arg(),
        bias_o.into_array_arg(),
        more_no.into_array_arg(),
        down.into_array_arg(),
        ms.into_iter().map(|m| m.values.into_array_arg()).collect(),
        rows as u32,
        long as u32,
        rank,
        count,
        long_rows,
        biased,
        summed,
        rounded,
    );
    y
}

/// A unit has one column, and holds its ranks while it goes down the rows, [`AT_ONCE`] of them in flight
/// together.
#[cube(launch)]
fn raise_kernel<N: Size, V: Size, Y: Float, D: Float>(
    y: &mut Array<Y>,
    bias: &Array<f32>,
    more: &Array<f32>,
    down: &Array<Vector<D, V>>,
    ms: &Sequence<Array<Vector<f32, N>>>,
    rows: u32,
    long: u32,
    #[comptime] rank: usize,
    #[comptime] count: usize,
    #[comptime] long_rows: bool,
    #[comptime] biased: bool,
    #[comptime] summed: bool,
    #[comptime] rounded: bool,
) {
    let (rows, long) = (rows as usize, long as usize);
    let (column, first) = (ABSOLUTE_POS_X as usize, CUBE_POS_Y as usize * RAISED_ROWS);
    // Of a row of `down`, and of those what a column reads.
    let all = comptime!(count * rank / VECTOR);
    let vectors = comptime!(if long_rows { count * rank / VECTOR } else { rank / VECTOR });
    let mut part = SharedMemory::<Vector<f32, V>>::new(comptime!(RAISED_ROWS * count * rank / VECTOR));
    for round in 0..comptime!((RAISED_ROWS * count * rank / VECTOR).div_ceil(UNITS)) {
        let place = round * UNITS + UNIT_POS as usize;
        let at = first * all + place;
        if place < comptime!(RAISED_ROWS * count * rank / VECTOR) && at < down.len() {
            part[place] = Vector::cast_from(down[at]);
        }
    }
    sync_cube();
    if column < long {
        let mut factors = Array::<f32>::new(comptime!(if long_rows { count * rank } else { rank }));
        let mut own = 0usize;
        let mut before = 0usize;
        #[unroll]
        for number in 0..ms.len() {
            let m = ms.index(number);
            if long_rows {
                #[unroll]
                for r in 0..rank {
                    factors[comptime!(number * rank) + r] = m[r * long + column][0];
                }
            } else {
                let columns = m.len() / comptime!(rank / VECTOR);
                if column >= before && column < before + columns {
                    own = comptime!(number * rank / VECTOR);
                    #[unroll]
                    for r in 0..comptime!(rank / VECTOR) {
                        let vector = m[(column - before) * comptime!(rank / VECTOR) + r];
                        #[unroll]
                        for lane in 0..VECTOR {
                            factors[r * VECTOR + lane] = vector[lane];
                        }
                    }
                }
                before += columns;
            }
        }
        let mut offset = f32::new(0.0);
        if biased {
            offset = bias[column];
        }
        for group in 0..comptime!(RAISED_ROWS / AT_ONCE) {
            let mut values = Array::<f32>::new(AT_ONCE);
            let mut others = Array::<f32>::new(AT_ONCE);
            #[unroll]
            for i in 0..AT_ONCE {
                let row = first + group * AT_ONCE + i;
                values[i] = offset;
                if row < rows {
                    values[i] += f32::cast_from(y[row * long + column]);
                    if summed {
                        others[i] = more[row * long + column];
                    }
                }
            }
            #[unroll]
            for i in 0..AT_ONCE {
                let mut sum = f32::new(0.0);
                #[unroll]
                for r in 0..vectors {
                    let low = part[(group * AT_ONCE + i) * all + own + r];
                    #[unroll]
                    for lane in 0..VECTOR {
                        sum += low[lane] * factors[r * VECTOR + lane];
                    }
                }
                let row = first + group * AT_ONCE + i;
                if row < rows {
                    let mut value = values[i] + sum;
                    if summed {
                        value += others[i];
                    }
                    if rounded {
                        value = f32::cast_from(bf16::cast_from(value));
                    }
                    y[row * long + column] = Y::cast_from(value);
                }
            }
        }
    }
}
