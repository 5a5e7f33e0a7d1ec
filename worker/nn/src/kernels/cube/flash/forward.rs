//! Attention forward: softmax while keys pass, and the logarithm of its sum.

use cubecl::prelude::*;

use super::{
    place::{CubeRows, Sizes, Strides, Tokens, keys_seen, last_key},
    tile::{
        COLUMNS, Input, OTHERS, OWN, Output, Sums, Tile, add_weighted, load_rows, own_column, own_row,
        row_max, row_sum, scores, tile, zeros,
    },
};
use crate::kernels::blockwise::OUT;

/// A cube for every [`OWN`] queries of a head of a batch row. `out [b, s, h, k]`, `lse [b, s, h]`; inputs are
/// q, k, v, and so are strides.
#[cube(launch)]
pub fn attend(
    inputs: &Sequence<Input>,
    out: &mut Output,
    lse: &mut Array<f32>,
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
    let mut k_tile = tile(OTHERS, dim);
    let mut v_tile = tile(OTHERS, dim);
    let own = cube.tokens(queries);
    load_rows(&mut q_tile, inputs.index(0usize), strides.index(0usize).rows(own), OWN, dim);
    let mut softmax = Softmax::new(cube.first, last, sizes.scale, dim);
    let mut key = start;
    while key < last {
        sync_cube();
        let keys = Tokens { batch: cube.batch, head: kv_head, first: key, end: last };
        load_rows(&mut k_tile, inputs.index(1usize), strides.index(1usize).rows(keys), OTHERS, dim);
        load_rows(&mut v_tile, inputs.index(2usize), strides.index(2usize).rows(keys), OTHERS, dim);
        sync_cube();
        let scores = scores(&q_tile, &k_tile, dim);
        softmax.pass(scores, &v_tile, key, dim, causal);
        key += OTHERS;
    }

    #[unroll]
    for half in 0..2usize {
        let mut sum = row_sum(softmax.total[half]);
        // A query that sees nothing has an output of 0. What is no number stays so.
        if sum == f32::new(0.0) {
            sum = f32::new(1e-30);
        }
        let query = cube.first + own_row() + 8 * half;
        if query < queries {
            let row = (cube.batch * queries + query) * heads + cube.head;
            #[unroll]
            for n in 0..comptime!(dim / COLUMNS) {
                let pair = softmax.sums.index(n)[half];
                out[(row * dim + n * COLUMNS + own_column()) / 2] = pair / Vector::new(sum);
            }
            if own_column() == 0 {
                lse[row] = softmax.largest[half] + sum.ln();
            }
        }
    }
}

/// What a lane knows of its two rows: the largest score, its part of the sum of weights, which are relative
/// to that, and its part of the weighted values.
#[derive(CubeType)]
struct Softmax {
    /// The cube's first query.
    first: usize,
    /// No key from here on is seen.
    last: usize,
    scale: f32,
    largest: Array<f32>,
    total: Array<f32>,
    sums: Sums,
}

#[cube]
impl Softmax {
    fn new(first: usize, last: usize, scale: f32, #[comptime] dim: usize) -> Self {
        let mut largest = Array::<f32>::new(2usize);
        let mut total = Array::<f32>::new(2usize);
        #[unroll]
        for half in 0..2usize {
            largest[half] = f32::new(OUT as f32);
            total[half] = f32::new(0.0);
        }
        Softmax { first, last, scale, largest, total, sums: zeros(dim) }
    }

    /// Takes the scores of a tile of keys from `key` on, and their values.
    fn pass(
        &mut self,
        scores: Sums,
        v_tile: &Tile,
        key: usize,
        #[comptime] dim: usize,
        #[comptime] causal: bool,
    ) {
        let mut weights = scores;
        #[unroll]
        for half in 0..2usize {
            let limit = last_key(self.last, self.first + own_row() + 8 * half, causal);
            let before = self.largest[half];
            let mut most = before;
            #[unroll]
            for n in 0..comptime!(OTHERS / COLUMNS) {
                let mut pair = weights.index(n)[half];
                #[unroll]
                for i in 0..2usize {
                    pair[i] *= self.scale;
                    if key + n * COLUMNS + own_column() + i < limit {
                        most = max(most, pair[i]);
                    }
                }
                weights.index_mut(n)[half] = pair;
            }
            let most = row_max(most);
            let shrunk = (before - most).exp();
            let mut sum = self.total[half] * shrunk;
            #[unroll]
            for n in 0..comptime!(OTHERS / COLUMNS) {
                let mut pair = weights.index(n)[half];
                #[unroll]
                for i in 0..2usize {
                    let mut weight = f32::new(0.0);
                    if key + n * COLUMNS + own_column() + i < limit {
                        weight = (pair[i] - most).exp();
                    }
                    pair[i] = weight;
                    sum += weight;
                }
                weights.index_mut(n)[half] = pair;
            }
            #[unroll]
            for n in 0..comptime!(dim / COLUMNS) {
                let pair = self.sums.index(n)[half];
                self.sums.index_mut(n)[half] = pair * Vector::new(shrunk);
            }
            self.largest[half] = most;
            self.total[half] = sum;
        }
        add_weighted(&mut self.sums, &weights, v_tile, 0usize, dim);
    }
}
