//! What a low-rank update adds to a matrix product, in two kernels beside the product instead of five around
//! it.
//!
//! ```text
//! reduced   x m, times a factor, and x rounded for the product beside it, while x is read once
//! raised    y + bias + (x m) m' + more, where the product y lies
//! ```
//!
//! Forward `m` is `a^T` and `m'` is `b^T`; backward they are `b` and `a`. Sums are float32 and products
//! exact, whatever tensor cores round. That is for ranks of 8, 16, 32 and 64, and sides of whole vectors. All
//! others are products of their own ([`product`]), which may round.
//!
//! A cube of [`reduced`] has [`ROWS`] rows of `x`, and passes a [`TILE`] of their elements after the other
//! through shared memory. Where the long side of `m` lies in rows (`a`), planes share the ranks; where it
//! lies in columns (`b`), units share the tile's elements, and add up at the end. Either way each number is
//! added up in an order that depends on shapes alone.

mod factor;
mod raise;

use burn::tensor::DType;
use burn_cubecl::{CubeElement, CubeRuntime, kernel::cast, ops::numeric::mul_scalar, tensor::CubeTensor};
use cubecl::prelude::*;
use half::{bf16, f16};

pub use self::factor::Factor;
use self::{
    factor::{PLANE, VECTOR},
    raise::raised,
};
use super::{
    launch::{UNITS, empty, lanes, len, width},
    pointwise::{Finish, finished},
    product::product,
};

/// Rows of a cube of [`reduced`].
const ROWS: usize = 16;
/// Elements of each row that are in shared memory at once.
const TILE: usize = 256;
/// Ranks of a cube of [`reduced`]; more take several cubes.
const RANKS: usize = 32;

/// `x w + factor * (x m) m'`, finished, and `factor * x m`: a layer with its update forward, or the gradient
/// of its input. `x [n, k]` float32, contiguous; `w [k, o]`, to whose type `x` is rounded; `m` reduces and
/// `m'` raises, and `factor` is what is between them.
pub fn applied<R: CubeRuntime>(
    x: CubeTensor<R>,
    w: CubeTensor<R>,
    [m, raising]: [Factor<R>; 2],
    factor: f64,
    finish: Finish<R>,
) -> [CubeTensor<R>; 2] {
    let (mut downs, narrowed) = reduced(x.clone(), vec![(m, factor)], narrow(w.dtype));
    let down = downs.remove(0);
    let y = product(narrowed.unwrap_or(x), w);
    [added(y, down.clone(), raising, finish), down]
}

/// `y + down m'`, finished: `y` that has no other owner, in place.
pub fn added<R: CubeRuntime>(
    y: CubeTensor<R>,
    down: CubeTensor<R>,
    raising: Factor<R>,
    finish: Finish<R>,
) -> CubeTensor<R> {
    if raising.fits() {
        return raised(y, down, raising, finish);
    }
    let low = product(down, raising.raising());
    let Finish { bias_o, more_no, rounded } = finish;
    let y = finished(y, Finish { bias_o, more_no: Some(low), rounded: false });
    finished(y, Finish { bias_o: None, more_no, rounded })
}

/// A matrix that reduces, and what it is multiplied with.
pub type Scaled<R> = (Factor<R>, f64);

/// The type that products with a weight of this one round to; none where they do not round.
pub fn narrow(weight: DType) -> Option<DType> {
    Some(weight).filter(|dtype| matches!(dtype, DType::BF16 | DType::F16))
}

/// `factor * x m` `[n, r]` of `x [n, long]` for each matrix, and `x` in the type `narrow` if there is one.
pub fn reduced<R: CubeRuntime>(
    x: CubeTensor<R>,
    ms: Vec<Scaled<R>>,
    narrow: Option<DType>,
) -> (Vec<CubeTensor<R>>, Option<CubeTensor<R>>) {
    let together = |(m, _): &Scaled<R>| m.fits() && m.long_rows && m.rank() == ms[0].0.rank();
    if ms.len() > 1 && !ms.iter().all(together) {
        let mut narrowed = None;
        let each = ms.into_iter().enumerate().map(|(number, m)| {
            let (mut downs, first) = reduced(x.clone(), vec![m], narrow.filter(|_| number == 0));
            narrowed = narrowed.take().or(first);
            downs.remove(0)
        });
        return (each.collect(), narrowed);
    }
    if !ms.iter().all(|(m, _)| m.fits()) {
        let down = |(m, factor): &Scaled<R>| {
            mul_scalar(product(x.clone(), m.reducing()), InputScalar::new(*factor, DType::F32))
        };
        let downs = ms.iter().map(down).collect();
        return (downs, narrow.map(|dtype| cast(x, dtype)));
    }
    match narrow {
        Some(DType::F16) => launch_reduction::<R, f16>(x, ms, true),
        narrow => launch_reduction::<R, bf16>(x, ms, narrow.is_some()),
    }
}

/// [`reduced`] by one matrix that fits, or by several that lie in rows and are of one rank.
fn launch_reduction<R: CubeRuntime, O: CubeElement + Float>(
    x: CubeTensor<R>,
    ms: Vec<Scaled<R>>,
    narrow: bool,
) -> (Vec<CubeTensor<R>>, Option<CubeTensor<R>>) {
    let (long, rank, long_rows) = (width(&x), ms[0].0.rank(), ms[0].0.long_rows);
    let rows = len(&x) / long;
    let downs: Vec<_> = ms.iter().map(|_| empty(&x, [rows, rank].into(), DType::F32)).collect();
    // What is not asked for is never written, and takes 8 bytes: an argument has to be something of its type.
    let shape = if narrow { x.meta.shape().clone() } else { [1, VECTOR].into() };
    let narrowed = empty(&x, shape, O::dtype());
    let cubes = ms.len() * rank / rank.min(RANKS);
    let count = CubeCount::Static(rows.div_ceil(ROWS) as u32, cubes as u32, 1);
    let (client, dim) = (x.client.clone(), CubeDim::new_1d(UNITS as u32));
    let (x, rounded) = (x.into_array_arg(), narrowed.clone().into_array_arg());
    let mut outputs = downs.iter().map(|down| down.clone().into_array_arg());
    if long_rows {
        let factors = ms.iter().map(|(_, factor)| *factor as f32).collect();
        let matrices = ms.into_iter().map(|(m, _)| m.values.into_array_arg()).collect();
        let outputs = outputs.collect();
        reduce_by_rows::launch::<O, R>(
            &client,
            count,
            dim,
            VECTOR,
            x,
            matrices,
            factors,
            outputs,
            rounded,
            rows as u32,
            rank,
            narrow,
        );
    } else if let (Some((m, factor)), Some(down)) = (ms.into_iter().next(), outputs.next()) {
        reduce_by_columns::launch::<O, R>(
            &client,
            count,
            dim,
            VECTOR,
            x,
            m.values.into_array_arg(),
            down,
            rounded,
            rows as u32,
            factor as f32,
            rank,
            narrow,
        );
    }
    (downs, narrow.then_some(narrowed))
}

/// Brings a tile of a cube's rows into shared memory, zeros where there is nothing, and rounds it on the way
/// if it is wanted.
#[cube]
fn stage<N: Size, O: Float>(
    x: &Array<Vector<f32, N>>,
    narrowed: &mut Array<Vector<O, N>>,
    tile: &mut SharedMemory<Vector<f32, N>>,
    number: usize,
    rows: usize,
    #[comptime] narrow: bool,
) {
    let columns = comptime!(TILE / VECTOR);
    let vectors = x.len() / rows;
    #[unroll]
    for part in 0..comptime!(ROWS * TILE / VECTOR / UNITS) {
        let place = part * UNITS + UNIT_POS as usize;
        let (row, column) =
            (CUBE_POS_X as usize * ROWS + place / columns, number * columns + place % columns);
        let mut value = Vector::<f32, N>::new(0.0);
        if row < rows && column < vectors {
            value = x[row * vectors + column];
            if narrow && CUBE_POS_Y == 0 {
                narrowed[row * vectors + column] = Vector::cast_from(value);
            }
        }
        tile[place] = value;
    }
}

/// [`reduced`] by each `m [r, long]`: a cube has one of them, or [`RANKS`] of its ranks, each plane a few
/// (`ranks`), and its lanes the elements.
#[cube(launch)]
fn reduce_by_rows<N: Size, O: Float>(
    x: &Array<Vector<f32, N>>,
    ms: &Sequence<Array<Vector<f32, N>>>,
    factors: &Sequence<f32>,
    downs: &mut Sequence<Array<f32>>,
    narrowed: &mut Array<Vector<O, N>>,
    rows: u32,
    #[comptime] rank: usize,
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
        stage::<N, O>(x, narrowed, &mut tile, number, rows, narrow);
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
                        down[to * rank + first + r] = sum * *factors.index(number);
                    }
                }
            }
        }
    }
}

/// [`reduced`] by `m [long, r]`: a unit has one of `ranks` vectors of ranks, and one in so many of the tile's
/// vectors.
#[cube(launch)]
fn reduce_by_columns<N: Size, O: Float>(
    x: &Array<Vector<f32, N>>,
    m: &Array<Vector<f32, N>>,
    down: &mut Array<Vector<f32, N>>,
    narrowed: &mut Array<Vector<O, N>>,
    rows: u32,
    factor: f32,
    #[comptime] rank: usize,
    #[comptime] narrow: bool,
) {
    let columns = comptime!(TILE / VECTOR);
    let ranks = comptime!(rank.min(RANKS) / VECTOR);
    let sharers = comptime!(UNITS / ranks);
    let (rows, unit) = (rows as usize, UNIT_POS as usize);
    let vectors = x.len() / rows;
    let (mine, sharer) = (unit % ranks, unit / ranks);
    let first = CUBE_POS_Y as usize * comptime!(RANKS / VECTOR);
    let mut tile = SharedMemory::<Vector<f32, N>>::new(ROWS * columns);
    let mut sums = Array::<Vector<f32, N>>::new(ROWS);
    #[unroll]
    for row in 0..ROWS {
        sums[row] = Vector::new(0.0);
    }
    for number in 0..vectors.div_ceil(columns) {
        stage::<N, O>(x, narrowed, &mut tile, number, rows, narrow);
        sync_cube();
        for part in 0..comptime!(columns.div_ceil(sharers)) {
            let column = part * sharers + sharer;
            let at = number * columns + column;
            if column < columns && at < vectors {
                #[unroll]
                for lane in 0..VECTOR {
                    let factors = m[(at * VECTOR + lane) * comptime!(rank / VECTOR) + first + mine];
                    #[unroll]
                    for row in 0..ROWS {
                        sums[row] += factors * Vector::new(tile[row * columns + column][lane]);
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
            down[to * comptime!(rank / VECTOR) + first + mine] = sum * Vector::new(factor);
        }
    }
}
