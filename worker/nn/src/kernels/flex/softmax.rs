//! Softmax of scores that something is added to, and back, in place and row by row on all threads.

use super::{
    parallel::{self, Work},
    rows::BLOCK,
    simd,
};

/// The exponent of what a row's largest score leaves nothing of.
const NOTHING: f32 = -87.0;

/// What is added to scores, `[b or 1, heads or 1, queries or 1, keys]`.
pub struct ScoreBias<'a> {
    /// Row-major.
    pub values: &'a [f32],
    /// Axes.
    pub shape: [usize; 4],
}

impl ScoreBias<'_> {
    /// What is added to the scores of a row.
    fn row(&self, place: [usize; 3]) -> &[f32] {
        let [batch, heads, queries, keys] = self.shape;
        let [b, h, q] =
            [(0, batch), (1, heads), (2, queries)].map(|(axis, len)| if len == 1 { 0 } else { place[axis] });
        let row = (b * heads + h) * queries + q;
        &self.values[row * keys..][..keys]
    }
}

/// Scores of these axes become weights.
pub fn forward(scores: &mut [f32], [_, heads, queries, keys]: [usize; 4], added: &[ScoreBias<'_>]) {
    let (rows, work) = (at_once(keys), Work::values((2 + added.len()) * scores.len()));
    let blocks = scores.chunks_mut(rows * keys.max(1)).enumerate().collect();
    parallel::for_each(blocks, work, |(block, scores): (usize, &mut [f32])| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (row, scores) in (block * rows..).zip(scores.chunks_exact_mut(keys.max(1))) {
                    for added in added {
                        let added = added.row([row / queries / heads, row / queries % heads, row % queries]);
                        scores.iter_mut().zip(added).for_each(|(score, added)| *score += added);
                    }
                    let max = simd::max(scores);
                    for score in scores.iter_mut() {
                        let below = *score - max;
                        *score = if below < NOTHING { 0.0 } else { simd::exp(below) };
                    }
                    let scale = 1.0 / simd::sum(scores, |weight| weight);
                    scores.iter_mut().for_each(|weight| *weight *= scale);
                }
            },
        );
    });
}

/// Gradients of weights become those of scores, `w (dw - sum(dw w))`; rows are `keys` wide.
pub fn backward(weights: &[f32], dweights: &mut [f32], keys: usize) {
    let (rows, work) = (at_once(keys) * keys.max(1), Work::values(2 * weights.len()));
    let blocks = weights.chunks(rows).zip(dweights.chunks_mut(rows)).collect();
    parallel::for_each(blocks, work, |(weights, dweights): (&[f32], &mut [f32])| {
        simd::vectorised(
            #[inline(always)]
            || {
                let of_rows = weights.chunks_exact(keys.max(1)).zip(dweights.chunks_exact_mut(keys.max(1)));
                for (weights, dweights) in of_rows {
                    let along = simd::sum2(weights, dweights, |weight, dweight| weight * dweight);
                    let of_keys = weights.iter().zip(dweights);
                    of_keys.for_each(|(weight, dweight)| *dweight = weight * (*dweight - along));
                }
            },
        );
    });
}

/// Rows of a block.
fn at_once(keys: usize) -> usize {
    (BLOCK / keys.max(1)).max(1)
}
