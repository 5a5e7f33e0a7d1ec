//! Attention in burn's own operations that never holds the whole matrix of scores, forward or backward: for accelerators, whose
//! matrix products are far faster than any kernel of ours would be.
//!
//! Queries are taken tile by tile. Forward leaves `lse = log sum exp(scores)` of each query; backward makes a tile's weights again
//! from it (Dao et al., arXiv 2205.14135, without its fusion into one kernel):
//!
//! ```text
//! p  = exp(q k^T scale - lse)          dv += p^T dout         delta = sum(dout * out)
//! ds = p * (dout v^T - delta) scale    dq  = ds k             dk   += ds^T q
//! ```
//!
//! A causal tile meets only the keys up to its last query. Segments of equal length become a batch of their own, so what lies
//! between two segments is never computed. Grouped queries share the product with their key/value head: nothing is repeated.
//!
//! What this does not do: fuse a tile's products with its exponentials (the tile's scores pass through device memory, [`TILE`] bytes at
//! a time).
//!
//! Axes: `b` batch, `s` queries, `t` keys, `g` query heads of a key/value head `h`, `n` queries of a tile, `k` head dimension.

use std::ops::Range;

use burn::tensor::{Bool, Int, Tensor, TensorData, backend::Backend};

use super::{AttentionMask, AttentionOutput, AttentionSaved};

/// Bytes of a tile's scores, as float32. Large enough to fill a card with work, small beside its memory.
const TILE: usize = 128 << 20;
/// What a score that is left out is set to; finite, so that a query without a key makes no NaN.
const OUT: f64 = -1e30;

/// See [`ModelBackend::attention_saving`](super::ModelBackend::attention_saving).
pub fn attention<B: Backend>(
    q_bshk: Tensor<B, 4>,
    k_bshk: Tensor<B, 4>,
    v_bshk: Tensor<B, 4>,
    mask: &AttentionMask,
    scale: f64,
) -> AttentionOutput<B> {
    attention_in_tiles(Inputs { q_bshk, k_bshk, v_bshk, scale, tile: TILE }, mask)
}

/// See [`ModelBackend::attention_backward`](super::ModelBackend::attention_backward).
pub fn attention_backward<B: Backend>(
    saved: AttentionSaved<B>,
    mask: &AttentionMask,
    scale: f64,
    dout_bshk: Tensor<B, 4>,
) -> [Tensor<B, 4>; 3] {
    let AttentionSaved { q_bshk, k_bshk, v_bshk, output } = saved;
    let delta_bsh = (dout_bshk.clone() * output.out_bshk).sum_dim(3).squeeze_dim(3);
    let lse_bsh = output.lse_bsh.expect("the forward pass of this module leaves it");
    let inputs = Inputs { q_bshk, k_bshk, v_bshk, scale, tile: TILE };
    gradients_in_tiles(inputs, mask, Seeds { dout_bshk, delta_bsh, lse_bsh })
}

/// What attention reads.
struct Inputs<B: Backend> {
    q_bshk: Tensor<B, 4>,
    k_bshk: Tensor<B, 4>,
    v_bshk: Tensor<B, 4>,
    scale: f64,
    tile: usize,
}

/// What a backward pass starts from.
struct Seeds<B: Backend> {
    dout_bshk: Tensor<B, 4>,
    delta_bsh: Tensor<B, 3>,
    lse_bsh: Tensor<B, 3>,
}

fn attention_in_tiles<B: Backend>(inputs: Inputs<B>, mask: &AttentionMask) -> AttentionOutput<B> {
    let AttentionMask::Segments(ends) = mask else { return dense(inputs, mask) };
    let parts = runs(ends).into_iter().map(|run| {
        let part = dense(inputs.run(&run), &AttentionMask::Full);
        (run.join(part.out_bshk), run.join_rows(part.lse_bsh.expect("dense leaves it")))
    });
    let (outs, lses): (Vec<_>, Vec<_>) = parts.unzip();
    AttentionOutput { out_bshk: Tensor::cat(outs, 1), lse_bsh: Some(Tensor::cat(lses, 1)) }
}

fn gradients_in_tiles<B: Backend>(
    inputs: Inputs<B>,
    mask: &AttentionMask,
    seeds: Seeds<B>,
) -> [Tensor<B, 4>; 3] {
    let AttentionMask::Segments(ends) = mask else { return dense_gradients(inputs, mask, seeds) };
    let mut parts: [Vec<Tensor<B, 4>>; 3] = [Vec::new(), Vec::new(), Vec::new()];
    for run in runs(ends) {
        let seeds = Seeds {
            dout_bshk: run.cut(&seeds.dout_bshk),
            delta_bsh: run.cut_rows(&seeds.delta_bsh),
            lse_bsh: run.cut_rows(&seeds.lse_bsh),
        };
        let gradients = dense_gradients(inputs.run(&run), &AttentionMask::Full, seeds);
        parts.iter_mut().zip(gradients).for_each(|(parts, part)| parts.push(run.join(part)));
    }
    parts.map(|parts| Tensor::cat(parts, 1))
}

/// Consecutive segments of one length.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    start: usize,
    segments: usize,
    len: usize,
}

/// `[0, e1, e2, ..]` as runs; empty segments vanish.
fn runs(ends: &[u32]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for pair in ends.windows(2) {
        let (start, len) = (pair[0] as usize, (pair[1] - pair[0]) as usize);
        match runs.last_mut() {
            Some(run) if run.len == len => run.segments += 1,
            _ if len == 0 => {}
            _ => runs.push(Run { start, segments: 1, len }),
        }
    }
    runs
}

impl Run {
    /// The run's part of one batch row, a batch row for each segment.
    fn cut<B: Backend>(&self, x_1shk: &Tensor<B, 4>) -> Tensor<B, 4> {
        let [_, _, heads, dim] = x_1shk.dims();
        let part = x_1shk.clone().narrow(1, self.start, self.segments * self.len);
        part.reshape([self.segments, self.len, heads, dim])
    }

    fn cut_rows<B: Backend>(&self, x_1sh: &Tensor<B, 3>) -> Tensor<B, 3> {
        let heads = x_1sh.dims()[2];
        x_1sh.clone().narrow(1, self.start, self.segments * self.len).reshape([
            self.segments,
            self.len,
            heads,
        ])
    }

    fn join<B: Backend>(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [_, _, heads, dim] = x.dims();
        x.reshape([1, self.segments * self.len, heads, dim])
    }

    fn join_rows<B: Backend>(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let heads = x.dims()[2];
        x.reshape([1, self.segments * self.len, heads])
    }
}

impl<B: Backend> Inputs<B> {
    fn run(&self, run: &Run) -> Self {
        let Self { q_bshk, k_bshk, v_bshk, scale, tile } = self;
        let [q_bshk, k_bshk, v_bshk] = [q_bshk, k_bshk, v_bshk].map(|x| run.cut(x));
        Self { q_bshk, k_bshk, v_bshk, scale: *scale, tile: *tile }
    }

    fn tiles(&self, mask: &AttentionMask) -> Tiles<B> {
        let [batch, queries, heads, _] = self.q_bshk.dims();
        let [_, keys, kv_heads, _] = self.k_bshk.dims();
        let row = 4 * batch * heads * keys.max(1);
        Tiles {
            queries,
            keys,
            group: heads / kv_heads,
            rows: (self.tile / row).max(16),
            bounds: Bounds::new(mask, keys, &self.q_bshk),
        }
    }
}

/// How the queries are cut, and what each tile meets.
struct Tiles<B: Backend> {
    queries: usize,
    keys: usize,
    group: usize,
    /// Queries of a tile.
    rows: usize,
    bounds: Option<Bounds<B>>,
}

/// One tile: its queries, and the keys that any of them may see.
struct Tile {
    queries: Range<usize>,
    keys: usize,
}

impl<B: Backend> Tiles<B> {
    fn all(&self) -> Vec<Tile> {
        let causal = self.bounds.as_ref().is_some_and(|bounds| bounds.causal);
        let starts = (0..self.queries).step_by(self.rows);
        starts
            .map(|start| {
                let end = (start + self.rows).min(self.queries);
                Tile { queries: start..end, keys: if causal { end.min(self.keys) } else { self.keys } }
            })
            .collect()
    }

    /// `[b, s, (h g), k]` as `[b, h, g, s, k]`.
    fn heads(&self, x_bshk: Tensor<B, 4>) -> Tensor<B, 5> {
        let [batch, rows, heads, dim] = x_bshk.dims();
        x_bshk.reshape([batch, rows, heads / self.group, self.group, dim]).permute([0, 2, 3, 1, 4])
    }

    /// The tile's part of `[b, h, g, s, k]` as `[b, h, (g n), k]`.
    fn cut(&self, x_bhgsk: &Tensor<B, 5>, tile: &Tile) -> Tensor<B, 4> {
        let [batch, heads, group, _, dim] = x_bhgsk.dims();
        let rows = tile.queries.len();
        x_bhgsk.clone().narrow(3, tile.queries.start, rows).reshape([batch, heads, group * rows, dim])
    }

    /// `[b, h, (g n), k]` as `[b, n, (h g), k]`.
    fn join(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, heads, rows, dim] = x.dims();
        let rows = rows / self.group;
        let x_bhgnk = x.reshape([batch, heads, self.group, rows, dim]);
        x_bhgnk.permute([0, 3, 1, 2, 4]).reshape([batch, rows, heads * self.group, dim])
    }

    /// The tile's scores `[b, h, (g n), t]`, and where they are left out.
    fn scores(
        &self,
        q: Tensor<B, 4>,
        k_bhtk: Tensor<B, 4>,
        tile: &Tile,
        scale: f64,
    ) -> (Tensor<B, 4>, Option<Tensor<B, 4, Bool>>) {
        let scores = q.matmul(k_bhtk.swap_dims(2, 3)) * scale;
        let Some(bounds) = &self.bounds else { return (scores, None) };
        let [batch, heads, rows, keys] = scores.dims();
        // [b, 1, n, t] for every head and every query head of its group.
        let outside = bounds.outside(tile).unsqueeze_dim::<5>(1);
        let shape = [batch, heads, self.group, rows / self.group, keys];
        let outside = outside.expand(shape).reshape([batch, heads, rows, keys]);
        (scores.mask_fill(outside.clone(), OUT), Some(outside))
    }
}

/// Which keys each batch row has, on the device.
struct Bounds<B: Backend> {
    start_b111: Tensor<B, 4, Int>,
    end_b111: Tensor<B, 4, Int>,
    causal: bool,
}

impl<B: Backend> Bounds<B> {
    /// None where every query sees every key.
    fn new(mask: &AttentionMask, keys: usize, like: &Tensor<B, 4>) -> Option<Self> {
        let (ranges, causal) = match mask {
            AttentionMask::Full | AttentionMask::Segments(_) => return None,
            AttentionMask::Keys(ranges) => (ranges, false),
            AttentionMask::Causal(ranges) => (ranges, true),
        };
        if !causal && ranges.iter().all(|range| range.start == 0 && range.end as usize >= keys) {
            return None;
        }
        let column = |of: fn(&Range<u32>) -> u32| {
            let values: Vec<i32> = ranges.iter().map(|range| of(range) as i32).collect();
            Tensor::from_data(TensorData::new(values, [ranges.len(), 1, 1, 1]), &like.device())
        };
        Some(Self { start_b111: column(|range| range.start), end_b111: column(|range| range.end), causal })
    }

    /// `[b, 1, n, t]`: true where the query does not see the key.
    fn outside(&self, tile: &Tile) -> Tensor<B, 4, Bool> {
        let device = self.start_b111.device();
        let batch = self.start_b111.dims()[0];
        let shape = [batch, 1, tile.queries.len(), tile.keys];
        let key = Tensor::<B, 1, Int>::arange(0..tile.keys as i64, &device);
        let key = key.reshape([1, 1, 1, tile.keys]).expand(shape);
        let before = key.clone().lower(self.start_b111.clone().expand(shape));
        let outside = before.bool_or(key.clone().greater_equal(self.end_b111.clone().expand(shape)));
        if !self.causal {
            return outside;
        }
        let query = Tensor::<B, 1, Int>::arange(tile.queries.start as i64..tile.queries.end as i64, &device);
        let query = query.reshape([1, 1, tile.queries.len(), 1]).expand(shape);
        outside.bool_or(key.greater(query))
    }
}

fn dense<B: Backend>(inputs: Inputs<B>, mask: &AttentionMask) -> AttentionOutput<B> {
    let tiles = inputs.tiles(mask);
    let q_bhgsk = tiles.heads(inputs.q_bshk);
    let (k_bhtk, v_bhtk) = (inputs.k_bshk.swap_dims(1, 2), inputs.v_bshk.swap_dims(1, 2));
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for tile in tiles.all() {
        let (k, v) = (k_bhtk.clone().narrow(2, 0, tile.keys), v_bhtk.clone().narrow(2, 0, tile.keys));
        let (scores, outside) = tiles.scores(tiles.cut(&q_bhgsk, &tile), k, &tile, inputs.scale);
        let largest = scores.clone().max_dim(3);
        let weights = left_out((scores - largest.clone()).exp(), outside);
        // A query that sees nothing has the sum 0, and the output 0.
        let sum = weights.clone().sum_dim(3).clamp_min(1e-30);
        outs.push(tiles.join(weights.matmul(v) / sum.clone()));
        lses.push(tiles.join(largest + sum.log()).squeeze_dim(3));
    }
    AttentionOutput { out_bshk: Tensor::cat(outs, 1), lse_bsh: Some(Tensor::cat(lses, 1)) }
}

fn dense_gradients<B: Backend>(
    inputs: Inputs<B>,
    mask: &AttentionMask,
    seeds: Seeds<B>,
) -> [Tensor<B, 4>; 3] {
    let tiles = inputs.tiles(mask);
    let q_bhgsk = tiles.heads(inputs.q_bshk);
    let dout_bhgsk = tiles.heads(seeds.dout_bshk);
    let delta_bhgs1 = tiles.heads(seeds.delta_bsh.unsqueeze_dim(3));
    let lse_bhgs1 = tiles.heads(seeds.lse_bsh.unsqueeze_dim(3));
    let (k_bhtk, v_bhtk) = (inputs.k_bshk.swap_dims(1, 2), inputs.v_bshk.swap_dims(1, 2));
    let mut dqs = Vec::new();
    let mut sums: Option<[Tensor<B, 4>; 2]> = None;
    for tile in tiles.all() {
        let (q, dout) = (tiles.cut(&q_bhgsk, &tile), tiles.cut(&dout_bhgsk, &tile));
        let (k, v) = (k_bhtk.clone().narrow(2, 0, tile.keys), v_bhtk.clone().narrow(2, 0, tile.keys));
        let (scores, outside) = tiles.scores(q.clone(), k.clone(), &tile, inputs.scale);
        let weights = left_out((scores - tiles.cut(&lse_bhgs1, &tile)).exp(), outside);
        let dv = weights.clone().swap_dims(2, 3).matmul(dout.clone());
        let dweights = dout.matmul(v.swap_dims(2, 3)) - tiles.cut(&delta_bhgs1, &tile);
        let dscores = weights * dweights * inputs.scale;
        dqs.push(tiles.join(dscores.clone().matmul(k)));
        let dk = dscores.swap_dims(2, 3).matmul(q);
        let new = [dk, dv].map(|x| lengthened(x, tiles.keys));
        sums = Some(match sums {
            None => new,
            Some([dk, dv]) => {
                let [new_dk, new_dv] = new;
                [dk + new_dk, dv + new_dv]
            }
        });
    }
    let [dk, dv] = sums.expect("there is a query").map(|x_bhtk| x_bhtk.swap_dims(1, 2));
    [Tensor::cat(dqs, 1), dk, dv]
}

fn left_out<B: Backend>(weights: Tensor<B, 4>, outside: Option<Tensor<B, 4, Bool>>) -> Tensor<B, 4> {
    match outside {
        Some(outside) => weights.mask_fill(outside, 0.0),
        None => weights,
    }
}

/// Zeros for the keys after the last that a tile met.
fn lengthened<B: Backend>(x_bhtk: Tensor<B, 4>, keys: usize) -> Tensor<B, 4> {
    let [batch, heads, seen, dim] = x_bhtk.dims();
    if seen == keys {
        return x_bhtk;
    }
    let rest = Tensor::zeros([batch, heads, keys - seen, dim], (&x_bhtk.device(), x_bhtk.dtype()));
    Tensor::cat(vec![x_bhtk, rest], 2)
}

#[cfg(test)]
mod tests;
