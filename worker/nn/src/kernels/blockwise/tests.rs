//! Against the reference and its derivatives, in one tile and in many.

use burn::{backend::Flex, tensor::Bool};

use super::*;
use crate::kernels::{AttentionSaved, backward, reference, segments};

type F = Flex;

fn values<const D: usize>(shape: [usize; D], seed: u64, scale: f32) -> Tensor<F, D> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

/// In burn's own operations.
impl Scores for Flex {
    fn weigh(scores: Tensor<F, 4>, seen: &Keys<F>) -> (Tensor<F, 4>, Tensor<F, 3>) {
        let outside = outside(&scores, seen);
        let scores = (scores * seen.scale).mask_fill(outside.clone(), OUT);
        let largest = scores.clone().max_dim(3);
        let weights = (scores - largest.clone()).exp().mask_fill(outside, 0.0);
        let sum = weights.clone().sum_dim(3).clamp_min(1e-30);
        (weights / sum.clone(), by_query(largest + sum.log(), seen))
    }

    fn weigh_again(scores: Tensor<F, 4>, lse_bnh: Tensor<F, 3>, seen: &Keys<F>) -> Tensor<F, 4> {
        let outside = outside(&scores, seen);
        let scores = (scores * seen.scale).mask_fill(outside.clone(), OUT);
        (scores - by_row(lse_bnh, seen)).exp().mask_fill(outside, 0.0)
    }

    fn pull(
        weights: Tensor<F, 4>,
        dweights: Tensor<F, 4>,
        delta_bnh: Tensor<F, 3>,
        seen: &Keys<F>,
    ) -> Tensor<F, 4> {
        weights * (dweights - by_row(delta_bnh, seen)) * seen.scale
    }

    fn dots(x_bshk: Tensor<F, 4>, y_bshk: Tensor<F, 4>) -> (Tensor<F, 3>, Tensor<F, 4>) {
        ((x_bshk.clone() * y_bshk).sum_dim(3).squeeze_dim(3), x_bshk)
    }

    fn by_segment(x_1shk: Tensor<F, 4>, start: usize, [segments, len]: [usize; 2]) -> Tensor<F, 4> {
        let [_, _, heads, dim] = x_1shk.dims();
        x_1shk.narrow(1, start, segments * len).reshape([segments, len, heads, dim])
    }
}

/// `[b, h, (g n), 1]` as `[b, n, (h g)]`.
fn by_query(x: Tensor<F, 4>, seen: &Keys<F>) -> Tensor<F, 3> {
    let [batch, heads, ..] = x.dims();
    let x_bhgn = x.reshape([batch, heads, seen.group, seen.queries]);
    x_bhgn.permute([0, 3, 1, 2]).reshape([batch, seen.queries, heads * seen.group])
}

/// And back.
fn by_row(x_bnh: Tensor<F, 3>, seen: &Keys<F>) -> Tensor<F, 4> {
    let [batch, queries, heads] = x_bnh.dims();
    let x_bnhg = x_bnh.reshape([batch, queries, heads / seen.group, seen.group]);
    x_bnhg.permute([0, 2, 3, 1]).reshape([batch, heads / seen.group, seen.group * queries, 1])
}

/// Which scores a query does not see.
fn outside(scores: &Tensor<F, 4>, seen: &Keys<F>) -> Tensor<F, 4, Bool> {
    let [batch, heads, rows, keys] = scores.dims();
    let ends: Vec<i64> = match &seen.bounds {
        Some(bounds) => bounds.clone().into_data().iter::<i64>().collect(),
        None => [0, keys as i64].repeat(batch),
    };
    let outside = (0..batch * heads * rows * keys).map(|i| {
        let (key, row, batch) = (i % keys, i / keys % rows, i / (keys * rows * heads));
        let query = seen.first + row % seen.queries;
        let within = ends[2 * batch]..ends[2 * batch + 1];
        !within.contains(&(key as i64)) || seen.causal && key > query
    });
    let outside: Vec<bool> = outside.collect();
    Tensor::from_data(TensorData::new(outside, [batch, heads, rows, keys]), &Default::default())
}

#[track_caller]
fn assert_close<const D: usize>(what: &str, found: Tensor<F, D>, expected: Tensor<F, D>) {
    assert_eq!(found.dims(), expected.dims(), "{what}: shape");
    let norm = |x: &Tensor<F, D>| {
        let values = x.to_data().to_vec::<f32>().expect("f32");
        values.into_iter().map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
    };
    let count = expected.dims().iter().product::<usize>() as f64;
    let size = norm(&expected).max(0.01 * count.sqrt());
    let error = norm(&(found - expected)) / size;
    assert!(error <= 1e-5, "{what}: relative error {error:e}");
}

/// Sizes `[batch, queries, keys, kv_heads, group, dim]`; tiles of the fewest queries there can be (16), and
/// of all of them.
fn check(sizes: [usize; 6], mask: &AttentionMask, strength: f32) {
    let [batch, queries, keys, kv_heads, group, dim] = sizes;
    let q = values([batch, queries, kv_heads * group, dim], 1, strength);
    let k = values([batch, keys, kv_heads, dim], 2, 1.0);
    let v = values([batch, keys, kv_heads, dim], 3, 1.0);
    let dout = values(q.dims(), 4, 1.0);
    let scale = 1.0 / (dim as f64).sqrt();
    let expected = reference::attention(q.clone(), k.clone(), v.clone(), mask, scale);
    let saved = |output| AttentionSaved { q_bshk: q.clone(), k_bshk: k.clone(), v_bshk: v.clone(), output };
    let reference = AttentionOutput { out_bshk: expected.clone(), lse_bsh: None };
    let derivatives = backward::attention(saved(reference), mask, scale, dout.clone());
    for tile in [1, TILE] {
        let what = format!("{sizes:?}, {mask:?}, tiles of {tile} bytes");
        let inputs = |inputs_bshk| TiledInputs { inputs_bshk, scale, tile };
        let qkv = [&q, &k, &v].map(Tensor::clone);
        let output = segments::attention(qkv, mask, |qkv, mask| attention(inputs(qkv), mask));
        assert_close(&what, output.out_bshk.clone(), expected.clone());
        let found = segments::gradients(saved(output), mask, dout.clone(), |saved, mask, dout_bshk| {
            let AttentionSaved { q_bshk, k_bshk, v_bshk, output } = saved;
            gradients(inputs([q_bshk, k_bshk, v_bshk]), output, mask, dout_bshk)
        });
        for (i, (found, expected)) in found.into_iter().zip(derivatives.clone()).enumerate() {
            assert_close(&format!("gradient {i} of {what}"), found, expected);
        }
    }
}

#[test]
fn every_mask_gives_the_references_values_and_gradients() {
    check([2, 50, 50, 2, 3, 8], &AttentionMask::Full, 1.0);
    check([2, 33, 70, 2, 2, 16], &AttentionMask::Keys([0..70, 35..61].into()), 1.0);
    check([2, 50, 50, 2, 2, 8], &AttentionMask::Keys([0..50, 0..50].into()), 1.0);
    check([3, 75, 75, 2, 2, 8], &AttentionMask::Causal([0..75, 20..75, 3..40].into()), 1.0);
    check([1, 17, 17, 1, 1, 4], &AttentionMask::Causal([0..17].into()), 1.0);
}

#[test]
fn segments_even_uneven_and_empty_do_not_see_each_other() {
    check([1, 128, 128, 3, 1, 8], &AttentionMask::Segments([0, 32, 64, 96, 128].into()), 1.0);
    check([1, 100, 100, 2, 1, 8], &AttentionMask::Segments([0, 20, 20, 40, 41, 100].into()), 1.0);
    check([1, 1, 1, 1, 1, 2], &AttentionMask::Segments([0, 1].into()), 1.0);
    check([1, 128, 128, 2, 2, 8], &AttentionMask::CausalSegments([0, 40, 80, 120, 128].into()), 1.0);
    check([1, 100, 100, 2, 1, 8], &AttentionMask::CausalSegments([0, 20, 20, 40, 41, 100].into()), 1.0);
}

#[test]
fn queries_that_see_nothing_get_zeros_and_give_no_gradient() {
    let mask = AttentionMask::Causal([40..64, 0..0].into());
    check([2, 64, 64, 2, 2, 8], &mask, 1.0);
    let x = values([2, 64, 2, 8], 5, 1.0);
    let output = attention(TiledInputs::new([x.clone(), x.clone(), x], 1.0), &mask);
    let y = output.out_bshk.into_data().to_vec::<f32>().expect("f32");
    assert!(y[..40 * 16].iter().chain(&y[64 * 16..]).all(|&y| y == 0.0));
}

#[test]
fn large_scores_do_not_overflow() {
    check([1, 40, 40, 1, 2, 16], &AttentionMask::Full, 40.0);
}
