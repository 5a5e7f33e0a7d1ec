//! The first kernel of a low-rank update: what it multiplies first, and the rounded input of the product
//! beside it.
//!
//! A cube has [`ROWS`] rows of `x`, and passes a [`TILE`] of their elements after the other
//! through shared memory. Where the long side of `m` lies in rows (`a`), planes share the ranks; where it
//! lies in columns (`b`), units share the tile's elements, and add up at the end. Either way each number is
//! added up in an order that depends on shapes alone.

use burn::tensor::DType;
use burn_cubecl::{CubeElement, CubeRuntime, tensor::CubeTensor};
use cubecl::prelude::*;
use half::{bf16, f16};

use super::{
    super::launch::{UNITS, empty, lanes, len, width},
    factor::{PLANE, ScaledFactor, VECTOR},
};

/// Rows of a cube.
const ROWS: usize = 16;
/// Elements of each row that are in shared memory at once.
const TILE: usize = 256;
/// Ranks of a cube; more take several cubes.
const RANKS: usize = 32;

/// A reduction; returns `x`, rounded if it is to be.
pub fn launch<R: CubeRuntime>(
    x: CubeTensor<R>,
    ms: Vec<ScaledFactor<R>>,
    downs: Vec<CubeTensor<R>>,
    narrow: Option<DType>,
) -> CubeTensor<R> {
    use DType::{BF16, F16, F32};
    match (x.dtype, narrow, downs[0].dtype) {
        (BF16, _, _) => launch_reduction::<R, bf16, bf16, bf16>(x, ms, downs, false),
        (F16, _, _) => launch_reduction::<R, f16, f16, f16>(x, ms, downs, false),
        (_, Some(F16), F32) => launch_reduction::<R, f32, f16, f32>(x, ms, downs, true),
        (_, Some(F16), _) => launch_reduction::<R, f32, f16, f16>(x, ms, downs, true),
        (_, Some(_), F32) => launch_reduction::<R, f32, bf16, f32>(x, ms, downs, true),
        (_, Some(_), _) => launch_reduction::<R, f32, bf16, bf16>(x, ms, downs, true),
        (_, None, _) => launch_reduction::<R, f32, bf16, f32>(x, ms, downs, false),
    }
}

/// A reduction by one matrix that fits, or by several of one rank. One output for each, or one for all, in
/// which they lie side by side.
fn launch_reduction<
    R: CubeRuntime,
    I: CubeElement + Float,
    O: CubeElement + Float,
    D: CubeElement + Float,
>(
    x: CubeTensor<R>,
    ms: Vec<ScaledFactor<R>>,
    downs: Vec<CubeTensor<R>>,
    narrow: bool,
) -> CubeTensor<R> {
    let (long, rank, long_rows) = (width(&x), ms[0].0.rank(), ms[0].0.long_rows);
    let (rows, joined) = (len(&x) / long, downs.len() < ms.len());
    // What is not asked for is never written, and takes 8 bytes: an argument has to be something of its type.
    let shape = if narrow { x.meta.shape().clone() } else { [1, VECTOR].into() };
    let narrowed = empty(&x, shape, O::dtype());
    let cubes = ms.len() * (rank / rank.min(RANKS));
    let count = CubeCount::Static(rows.div_ceil(ROWS) as u32, cubes as u32, 1);
    let (client, dim) = (x.client.clone(), CubeDim::new_1d(UNITS as u32));
    let (input, rounded) = (x.clone().into_array_arg(), narrowed.clone().into_array_arg());
    let factors = ms.iter().map(|(_, factor)| *factor as f32).collect();
    let place = |number: usize| downs[if joined { 0 } else { number }].clone().into_array_arg();
    let outputs = (0..ms.len()).map(place);
    let matrices = ms.into_iter().map(|(m, _)| m.values.into_array_arg());
    if long_rows {
        reduce_by_rows::launch::<I, O, D, R>(
            &client,
            count,
            dim,
            VECTOR,
            input,
            matrices.collect(),
            factors,
            outputs.collect(),
            rounded,
            rows as u32,
            rank,
            joined,
            narrow,
        );
    } else {
        reduce_by_columns::launch::<I, O, D, R>(
            &client,
            count,
            dim,
            VECTOR,
            input,
            matrices.collect(),
            factors,
            outputs.collect(),
            rounded,
            rows as u32,
            rank,
            joined,
            narrow,
        );
    }
    if narrow { narrowed } else { x }
}

/// Which vectors of a row are read.
#[derive(CubeType, Clone, Copy)]
struct Columns {
    from: usize,
    count: usize,
}

/// Brings a tile of a cube's rows into shared memory, zeros where there is nothing, and rounds it on the way
/// if it is wanted.
#[cube]
fn stage<N: Size, I: Float, O: Float>(
    x: &Array<Vector<I, N>>,
    narrowed: &mut Array<Vector<O, N>>,
    tile: &mut SharedMemory<Vector<f32, N>>,
    columns: Columns,
    number: usize,
    rows: usize,
    #[comptime] narrow: bool,
) {
    let at_once = comptime!(TILE / VECTOR);
    let vectors = x.len() / rows;
    #[unroll]
    for part in 0..comptime!(ROWS * TILE / VECTOR / UNITS) {
        let place = part * UNITS + UNIT_POS as usize;
        let (row, column) =
            (CUBE_POS_X as usize * ROWS + place / at_once, number * at_once + place % at_once);
        let mut value = Vector::<f32, N>::new(0.0);
        if row < rows && column < columns.count {
            let at = row * vectors + columns.from + column;
            value = Vector::cast_from(x[at]);
            if narrow && CUBE_POS_Y == 0 {
                narrowed[at] = Vector::cast_from(value);
            }
        }
        tile[place] = value;
    }
}

/// A reduction by each `m [r, long]`: a cube has one of them, or [`RANKS`] of its ranks, each plane a few
/// (`ranks`), and its lanes the elements.
#[cube(launch)]
fn reduce_by_rows<N: Size, I: Float, O: Float, D: Float>(
    x: &Array<Vector<I, N>>,
    ms: &Sequence<Array<Vector<f32, N>>>,
    factors: &Sequence<f32>,
    downs: &mut Sequence<Array<D>>,
    narrowed: &mut Array<Vector<O, N>>,
    rows: u32,
    #[comptime] rank: usize,
    #[comptime] joined: bool,
    #[comptime] narrow: bool,
) {
    let columns = comptime!(TILE / VECTOR);
    let ranks = comptime!(rank.min(RANKS) * PLANE / UNITS);
    let parts = comptime!(rank / rank.min(RANKS));
    let (rows, lane) = (rows as usize, UNIT_POS as usize % PLANE);
    let vectors = x.len() / rows;
    let (mine, part) = (CUBE_POS_Y as usize / parts, CUBE_POS_Y as usize % parts);
    let first = part * RANKS + UNIT_POS as usize / PLANE * ranks;
    let mut tile = SharedMemory::<Vector<f32, N>>::new(ROWS * columns);
    let mut sums = Array::<f32>::new(ROWS * ranks);
    #[unroll]
    for i in 0..comptime!(ROWS * ranks) {
        sums[i] = f32::new(0.0);
    }
    for number in 0..vectors.div_ceil(columns) {
        let all = Columns { from: 0, count: vectors };
        stage::<N, I, O>(x, narrowed, &mut tile, all, number, rows, narrow);
        sync_cube();
        for part in 0..comptime!(columns / PLANE) {
            let column = part * PLANE + lane;
            let at = number * columns + column;
            if at < vectors {
                let mut values = Array::<Vector<f32, N>>::new(ranks);
                #[unroll]
                for number in 0..ms.len() {
                    if mine == number {
                        let m = ms.index(number);
                        #[unroll]
                        for r in 0..ranks {
                            values[r] = m[(first + r) * vectors + at];
                        }
                    }
                }
                #[unroll]
                for row in 0..ROWS {
                    let value = tile[row * columns + column];
                    #[unroll]
                    for r in 0..ranks {
                        sums[row * ranks + r] += lanes(value * values[r]);
                    }
                }
            }
        }
        sync_cube();
    }
    #[unroll]
    for row in 0..ROWS {
        #[unroll]
        for r in 0..ranks {
            let sum = plane_sum(sums[row * ranks + r]);
            let to = CUBE_POS_X as usize * ROWS + row;
            if lane == 0 && to < rows {
                #[unroll]
                for number in 0..ms.len() {
                    if mine == number {
                        let down = downs.index_mut(number);
                        let mut at = to * rank;
                        if joined {
                            at = (to * ms.len() + number) * rank;
                        }
                        down[at + first + r] = D::cast_from(sum * *factors.index(number));
                    }
                }
            }
        }
    }
}

/// A reduction by each `m [long, r]`: a cube has one of them, or [`RANKS`] of its ranks, and of several the
/// columns that are its own; a unit has one of `ranks` vectors of ranks, and one in so many of the tile's
/// vectors.
#[cube(launch)]
fn reduce_by_columns<N: Size, I: Float, O: Float, D: Float>(
    x: &Array<Vector<I, N>>,
    ms: &Sequence<Array<Vector<f32, N>>>,
    factors: &Sequence<f32>,
    downs: &mut Sequence<Array<Vector<D, N>>>,
    narrowed: &mut Array<Vector<O, N>>,
    rows: u32,
    #[comptime] rank: usize,
    #[comptime] joined: bool,
    #[comptime] narrow: bool,
) {
    let columns = comptime!(TILE / VECTOR);
    let ranks = comptime!(rank.min(RANKS) / VECTOR);
    let sharers = comptime!(UNITS / ranks);
    let parts = comptime!(rank / rank.min(RANKS));
    let (rows, unit) = (rows as usize, UNIT_POS as usize);
    let (layer, part) = (CUBE_POS_Y as usize / parts, CUBE_POS_Y as usize % parts);
    let (mine, sharer) = (unit % ranks, unit / ranks);
    let first = part * comptime!(RANKS / VECTOR);
    let mut from = 0usize;
    let mut count = 0usize;
    let mut before = 0usize;
    #[unroll]
    for number in 0..ms.len() {
        let long = ms.index(number).len() / rank;
        if layer == number {
            from = before;
            count = long;
        }
        before += long;
    }
    let mut tile = SharedMemory::<Vector<f32, N>>::new(ROWS * columns);
    let mut sums = Array::<Vector<f32, N>>::new(ROWS);
    #[unroll]
    for row in 0..ROWS {
        sums[row] = Vector::new(0.0);
    }
    for number in 0..count.div_ceil(columns) {
        let own = Columns { from, count };
        stage::<N, I, O>(x, narrowed, &mut tile, own, number, rows, narrow);
        sync_cube();
        for part in 0..comptime!(columns.div_ceil(sharers)) {
            let column = part * sharers + sharer;
            let at = number * columns + column;
            if column < columns && at < count {
                let mut weights = Array::<Vector<f32, N>>::new(VECTOR);
                #[unroll]
                for number in 0..ms.len() {
                    if layer == number {
                        let m = ms.index(number);
                        #[unroll]
                        for lane in 0..VECTOR {
                            weights[lane] = m[(at * VECTOR + lane) * comptime!(rank / VECTOR) + first + mine];
                        }
                    }
                }
                #[unroll]
                for lane in 0..VECTOR {
                    #[unroll]
                    for row in 0..ROWS {
                        sums[row] += weights[lane] * Vector::new(tile[row * columns + column][lane]);
                    }
                }
            }
        }
        sync_cube();
    }
    // Units of a plane that share a vector of ranks are `ranks` lanes apart.
    #[unroll]
    for row in 0..ROWS {
        let mut sum = sums[row];
        #[unroll]
        for step in 0..comptime!((PLANE / ranks).trailing_zeros()) {
            sum += plane_shuffle_xor(sum, comptime!((ranks as u32) << step));
        }
        if unit % PLANE < ranks {
            tile[(unit / PLANE * ROWS + row) * ranks + mine] = sum;
        }
    }
    sync_cube();
    if unit < ROWS * ranks {
        let to = CUBE_POS_X as usize * ROWS + unit / ranks;
        let mut sum = Vector::<f32, N>::new(0.0);
        #[unroll]
        for plane in 0..comptime!(UNITS / PLANE) {
            sum += tile[(plane * ROWS) * ranks + unit];
        }
        if to < rows {
            #[unroll]
            for number in 0..ms.len() {
                if layer == number {
                    let down = downs.index_mut(number);
                    let mut row = to;
                    if joined {
                        row = to * ms.len() + number;
                    }
                    let scaled = sum * Vector::new(*factors.index(number));
                    down[row * comptime!(rank / VECTOR) + first + mine] = Vector::cast_from(scaled);
                }
            }
        }
    }
}
