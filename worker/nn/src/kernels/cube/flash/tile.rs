//! What the kernels of attention share: tiles in shared memory, and products of a plane with them.
//!
//! Which lane holds which element is as in the PTX ISA, "Matrix fragments for mma.m16n8k16": of sums, lane `4
//! g + t` holds columns `2 t` and `2 t + 1` of rows `g` and `g + 8`, a pair each.

use cubecl::{cmma::MmaDefinition, ir::MatrixIdent, prelude::*};
use half::bf16;

/// Planes of a cube.
pub const PLANES: usize = 4;
/// Rows of a plane: those of an instruction.
pub const ROWS: usize = 16;
/// Rows of a cube, which its results are for.
pub const OWN: usize = PLANES * ROWS;
/// Rows of the other side, keys for queries and queries for keys, in shared memory at once.
pub const OTHERS: usize = 32;
/// Elements of a vector of shared memory: 16 bytes, as `ldmatrix` loads them.
pub const PIECE: usize = 8;
/// Columns of a product of one instruction.
pub const COLUMNS: usize = 8;
/// Units of a plane.
const LANES: usize = 32;
/// Units of a cube.
pub const UNITS: usize = PLANES * LANES;

/// Input as it is loaded, 16 bytes at a time.
pub type Input = Array<Vector<f32, Const<4>>>;
/// Output, as lanes hold it.
pub type Output = Array<Vector<f32, Const<2>>>;
/// Rows in shared memory. A piece lies between them, so that eight rows' pieces are in different banks.
pub type Tile = SharedMemory<Vector<bf16, Const<8>>>;
/// A plane's part of a sum: two pairs for every [`COLUMNS`].
pub type Sums = Sequence<Array<Vector<f32, Const<2>>>>;
/// Registers of operands.
type Halves = Array<Vector<bf16, Const<2>>>;

/// Rows of an input, in vectors of four: of a head of a batch row, from `first` on and none from `end` on.
#[derive(CubeType, Clone, Copy)]
pub struct Rows {
    /// Where row 0 lies.
    pub from: usize,
    /// From row to row.
    pub stride: usize,
    pub first: usize,
    pub end: usize,
}

/// A tile for so many rows.
#[cube]
pub fn tile(#[comptime] rows: usize, #[comptime] dim: usize) -> Tile {
    Tile::new(comptime!(rows * (dim / PIECE + 1)))
}

/// Fills a tile with rows, rounded; zeros where there are none.
#[cube]
pub fn load_rows(
    tile: &mut Tile,
    input: &Input,
    rows: Rows,
    #[comptime] count: usize,
    #[comptime] dim: usize,
) {
    let pieces = comptime!(dim / PIECE);
    for round in 0..comptime!((count * pieces).div_ceil(UNITS)) {
        let place = round * UNITS + UNIT_POS as usize;
        if place < comptime!(count * pieces) {
            let (row, piece) = (place / pieces, place % pieces);
            let mut eight = Vector::<bf16, Const<8>>::new(bf16::new(0.0));
            if rows.first + row < rows.end {
                let at = rows.from + (rows.first + row) * rows.stride + 2 * piece;
                let (low, high) = (input[at], input[at + 1]);
                #[unroll]
                for i in 0..4usize {
                    eight[i] = bf16::cast_from(low[i]);
                    eight[i + 4] = bf16::cast_from(high[i]);
                }
            }
            tile[row * comptime!(pieces + 1) + piece] = eight;
        }
    }
}

/// Sums of this width, zero.
#[cube]
pub fn zeros(#[comptime] width: usize) -> Sums {
    let mut sums = Sums::new();
    #[unroll]
    for _ in 0..comptime!(width / COLUMNS) {
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        sum[0] = Vector::new(0.0f32);
        sum[1] = Vector::new(0.0f32);
        sums.push(sum);
    }
    sums
}

/// The plane's part of `own other^T`: its rows of one tile with all of another.
#[cube]
pub fn scores(own: &Tile, other: &Tile, #[comptime] dim: usize) -> Sums {
    let mut sums = zeros(OTHERS);
    for step in 0..comptime!(dim / ROWS) {
        let left = block(own, plane() * ROWS, 2 * step, dim, false);
        #[unroll]
        for pair in 0..comptime!(OTHERS / ROWS) {
            let right = block(other, pair * ROWS, 2 * step, dim, false);
            multiply_add(sums.index_mut(2 * pair), &left, right[0], right[2]);
            multiply_add(sums.index_mut(2 * pair + 1), &left, right[1], right[3]);
        }
    }
    sums
}

/// Adds the product of weights, rounded, with the columns of a tile from a piece on.
#[cube]
pub fn add_weighted(sums: &mut Sums, weights: &Sums, other: &Tile, piece: usize, #[comptime] dim: usize) {
    #[unroll]
    for step in 0..comptime!(OTHERS / ROWS) {
        let mut left = Halves::new(4usize);
        #[unroll]
        for i in 0..4usize {
            left[i] = Vector::cast_from(weights.index(2 * step + i / 2)[i % 2]);
        }
        #[unroll]
        for pair in 0..comptime!(sums.len() / 2) {
            let right = block(other, step * ROWS, piece + 2 * pair, dim, true);
            multiply_add(sums.index_mut(2 * pair), &left, right[0], right[1]);
            multiply_add(sums.index_mut(2 * pair + 1), &left, right[2], right[3]);
        }
    }
}

/// A block of 16 x 16 of a tile in registers: its upper and lower half on the left, then on the right. As
/// they lie, rows are those of a left operand or columns of a right one; transposed, rows of a right one.
#[cube]
fn block(
    tile: &Tile,
    row: usize,
    piece: usize,
    #[comptime] dim: usize,
    #[comptime] transposed: bool,
) -> Halves {
    let lane = UNIT_POS_PLANE as usize;
    let at = (row + lane % ROWS) * comptime!(dim / PIECE + 1) + piece + lane / ROWS;
    let definition = MmaDefinition::<bf16, bf16, f32>::new(ROWS, COLUMNS, ROWS);
    definition.load_matrix::<Vector<bf16, Const<8>>, Const<2>>(
        &tile.slice(at, at + 1),
        MatrixIdent::A,
        4usize,
        transposed,
    )
}

/// Adds the product of two blocks; the right one's halves lie one above the other.
#[cube]
fn multiply_add(
    sum: &mut Array<Vector<f32, Const<2>>>,
    left: &Halves,
    upper: Vector<bf16, Const<2>>,
    lower: Vector<bf16, Const<2>>,
) {
    let mut right = Halves::new(2usize);
    right[0] = upper;
    right[1] = lower;
    let definition = MmaDefinition::<bf16, bf16, f32>::new(ROWS, COLUMNS, ROWS);
    let added = definition.execute(left, &right, sum);
    sum[0] = added[0];
    sum[1] = added[1];
}

/// The number of this plane.
#[cube]
pub fn plane() -> usize {
    UNIT_POS as usize / LANES
}

/// The first of the two rows of the cube that this lane holds a part of; the other is 8 below.
#[cube]
pub fn own_row() -> usize {
    plane() * ROWS + UNIT_POS_PLANE as usize / 4
}

/// The first of the two columns of each [`COLUMNS`] that this lane holds.
#[cube]
pub fn own_column() -> usize {
    UNIT_POS_PLANE as usize % 4 * 2
}

/// The sum of what the four lanes of a row hold, on each of them.
#[cube]
pub fn row_sum(value: f32) -> f32 {
    let pair = value + plane_shuffle_xor(value, 1u32);
    pair + plane_shuffle_xor(pair, 2u32)
}

/// The largest of it.
#[cube]
pub fn row_max(value: f32) -> f32 {
    let pair = max(value, plane_shuffle_xor(value, 1u32));
    max(pair, plane_shuffle_xor(pair, 2u32))
}
