//! Attention backward, from what the forward pass left of each query:
//!
//! ```text
//! p  = exp(q k^T scale - lse)            dv = p^T dout    delta = sum(dout * out)
//! ds = p * (dout v^T - delta) scale      dq = ds k        dk = ds^T q
//! ```

use cubecl::prelude::*;
use half::bf16;

use super::{
    place::{CubeRows, Sizes, Strides, Tokens, keys_seen, last_key},
    tile::{
        COLUMNS, Input, OTHERS, OWN, Output, PIECE, Rows, Sums, add_weighted, load_rows, own_column, own_row,
        row_sum, scores, tile, zeros,
    },
};
use crate::kernels::cube::launch::lanes;

/// Columns that a cube of [`key_gradients`] makes of its results: as many as there are registers for.
pub const PART: usize = 128;

/// The gradient of queries, `[b, s, h, k]`, and `delta`. A cube for every [`OWN`] queries of a head of a
/// batch row; `lse` and `delta` `[b, s, h]`. Inputs are q, k, v, dout, out, and so are strides.
#[cube(launch)]
pub fn query_gradients(
    inputs: &Sequence<Input>,
    dq: &mut Output,
    lse: &Array<f32>,
    delta: &mut Array<f32>,
    bounds: &Array<i32>,
    sizes: &Sizes,
    strides: &Sequence<Strides>,
    #[comptime] dim: usize,
    #[comptime] masked: bool,
    #[comptime] causal: bool,
) {
    let (queries, heads) = (sizes.queries as usize, sizes.heads as usize);
    let cube = CubeRows::of(CUBE_POS, queries, heads, causal);
    let kv_head = cube.head / sizes.group as usize;
    let (start, last) = keys_seen(bounds, &cube, sizes, masked, causal);

    let mut q_tile = tile(OWN, dim);
    let mut dout_tile = tile(OWN, dim);
    let mut k_tile = tile(OTHERS, dim);
    let mut v_tile = tile(OTHERS, dim);
    let own = cube.tokens(queries);
    load_rows(&mut q_tile, inputs.index(0usize), strides.index(0usize).rows(own), OWN, dim);
    let dout_rows = strides.index(3usize).rows(own);
    load_rows(&mut dout_tile, inputs.index(3usize), dout_rows, OWN, dim);
    let out_rows = strides.index(4usize).rows(own);

    let mut lse_of = Array::<f32>::new(2usize);
    let mut delta_of = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let own = own_row() + 8 * half;
        let sum = dots(inputs.index(3usize), dout_rows, inputs.index(4usize), out_rows, own, dim);
        lse_of[half] = f32::new(0.0);
        delta_of[half] = sum;
        if cube.first + own < queries {
            let row = (cube.batch * queries + cube.first + own) * heads + cube.head;
            lse_of[half] = lse[row];
            if own_column() == 0 {
                delta[row] = sum;
            }
        }
    }
    let known = LaneQueries { first: cube.first, last, scale: sizes.scale, lse: lse_of, delta: delta_of };
    let mut sums = zeros(dim);
    let mut key = start;
    while key < last {
        sync_cube();
        let keys = Tokens { batch: cube.batch, head: kv_head, first: key, end: last };
        load_rows(&mut k_tile, inputs.index(1usize), strides.index(1usize).rows(keys), OTHERS, dim);
        load_rows(&mut v_tile, inputs.index(2usize), strides.index(2usize).rows(keys), OTHERS, dim);
        sync_cube();
        let mut dscores = scores(&q_tile, &k_tile, dim);
        let dweights = scores(&dout_tile, &v_tile, dim);
        known.pull(&mut dscores, &dweights, key, causal);
        add_weighted(&mut sums, &dscores, &k_tile, 0usize, dim);
        key += OTHERS;
    }
    let from = (cube.batch * queries * heads + cube.head) * dim;
    write(dq, &sums, from, heads * dim, cube.first, queries);
}

/// What a lane knows of its two queries.
#[derive(CubeType)]
struct LaneQueries {
    /// The cube's first query.
    first: usize,
    /// No key from here on is seen.
    last: usize,
    scale: f32,
    lse: Array<f32>,
    delta: Array<f32>,
}

#[cube]
impl LaneQueries {
    /// Turns the scores of a tile of keys from `key` on into their gradients.
    fn pull(&self, scores: &mut Sums, dweights: &Sums, key: usize, #[comptime] causal: bool) {
        #[unroll]
        for half in 0..2usize {
            let limit = last_key(self.last, self.first + own_row() + 8 * half, causal);
            #[unroll]
            for n in 0..comptime!(OTHERS / COLUMNS) {
                let mut pair = scores.index(n)[half];
                let dpair = dweights.index(n)[half];
                #[unroll]
                for i in 0..2usize {
                    let mut weight = f32::new(0.0);
                    if key + n * COLUMNS + own_column() + i < limit {
                        weight = (pair[i] * self.scale - self.lse[half]).exp();
                    }
                    pair[i] = weight * (dpair[i] - self.delta[half]) * self.scale;
                }
                scores.index_mut(n)[half] = pair;
            }
        }
    }
}

/// `sum(x * y)` of a row of the cube, on each of its four lanes; `x` is rounded as products round it.
#[cube]
fn dots(x: &Input, x_rows: Rows, y: &Input, y_rows: Rows, row: usize, #[comptime] dim: usize) -> f32 {
    let mut sum = f32::new(0.0);
    let row = x_rows.first + row;
    if row < x_rows.end {
        let column = UNIT_POS_PLANE as usize % 4 * comptime!(dim / 16);
        for i in 0..comptime!(dim / 16) {
            let halves =
                Vector::<bf16, Const<4>>::cast_from(x[x_rows.from + row * x_rows.stride + column + i]);
            let x = Vector::<f32, Const<4>>::cast_from(halves);
            sum += lanes(x * y[y_rows.from + row * y_rows.stride + column + i]);
        }
    }
    row_sum(sum)
}

/// The gradients of keys and values, `[b, s, h, k]` of key/value heads. A cube for every [`OWN`] keys of a
/// head of a batch row, and for every [`PART`] of their columns. Inputs are q, k, v, dout, and so are
/// strides.
#[cube(launch)]
pub fn key_gradients(
    inputs: &Sequence<Input>,
    dk: &mut Output,
    dv: &mut Output,
    lse: &Array<f32>,
    delta: &Array<f32>,
    bounds: &Array<i32>,
    sizes: &Sizes,
    strides: &Sequence<Strides>,
    #[comptime] dim: usize,
    #[comptime] masked: bool,
    #[comptime] causal: bool,
) {
    let (queries, keys, heads) = (sizes.queries as usize, sizes.keys as usize, sizes.heads as usize);
    let group = sizes.group as usize;
    let (parts, width) = comptime!((dim.div_ceil(PART), dim / dim.div_ceil(PART)));
    let part = CUBE_POS % parts;
    let cube = CubeRows::of(CUBE_POS / parts, keys, heads / group, false);
    let (start, end) = keys_seen(bounds, &cube, sizes, masked, false);
    let seen = SeenKeys { first: cube.first, start, end };

    let mut k_tile = tile(OWN, dim);
    let mut v_tile = tile(OWN, dim);
    let mut q_tile = tile(OTHERS, dim);
    let mut dout_tile = tile(OTHERS, dim);
    let own = cube.tokens(keys);
    load_rows(&mut k_tile, inputs.index(1usize), strides.index(1usize).rows(own), OWN, dim);
    load_rows(&mut v_tile, inputs.index(2usize), strides.index(2usize).rows(own), OWN, dim);

    let mut from = 0usize;
    if causal {
        from = cube.first;
    }
    // Keys that nobody sees.
    if cube.first >= end || cube.first + OWN <= start {
        from = queries;
    }
    let mut sum_dk = zeros(width);
    let mut sum_dv = zeros(width);
    for member in 0..group {
        let head = cube.head * group + member;
        let mut query = from;
        while query < queries {
            sync_cube();
            let others = Tokens { batch: cube.batch, head, first: query, end: queries };
            load_rows(&mut q_tile, inputs.index(0usize), strides.index(0usize).rows(others), OTHERS, dim);
            load_rows(&mut dout_tile, inputs.index(3usize), strides.index(3usize).rows(others), OTHERS, dim);
            sync_cube();
            let mut lse_of = f32::new(0.0);
            let mut delta_of = f32::new(0.0);
            let own = query + UNIT_POS_PLANE as usize;
            if own < queries {
                let row = (cube.batch * queries + own) * heads + head;
                lse_of = lse[row];
                delta_of = delta[row];
            }
            let known = TileQueries { first: query, scale: sizes.scale, lse: lse_of, delta: delta_of };
            let mut weights = scores(&k_tile, &q_tile, dim);
            let mut dscores = scores(&v_tile, &dout_tile, dim);
            known.pull(&mut weights, &mut dscores, seen, causal);
            let piece = part * comptime!(width / PIECE);
            add_weighted(&mut sum_dv, &weights, &dout_tile, piece, dim);
            add_weighted(&mut sum_dk, &dscores, &q_tile, piece, dim);
            query += OTHERS;
        }
    }
    let from = (cube.batch * keys * cube.heads + cube.head) * dim + part * width;
    write(dk, &sum_dk, from, cube.heads * dim, cube.first, keys);
    write(dv, &sum_dv, from, cube.heads * dim, cube.first, keys);
}

/// The cube's keys, from `first` on; those from `start` on and before `end` are seen.
#[derive(CubeType, Clone, Copy)]
struct SeenKeys {
    first: usize,
    start: usize,
    end: usize,
}

/// What the lanes of a plane know of a tile's queries, one a lane.
#[derive(CubeType)]
struct TileQueries {
    /// The tile's first query.
    first: usize,
    scale: f32,
    lse: f32,
    delta: f32,
}

#[cube]
impl TileQueries {
    /// Turns the scores of the cube's keys into weights, and the gradients of weights into those of scores.
    fn pull(&self, weights: &mut Sums, dweights: &mut Sums, keys: SeenKeys, #[comptime] causal: bool) {
        #[unroll]
        for n in 0..comptime!(OTHERS / COLUMNS) {
            #[unroll]
            for i in 0..2usize {
                let column = n * COLUMNS + own_column() + i;
                let lse = plane_shuffle(self.lse, column as u32);
                let delta = plane_shuffle(self.delta, column as u32);
                #[unroll]
                for half in 0..2usize {
                    let key = keys.first + own_row() + 8 * half;
                    let mut pair = weights.index(n)[half];
                    let mut dpair = dweights.index(n)[half];
                    let mut weight = f32::new(0.0);
                    if key >= keys.start && key < last_key(keys.end, self.first + column, causal) {
                        weight = (pair[i] * self.scale - lse).exp();
                    }
                    pair[i] = weight;
                    dpair[i] = weight * (dpair[i] - delta) * self.scale;
                    weights.index_mut(n)[half] = pair;
                    dweights.index_mut(n)[half] = dpair;
                }
            }
        }
    }
}

/// Writes a cube's rows, from `first` on and none from `end` on.
#[cube]
fn write(to: &mut Output, sums: &Sums, from: usize, stride: usize, first: usize, end: usize) {
    #[unroll]
    for half in 0..2usize {
        let row = first + own_row() + 8 * half;
        if row < end {
            #[unroll]
            for n in 0..sums.len() {
                to[(from + row * stride + n * COLUMNS + own_column()) / 2] = sums.index(n)[half];
            }
        }
    }
}
