//! Attention as products that never holds the whole matrix of scores, forward or backward: for accelerators.
//!
//! Queries are taken tile by tile. Forward leaves `lse = log sum exp(scores)` of each query; backward makes a
//! tile's weights again from it (Dao et al., arXiv 2205.14135, without its fusion into one kernel):
//!
//! ```text
//! p  = exp(q k^T scale - lse)          dv += p^T dout         delta = sum(dout * out)
//! ds = p * (dout v^T - delta) scale    dq  = ds k             dk   += ds^T q
//! ```
//!
//! What happens to a tile's scores between its products is the backend's own ([`Scores`]): one kernel each.
//!
//! A causal tile meets only the keys up to its last query. Neighbouring segments of equal length become a
//! batch of their own, so what lies between two segments is never computed. Grouped queries share the product
//! with their key/value head: nothing is repeated.
//!
//! A backend that has all of it in one kernel does that instead ([`Scores::fuses`]). Otherwise a tile's
//! scores pass through device memory, [`TILE`] bytes at a time.
//!
//! Axes: `b` batch, `s` queries, `t` keys, `g` query heads of a key/value head `h`, `n` queries of a tile,
//! `k` head dimension.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};

use super::{AttentionMask, AttentionOutput, AttentionSaved, ModelBackend};

/// Bytes of a tile's scores, as float32. Large enough to fill a GPU with work, small beside its memory.
pub const TILE: usize = 128 << 20;
/// What the largest score of a query without a key is taken to be; finite, so that it makes no NaN.
pub const OUT: f64 = -1e30;

/// Widths of heads that one kernel attends with: multiples of 16 up to 128, and of 32 up to 256, where the
/// gradients of keys and values are made in two halves.
pub fn may_fuse(dim: usize) -> bool {
    (1..=128).contains(&dim) && dim.is_multiple_of(16) || (1..=256).contains(&dim) && dim.is_multiple_of(32)
}

/// What is done to the scores of one tile, `[b, h, (g n), t]`, and to whole inputs, `[b, s, (h g), k]`,
/// between products.
///
/// `lse` and `delta` of a tile are `[b, n, (h g)]`. Scores and their gradients come from products that nobody
/// else holds: they may be changed in place.
pub trait Scores: ModelBackend {
    /// Whether the backend's own kernels do all of attention with such queries. Of what is below, only
    /// [`fused`](Self::fused), its gradients and [`by_segment`](Self::by_segment) are used then.
    fn fuses(_q_bshk: &Tensor<Self, 4>) -> bool {
        false
    }

    /// Attention of queries, keys and values in that kernel.
    fn fused(_inputs_bshk: [Tensor<Self, 4>; 3], _seen: &Keys<Self>) -> AttentionOutput<Self> {
        unreachable!("nothing is fused here")
    }

    /// The gradients of queries, keys and values under [`fused`](Self::fused), which returned `output`.
    fn fused_gradients(
        _inputs_bshk: [Tensor<Self, 4>; 3],
        _output: AttentionOutput<Self>,
        _dout_bshk: Tensor<Self, 4>,
        _seen: &Keys<Self>,
    ) -> [Tensor<Self, 4>; 3] {
        unreachable!("nothing is fused here")
    }

    /// `softmax(scores * scale)` over the keys that each query sees, 0 for all others, and the logarithm of
    /// its sum of exponentials.
    fn weigh(scores: Tensor<Self, 4>, seen: &Keys<Self>) -> (Tensor<Self, 4>, Tensor<Self, 3>);

    /// The weights of [`weigh`](Self::weigh), made again.
    fn weigh_again(scores: Tensor<Self, 4>, lse_bnh: Tensor<Self, 3>, seen: &Keys<Self>) -> Tensor<Self, 4>;

    /// The gradient of scores: `weights * (dweights - delta) * scale`.
    fn pull(
        weights: Tensor<Self, 4>,
        dweights: Tensor<Self, 4>,
        delta_bnh: Tensor<Self, 3>,
        seen: &Keys<Self>,
    ) -> Tensor<Self, 4>;

    /// `sum(x * y)` over the last axis, `[b, s, (h g)]`, and `x`, which is read by head next, or is `cut`
    /// first.
    fn dots(
        x_bshk: Tensor<Self, 4>,
        y_bshk: Tensor<Self, 4>,
        cut: bool,
    ) -> (Tensor<Self, 3>, Tensor<Self, 4>);

    /// `[b, h, s, k]` in rows that products read as they are, and copy otherwise.
    fn by_head(x_bshk: Tensor<Self, 4>) -> Tensor<Self, 4> {
        x_bshk.swap_dims(1, 2)
    }

    /// The tokens from `start` on of one batch row, a batch row for each segment of `len`.
    fn by_segment(x_1shk: Tensor<Self, 4>, start: usize, [segments, len]: [usize; 2]) -> Tensor<Self, 4> {
        let [_, _, heads, dim] = x_1shk.dims();
        x_1shk.narrow(1, start, segments * len).reshape([segments, len, heads, dim])
    }
}

/// Which keys the queries of a tile see, and what their scores are multiplied with.
pub struct Keys<B: Backend> {
    /// First key of each batch row, and the one after its last, `[2 b]`; none where every key is seen.
    pub bounds: Option<Tensor<B, 1, Int>>,
    /// Whether a query sees no key after itself.
    pub causal: bool,
    /// The tile's first query among all.
    pub first: usize,
    /// Queries.
    pub queries: usize,
    /// Query heads of a key/value head.
    pub group: usize,
    /// Applied to the products of queries and keys.
    pub scale: f64,
}

/// See [`AttentionOps::attention_saving`](super::AttentionOps::attention_saving).
pub fn attention<B: Scores>(
    q_bshk: Tensor<B, 4>,
    k_bshk: Tensor<B, 4>,
    v_bshk: Tensor<B, 4>,
    mask: &AttentionMask,
    scale: f64,
) -> AttentionOutput<B> {
    attention_in_tiles(TiledInputs { q_bshk, k_bshk, v_bshk, scale, tile: TILE }, mask)
}

/// See [`AttentionOps::attention_backward`](super::AttentionOps::attention_backward).
pub fn attention_backward<B: Scores>(
    saved: AttentionSaved<B>,
    mask: &AttentionMask,
    scale: f64,
    dout_bshk: Tensor<B, 4>,
) -> [Tensor<B, 4>; 3] {
    let AttentionSaved { q_bshk, k_bshk, v_bshk, output } = saved;
    let (delta, dout_bshk) = if B::fuses(&q_bshk) {
        (Delta::Of(output.out_bshk), dout_bshk)
    } else {
        let (delta_bsh, dout_bshk) = B::dots(dout_bshk, output.out_bshk, mask.segments().is_some());
        (Delta::Made(delta_bsh), dout_bshk)
    };
    let lse_bsh = output.lse_bsh.expect("the forward pass of this module leaves it");
    let inputs = TiledInputs { q_bshk, k_bshk, v_bshk, scale, tile: TILE };
    gradients_in_tiles(inputs, mask, Seeds { dout_bshk, delta, lse_bsh })
}

/// What attention reads.
struct TiledInputs<B: Backend> {
    q_bshk: Tensor<B, 4>,
    k_bshk: Tensor<B, 4>,
    v_bshk: Tensor<B, 4>,
    scale: f64,
    tile: usize,
}

/// What a backward pass starts from.
struct Seeds<B: Backend> {
    dout_bshk: Tensor<B, 4>,
    delta: Delta<B>,
    lse_bsh: Tensor<B, 3>,
}

/// `sum(dout * out)` of each query.
enum Delta<B: Backend> {
    /// Made, `[b, s, (h g)]`.
    Made(Tensor<B, 3>),
    /// Made by the kernel that is all of attention, of this output.
    Of(Tensor<B, 4>),
}

impl<B: Scores> Delta<B> {
    fn cut(&self, run: &SegmentRun) -> Self {
        match self {
            Self::Made(delta_bsh) => Self::Made(run.cut_rows(delta_bsh)),
            Self::Of(out_bshk) => Self::Of(run.cut(out_bshk)),
        }
    }
}

fn attention_in_tiles<B: Scores>(inputs: TiledInputs<B>, mask: &AttentionMask) -> AttentionOutput<B> {
    let Some(ends) = mask.segments() else { return dense(inputs, mask) };
    let parts = runs(ends).into_iter().map(|run| {
        let part = dense(inputs.run(&run), &run.mask(mask));
        (run.join(part.out_bshk), run.join_rows(part.lse_bsh.expect("dense leaves it")))
    });
    let (outs, lses): (Vec<_>, Vec<_>) = parts.unzip();
    AttentionOutput { out_bshk: joined(outs), lse_bsh: Some(joined(lses)) }
}

fn gradients_in_tiles<B: Scores>(
    inputs: TiledInputs<B>,
    mask: &AttentionMask,
    seeds: Seeds<B>,
) -> [Tensor<B, 4>; 3] {
    let Some(ends) = mask.segments() else { return dense_gradients(inputs, mask, seeds) };
    let mut parts: [Vec<Tensor<B, 4>>; 3] = [Vec::new(), Vec::new(), Vec::new()];
    for run in runs(ends) {
        let seeds = Seeds {
            dout_bshk: run.cut(&seeds.dout_bshk),
            delta: seeds.delta.cut(&run),
            lse_bsh: run.cut_rows(&seeds.lse_bsh),
        };
        let gradients = dense_gradients(inputs.run(&run), &run.mask(mask), seeds);
        parts.iter_mut().zip(gradients).for_each(|(parts, part)| parts.push(run.join(part)));
    }
    parts.map(joined)
}

/// Consecutive segments of one length.
#[derive(Debug, PartialEq, Eq)]
struct SegmentRun {
    start: usize,
    segments: usize,
    len: usize,
}

/// `[0, e1, e2, ..]` as runs; empty segments vanish.
fn runs(ends: &[u32]) -> Vec<SegmentRun> {
    let mut runs: Vec<SegmentRun> = Vec::new();
    for pair in ends.windows(2) {
        let (start, len) = (pair[0] as usize, (pair[1] - pair[0]) as usize);
        match runs.last_mut() {
            Some(run) if run.len == len => run.segments += 1,
            _ if len == 0 => {}
            _ => runs.push(SegmentRun { start, segments: 1, len }),
        }
    }
    runs
}

impl SegmentRun {
    /// What queries of a segment see of it.
    fn mask(&self, of_all: &AttentionMask) -> AttentionMask {
        match of_all {
            AttentionMask::CausalSegments(_) => {
                AttentionMask::Causal(std::iter::repeat_n(0..self.len as u32, self.segments).collect())
            }
            _ => AttentionMask::Full,
        }
    }

    /// The run's part of one batch row, a batch row for each segment.
    fn cut<B: Scores>(&self, x_1shk: &Tensor<B, 4>) -> Tensor<B, 4> {
        B::by_segment(x_1shk.clone(), self.start, [self.segments, self.len])
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

impl<B: Scores> TiledInputs<B> {
    fn run(&self, run: &SegmentRun) -> Self {
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
            scale: self.scale,
            causal: matches!(mask, AttentionMask::Causal(_)),
            bounds: bounds(mask, keys, &self.q_bshk),
        }
    }
}

/// First key of each batch row, and the one after its last, on the device; none where every query sees every
/// key, or every one before it. One axis: a GPU pads short rows, and they would have to be copied to be read.
fn bounds<B: Backend>(mask: &AttentionMask, keys: usize, like: &Tensor<B, 4>) -> Option<Tensor<B, 1, Int>> {
    let ranges = match mask {
        AttentionMask::Full | AttentionMask::Segments(_) | AttentionMask::CausalSegments(_) => return None,
        AttentionMask::Keys(ranges) | AttentionMask::Causal(ranges) => ranges,
    };
    if ranges.iter().all(|range| range.start == 0 && range.end as usize >= keys) {
        return None;
    }
    let ends: Vec<i32> = ranges.iter().flat_map(|range| [range.start as i32, range.end as i32]).collect();
    Some(Tensor::from_data(TensorData::new(ends, [2 * ranges.len()]), (&like.device(), DType::I32)))
}

/// How the queries are cut, and what each tile meets.
struct Tiles<B: Backend> {
    queries: usize,
    keys: usize,
    group: usize,
    /// Queries of a tile.
    rows: usize,
    scale: f64,
    causal: bool,
    bounds: Option<Tensor<B, 1, Int>>,
}

/// One tile: its queries, and the keys that any of them may see.
struct Tile {
    queries: Range<usize>,
    keys: usize,
}

impl<B: Backend> Tiles<B> {
    fn all(&self) -> Vec<Tile> {
        let starts = (0..self.queries).step_by(self.rows);
        starts
            .map(|start| {
                let end = (start + self.rows).min(self.queries);
                Tile { queries: start..end, keys: if self.causal { end.min(self.keys) } else { self.keys } }
            })
            .collect()
    }

    /// All queries as one tile.
    fn whole(&self) -> Tile {
        Tile { queries: 0..self.queries, keys: self.keys }
    }

    fn seen(&self, tile: &Tile) -> Keys<B> {
        Keys {
            bounds: self.bounds.clone(),
            causal: self.causal,
            first: tile.queries.start,
            queries: tile.queries.len(),
            group: self.group,
            scale: self.scale,
        }
    }

    /// The tile's part of `[b, (h g), s, k]` as `[b, h, (g n), k]`.
    fn cut(&self, x_bhsk: &Tensor<B, 4>, tile: &Tile) -> Tensor<B, 4> {
        let [batch, heads, queries, dim] = x_bhsk.dims();
        let (rows, group) = (tile.queries.len(), self.group);
        if group == 1 {
            return x_bhsk.clone().narrow(2, tile.queries.start, rows);
        }
        let x_bhgsk = x_bhsk.clone().reshape([batch, heads / group, group, queries, dim]);
        x_bhgsk.narrow(3, tile.queries.start, rows).reshape([batch, heads / group, group * rows, dim])
    }

    /// The tile's part of `[b, s, (h g)]`.
    fn cut_rows(&self, x_bsh: &Tensor<B, 3>, tile: &Tile) -> Tensor<B, 3> {
        x_bsh.clone().narrow(1, tile.queries.start, tile.queries.len())
    }

    /// `[b, h, (g n), k]`, fresh from a product, as `[b, n, (h g), k]`: the same memory.
    fn join(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, heads, rows, dim] = x.dims();
        x.reshape([batch, heads * self.group, rows / self.group, dim]).swap_dims(1, 2)
    }
}

fn dense<B: Scores>(inputs: TiledInputs<B>, mask: &AttentionMask) -> AttentionOutput<B> {
    let tiles = inputs.tiles(mask);
    let inputs_bshk = [inputs.q_bshk, inputs.k_bshk, inputs.v_bshk];
    if B::fuses(&inputs_bshk[0]) {
        return B::fused(inputs_bshk, &tiles.seen(&tiles.whole()));
    }
    let [q_bhsk, k_bhtk, v_bhtk] = inputs_bshk.map(B::by_head);
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for tile in tiles.all() {
        let [k, v] = [&k_bhtk, &v_bhtk].map(|x_bhtk| x_bhtk.clone().narrow(2, 0, tile.keys));
        let scores = B::product(tiles.cut(&q_bhsk, &tile), k.swap_dims(2, 3));
        let (weights, lse_bnh) = B::weigh(scores, &tiles.seen(&tile));
        outs.push(by_token(tiles.join(B::product(weights, v))));
        lses.push(lse_bnh);
    }
    AttentionOutput { out_bshk: joined(outs), lse_bsh: Some(joined(lses)) }
}

fn dense_gradients<B: Scores>(
    inputs: TiledInputs<B>,
    mask: &AttentionMask,
    seeds: Seeds<B>,
) -> [Tensor<B, 4>; 3] {
    let tiles = inputs.tiles(mask);
    let inputs_bshk = [inputs.q_bshk, inputs.k_bshk, inputs.v_bshk];
    let delta_bsh = match seeds.delta {
        Delta::Made(delta_bsh) => delta_bsh,
        Delta::Of(out_bshk) => {
            let output = AttentionOutput { out_bshk, lse_bsh: Some(seeds.lse_bsh) };
            return B::fused_gradients(inputs_bshk, output, seeds.dout_bshk, &tiles.seen(&tiles.whole()));
        }
    };
    let [q_bhsk, k_bhtk, v_bhtk] = inputs_bshk.map(B::by_head);
    let dout_bhsk = B::by_head(seeds.dout_bshk);
    let mut dqs = Vec::new();
    let mut sums: Option<[Tensor<B, 4>; 2]> = None;
    for tile in tiles.all() {
        let (q, dout) = (tiles.cut(&q_bhsk, &tile), tiles.cut(&dout_bhsk, &tile));
        let [k, v] = [&k_bhtk, &v_bhtk].map(|x_bhtk| x_bhtk.clone().narrow(2, 0, tile.keys));
        let seen = tiles.seen(&tile);
        let scores = B::product(q.clone(), k.clone().swap_dims(2, 3));
        let weights = B::weigh_again(scores, tiles.cut_rows(&seeds.lse_bsh, &tile), &seen);
        let dv = B::product(weights.clone().swap_dims(2, 3), dout.clone());
        let dweights = B::product(dout, v.swap_dims(2, 3));
        let dscores = B::pull(weights, dweights, tiles.cut_rows(&delta_bsh, &tile), &seen);
        dqs.push(tiles.join(B::product(dscores.clone(), k)));
        let dk = B::product(dscores.swap_dims(2, 3), q);
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
    [joined(dqs), dk, dv]
}

/// A tensor in the order of its axes: copied once here, where a projection and the backward pass both read
/// it.
fn by_token<B: Backend>(x_bshk: Tensor<B, 4>) -> Tensor<B, 4> {
    let [batch, tokens, heads, dim] = x_bshk.dims();
    x_bshk.reshape([batch, tokens, heads * dim]).reshape([batch, tokens, heads, dim])
}

/// Parts of the second axis as one; a single one as it is.
fn joined<B: Backend, const D: usize>(mut parts: Vec<Tensor<B, D>>) -> Tensor<B, D> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 1),
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
