//! A tile of attention's scores: softmax under a mask, made again, and back. One cube a row, in place.
//!
//! A row is one query of one head: rows are ordered `[b, h, g, n]`, with `g` query heads of a key/value head
//! `h` and `n` queries of the tile. What is known of a query (`lse`, `delta`) is ordered `[b, n, h, g]`, as
//! attention's inputs are.

use burn::tensor::{DType, Int, Tensor, backend::Backend};
use burn_cubecl::{
    BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, kernel::into_contiguous, ops::permute,
    tensor::CubeTensor,
};
use cubecl::{prelude::*, zspace::metadata::Metadata};

use super::launch::{by_row, cube_max, cube_sum, empty, floats, len, primitive, width, wrapped};
use crate::kernels::blockwise::{Keys, OUT, Scores};

impl<R, F, I, BT> Scores for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn weigh(scores: Tensor<Self, 4>, seen: &Keys<Self>) -> (Tensor<Self, 4>, Tensor<Self, 3>) {
        let [batch, heads, _, _] = scores.dims();
        let scores = floats(scores);
        let lse = empty(&scores, [batch, seen.queries, heads * seen.group].into(), DType::F32);
        run(&scores, &lse, heads, seen, true);
        (wrapped(scores), wrapped(lse))
    }

    fn weigh_again(scores: Tensor<Self, 4>, lse_bnh: Tensor<Self, 3>, seen: &Keys<Self>) -> Tensor<Self, 4> {
        let heads = scores.dims()[1];
        let scores = floats(scores);
        run(&scores, &floats(lse_bnh), heads, seen, false);
        wrapped(scores)
    }

    fn pull(
        weights: Tensor<Self, 4>,
        dweights: Tensor<Self, 4>,
        delta_bnh: Tensor<Self, 3>,
        seen: &Keys<Self>,
    ) -> Tensor<Self, 4> {
        let heads = weights.dims()[1];
        let (weights, dweights) = (floats(weights), floats(dweights));
        let (keys, client) = (width(&weights), weights.client.clone());
        let (count, dim) = by_row(&weights, len(&weights) / keys, keys);
        pull_kernel::launch::<R>(
            &client,
            count,
            dim,
            weights.into_array_arg(),
            dweights.clone().into_array_arg(),
            floats(delta_bnh).into_array_arg(),
            keys as u32,
            heads as u32,
            seen.group as u32,
            seen.queries as u32,
            seen.scale as f32,
        );
        wrapped(dweights)
    }

    fn by_head(x_bshk: Tensor<Self, 4>) -> Tensor<Self, 4> {
        let [batch, tokens, heads, dim] = x_bshk.dims();
        if heads == 1 {
            // The same memory, but strides in order: kernels that copy boxes step from matrix to matrix by
            // the innermost stride alone.
            return x_bshk.reshape([batch, 1, tokens, dim]);
        }
        let x: CubeTensor<R> = primitive(x_bshk);
        let strides = x.meta.strides();
        // Segments: heads lie further apart than they do, which products recognise.
        let swapped = strides[1] == dim && strides[3] == 1 && strides[0] < strides[2];
        let as_it_is = swapped || lies_by_head(&x);
        let x_bhsk = permute(x, &[0, 2, 1, 3]);
        wrapped(if as_it_is { x_bhsk } else { into_contiguous(x_bhsk) })
    }

    fn dots(x_bshk: Tensor<Self, 4>, y_bshk: Tensor<Self, 4>) -> (Tensor<Self, 3>, Tensor<Self, 4>) {
        let [batch, tokens, heads, dim] = x_bshk.dims();
        let (x, y) = (floats(x_bshk), floats(y_bshk));
        let (sums, client) = (empty(&x, [batch, tokens, heads].into(), DType::F32), x.client.clone());
        let (count, cube) = by_row(&x, batch * tokens * heads, dim);
        let transposes = heads > 1;
        // What is not asked for is never written.
        let by_head =
            if transposes { empty(&x, [batch, heads, tokens, dim].into(), DType::F32) } else { x.clone() };
        dots_kernel::launch::<R>(
            &client,
            count,
            cube,
            x.into_array_arg(),
            y.into_array_arg(),
            sums.clone().into_array_arg(),
            by_head.clone().into_array_arg(),
            dim as u32,
            tokens as u32,
            heads as u32,
            transposes,
        );
        let by_head = if transposes { permute(by_head, &[0, 2, 1, 3]) } else { by_head };
        (wrapped(sums), wrapped(by_head))
    }

    fn by_segment(x_1shk: Tensor<Self, 4>, start: usize, [segments, len]: [usize; 2]) -> Tensor<Self, 4> {
        let [_, _, heads, dim] = x_1shk.dims();
        let part = primitive(x_1shk.narrow(1, start, segments * len));
        let [_, of_token, of_head, of_element] = [0, 1, 2, 3].map(|axis| part.meta.strides()[axis]);
        let metadata =
            Metadata::new([segments, len, heads, dim], [len * of_token, of_token, of_head, of_element]);
        wrapped(CubeTensor::new(part.client, part.handle, metadata, part.device, part.dtype))
    }
}

/// Whether the memory of `[b, s, h, k]` is that of `[b, h, s, k]`, or there is one head.
pub fn lies_by_head<R: CubeRuntime>(x_bshk: &CubeTensor<R>) -> bool {
    let ([batch, tokens, heads, dim], strides) = (x_bshk.meta.shape().dims(), x_bshk.meta.strides());
    let rows = strides[1] == dim && strides[3] == 1;
    let dense = strides[2] == tokens * dim && (batch == 1 || strides[0] == heads * strides[2]);
    heads == 1 || rows && dense
}

/// Turns `scores` into weights; `lse` is written if these are `fresh`, read if they are made again.
fn run<R, F, I, BT>(
    scores: &CubeTensor<R>,
    lse: &CubeTensor<R>,
    heads: usize,
    seen: &Keys<CubeBackend<R, F, I, BT>>,
    fresh: bool,
) where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let keys = width(scores);
    let (count, dim) = by_row(scores, len(scores) / keys, keys);
    let masked = seen.bounds.is_some();
    // What is absent is never read; of another type it would be a kernel of its own.
    let bounds = seen.bounds.clone().map_or_else(|| lse.clone(), whole_numbers);
    weigh_kernel::launch::<R>(
        &scores.client,
        count,
        dim,
        scores.clone().into_array_arg(),
        lse.clone().into_array_arg(),
        bounds.into_array_arg(),
        keys as u32,
        heads as u32,
        seen.group as u32,
        seen.queries as u32,
        seen.first as u32,
        seen.scale as f32,
        OUT as f32,
        masked,
        seen.causal,
        fresh,
    );
}

/// Integers as kernels read them.
pub fn whole_numbers<B, R, const D: usize>(x: Tensor<B, D, Int>) -> CubeTensor<R>
where
    B: Backend<IntTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    into_contiguous(x.cast(DType::I32).into_primitive())
}

/// Where a row's query is in `[b, n, h, g]`.
#[cube]
fn place(row: usize, heads: u32, group: u32, queries: u32) -> usize {
    let (heads, group, queries) = (heads as usize, group as usize, queries as usize);
    let query = row % queries;
    let member = row / queries % group;
    let head = row / (queries * group) % heads;
    let batch = row / (queries * group * heads);
    ((batch * queries + query) * heads + head) * group + member
}

#[cube(launch)]
fn weigh_kernel(
    scores: &mut Array<f32>,
    lse: &mut Array<f32>,
    bounds: &Array<i32>,
    keys: u32,
    heads: u32,
    group: u32,
    queries: u32,
    first: u32,
    scale: f32,
    out: f32,
    #[comptime] masked: bool,
    #[comptime] causal: bool,
    #[comptime] fresh: bool,
) {
    let row = CUBE_POS;
    let begin = row * keys as usize;
    // Keys from `start` up to `end` are seen.
    let mut start = 0u32;
    let mut end = keys;
    if masked {
        let batch = row / (queries * group * heads) as usize;
        start = u32::cast_from(bounds[2 * batch]);
        end = min(u32::cast_from(bounds[2 * batch + 1]), keys);
    }
    if causal {
        end = min(end, first + (row % queries as usize) as u32 + 1);
    }
    let query = place(row, heads, group, queries);
    if fresh {
        let mut largest = out;
        let mut key = UNIT_POS;
        while key < keys {
            if key >= start && key < end {
                largest = max(largest, scores[begin + key as usize] * scale);
            }
            key += CUBE_DIM;
        }
        let largest = cube_max(largest);
        let mut sum = f32::new(0.0);
        let mut key = UNIT_POS;
        while key < keys {
            let mut weight = f32::new(0.0);
            if key >= start && key < end {
                weight = (scores[begin + key as usize] * scale - largest).exp();
            }
            scores[begin + key as usize] = weight;
            sum += weight;
            key += CUBE_DIM;
        }
        // A query that sees nothing has the sum 0, and weights of 0.
        let sum = max(cube_sum(sum), f32::new(1e-30));
        let mut key = UNIT_POS;
        while key < keys {
            scores[begin + key as usize] = scores[begin + key as usize] / sum;
            key += CUBE_DIM;
        }
        if UNIT_POS == 0 {
            lse[query] = largest + sum.ln();
        }
    } else {
        let lse = lse[query];
        let mut key = UNIT_POS;
        while key < keys {
            let mut weight = f32::new(0.0);
            if key >= start && key < end {
                weight = (scores[begin + key as usize] * scale - lse).exp();
            }
            scores[begin + key as usize] = weight;
            key += CUBE_DIM;
        }
    }
}

#[cube(launch)]
fn pull_kernel(
    weights: &Array<f32>,
    dweights: &mut Array<f32>,
    delta: &Array<f32>,
    keys: u32,
    heads: u32,
    group: u32,
    queries: u32,
    scale: f32,
) {
    let begin = CUBE_POS * keys as usize;
    let delta = delta[place(CUBE_POS, heads, group, queries)];
    let mut key = UNIT_POS;
    while key < keys {
        let at = begin + key as usize;
        dweights[at] = weights[at] * (dweights[at] - delta) * scale;
        key += CUBE_DIM;
    }
}

#[cube(launch)]
fn dots_kernel(
    x: &Array<f32>,
    y: &Array<f32>,
    sums: &mut Array<f32>,
    by_head: &mut Array<f32>,
    dim: u32,
    tokens: u32,
    heads: u32,
    #[comptime] transposes: bool,
) {
    let begin = CUBE_POS * dim as usize;
    let (tokens, heads) = (tokens as usize, heads as usize);
    let (batch, token, head) = (CUBE_POS / (tokens * heads), CUBE_POS / heads % tokens, CUBE_POS % heads);
    let to = ((batch * heads + head) * tokens + token) * dim as usize;
    let mut sum = f32::new(0.0);
    let mut i = UNIT_POS;
    while i < dim {
        let value = x[begin + i as usize];
        sum += value * y[begin + i as usize];
        if transposes {
            by_head[to + i as usize] = value;
        }
        i += CUBE_DIM;
    }
    let sum = cube_sum(sum);
    if UNIT_POS == 0 {
        sums[CUBE_POS] = sum;
    }
}
