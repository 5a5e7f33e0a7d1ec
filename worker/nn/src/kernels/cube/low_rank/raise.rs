//! The second kernel of a low-rank update: what it adds to a product, where the product lies, and what
//! finishes that.

use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use cubecl::prelude::*;
use half::bf16;

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
/// `y + down m'`, finished in place: `y [n, long]` that has no other owner, `down [n, r]`.
pub fn raised<R: CubeRuntime>(
    y: CubeTensor<R>,
    down: CubeTensor<R>,
    m: Factor<R>,
    finish: Finish<R>,
) -> CubeTensor<R> {
    let (long, rank) = (width(&y), m.rank());
    let rows = len(&y) / long;
    let (across, along) = (long.div_ceil(UNITS) as u32, rows.div_ceil(RAISED_ROWS) as u32);
    let Finish { bias_o, more_no, rounded } = finish;
    let (client, biased, summed) = (y.client.clone(), bias_o.is_some(), more_no.is_some());
    // What is absent is never read.
    let absent = || y.clone();
    // Columns lie side by side, or a column's ranks do.
    let step = if m.long_rows { 1 } else { VECTOR };
    raise_kernel::launch::<R>(
        &client,
        CubeCount::Static(across, along, 1),
        CubeDim::new_1d(UNITS as u32),
        step,
        VECTOR,
        y.clone().into_array_arg(),
        bias_o.unwrap_or_else(absent).into_array_arg(),
        more_no.unwrap_or_else(absent).into_array_arg(),
        down.into_array_arg(),
        m.values.into_array_arg(),
        rows as u32,
        long as u32,
        rank,
        m.long_rows,
        biased,
        summed,
        rounded,
    );
    y
}

/// A unit has one column, and holds its ranks while it goes down the rows, [`AT_ONCE`] of them in flight
/// together.
#[cube(launch)]
fn raise_kernel<N: Size, V: Size>(
    y: &mut Array<f32>,
    bias: &Array<f32>,
    more: &Array<f32>,
    down: &Array<Vector<f32, V>>,
    m: &Array<Vector<f32, N>>,
    rows: u32,
    long: u32,
    #[comptime] rank: usize,
    #[comptime] long_rows: bool,
    #[comptime] biased: bool,
    #[comptime] summed: bool,
    #[comptime] rounded: bool,
) {
    let (rows, long) = (rows as usize, long as usize);
    let (column, first) = (ABSOLUTE_POS_X as usize, CUBE_POS_Y as usize * RAISED_ROWS);
    let vectors = comptime!(rank / VECTOR);
    let mut part = SharedMemory::<Vector<f32, V>>::new(comptime!(RAISED_ROWS * rank / VECTOR));
    for round in 0..comptime!((RAISED_ROWS * rank / VECTOR).div_ceil(UNITS)) {
        let place = round * UNITS + UNIT_POS as usize;
        let at = first * vectors + place;
        if place < comptime!(RAISED_ROWS * rank / VECTOR) && at < down.len() {
            part[place] = down[at];
        }
    }
    sync_cube();
    if column < long {
        let mut factors = Array::<f32>::new(rank);
        #[unroll]
        for r in 0..comptime!(if long_rows { rank } else { rank / VECTOR }) {
            if long_rows {
                factors[r] = m[r * long + column][0];
            } else {
                let vector = m[column * vectors + r];
                #[unroll]
                for lane in 0..VECTOR {
                    factors[r * VECTOR + lane] = vector[lane];
                }
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
                    values[i] += y[row * long + column];
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
                    let low = part[(group * AT_ONCE + i) * vectors + r];
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
                    y[row * long + column] = value;
                }
            }
        }
    }
}
