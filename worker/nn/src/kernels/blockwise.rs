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
//! A causal tile meets only the keys up to its last query. Grouped queries share the product with their
//! key/value head: nothing is repeated. A tile's scores pass through device memory, [`TILE`] bytes at a time.
//!
//! What this module does not do: segments. Each run of them is a batch of its own here
//! ([`segments`](super::segments)).
//!
//! Axes: `b` batch, `s` queries, `t` keys, `g` query heads of a key/value head `h`, `n` queries of a tile,
//! `k` head dimension.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};

use super::{AttentionMask, AttentionOutput, ModelBackend};

/// Bytes of a tile's scores, as float32. Large enough to fill a GPU with work, small beside its memory.
pub const TILE: usize = 128 << 20;
/// What the largest score of a query without a key is taken to be; finite, so that it makes no NaN.
pub const OUT: f64 = -1e30;

/// What is done to the scores of one tile, `[b, h, (g n), t]`, and to whole inputs, `[b, s, (h g), k]`,
/// between products.
///
/// `lse` and `delta` of a tile are `[b, n, (h g)]`. Scores and their gradients come from products that nobody
/// else holds: they may be changed in place.
pub trait Scores: ModelBackend {
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

    /// `sum(x * y)` over the last axis, `[b, s, (h g)]`, and `x`, which is read by head next.
    fn dots(x_bshk: Tensor<Self, 4>, y_bshk: Tensor<Self, 4>) -> (Tensor<Self, 3>, Tensor<Self, 4>);

    /// `[b, h, s, k]` in rows that products read as they are, and copy otherwise.
    fn by_head(x_bshk: Tensor<Self, 4>) -> Tensor<Self, 4> {
        x_bshk.swap_dims(1, 2)
    }

    /// The tokens from `start` on of one batch row, a batch row for each segment; so many of one length.
    fn by_segment(x_1shk: Tensor<Self, 4>, start: usize, lengths: [usize; 2]) -> Tensor<Self, 4>;
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

/// What attention reads, of a batch.
pub struct TiledInputs<B: Backend> {
    /// Queries, keys and values.
    pub inputs_bshk: [Tensor<B, 4>; 3],
    /// Applied to scores.
    pub scale: f64,
    /// Bytes of a tile's scores.
    pub tile: usize,
}

impl<B: Backend> TiledInputs<B> {
    /// In tiles of [`TILE`].
    pub fn new(inputs_bshk: [Tensor<B, 4>; 3], scale: f64) -> Self {
        Self { inputs_bshk, scale, tile: TILE }
    }

    fn tiles(&self, mask: &AttentionMask) -> Tiles<B> {
        let [batch, queries, heads, _] = self.inputs_bshk[0].dims();
        let [_, keys, kv_heads, _] = self.inputs_bshk[1].dims();
        let row = 4 * batch * heads * keys.max(1);
        Tiles {
            queries,
            keys,
            group: heads / kv_heads,
            rows: (self.tile / row).max(16),
            scale: self.scale,
            causal: mask.is_causal_batch(),
            bounds: bounds(mask, keys, &self.inputs_bshk[0]),
        }
    }
}

/// First key of each batch row, and the one after its last, on the device; none where every query sees every
/// key, or every one before it. One axis: a GPU pads short rows, and they would have to be copied to be read.
pub fn bounds<B: Backend>(
    mask: &AttentionMask,
    keys: usize,
    like: &Tensor<B, 4>,
) -> Option<Tensor<B, 1, Int>> {
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

/// See [`AttentionOps::attention_saving`](super::AttentionOps::attention_saving).
pub fn attention<B: Scores>(inputs: TiledInputs<B>, mask: &AttentionMask) -> AttentionOutput<B> {
    let tiles = inputs.tiles(mask);
    let [q_bhsk, k_bhtk, v_bhtk] = inputs.inputs_bshk.map(B::by_head);
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

/// See [`AttentionOps::attention_backward`](super::AttentionOps::attention_backward); `output` is what
/// [`attention`] returned.
pub fn gradients<B: Scores>(
    inputs: TiledInputs<B>,
    output: AttentionOutput<B>,
    mask: &AttentionMask,
    dout_bshk: Tensor<B, 4>,
) -> [Tensor<B, 4>; 3] {
    let (tiles, lse_bsh) = (inputs.tiles(mask), output.lse());
    let (delta_bsh, dout_bshk) = B::dots(dout_bshk, output.out_bshk);
    let [q_bhsk, k_bhtk, v_bhtk] = inputs.inputs_bshk.map(B::by_head);
    let dout_bhsk = B::by_head(dout_bshk);
    let mut dqs = Vec::new();
    let mut sums: Option<[Tensor<B, 4>; 2]> = None;
    for tile in tiles.all() {
        let (q, dout) = (tiles.cut(&q_bhsk, &tile), tiles.cut(&dout_bhsk, &tile));
        let [k, v] = [&k_bhtk, &v_bhtk].map(|x_bhtk| x_bhtk.clone().narrow(2, 0, tile.keys));
        let seen = tiles.seen(&tile);
        let scores = B::product(q.clone(), k.clone().swap_dims(2, 3));
        let weights = B::weigh_again(scores, tiles.cut_rows(&lse_bsh, &tile), &seen);
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
pub fn joined<B: Backend, const D: usize>(mut parts: Vec<Tensor<B, D>>) -> Tensor<B, D> {
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
