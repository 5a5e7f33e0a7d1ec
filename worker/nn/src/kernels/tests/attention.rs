//! Attention under every mask, with grouped heads, strided inputs, and scores that overflow a careless
//! softmax.

use proptest::prelude::*;

use super::*;
use crate::kernels::{AttentionMask, AttentionOps, reference};

#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    queries: usize,
    keys: usize,
    kv_heads: usize,
    group: usize,
    dim: usize,
    mask: AttentionMask,
}

fn check(case: &Case, scale: f32) {
    let Case { batch, queries, keys, kv_heads, group, dim, .. } = *case;
    let heads = kv_heads * group;
    let inputs = [
        values([batch, queries, heads, dim], 1, scale),
        values([batch, keys, kv_heads, dim], 2, 1.0),
        values([batch, keys, kv_heads, dim], 3, 1.0),
    ];
    let factor = 1.0 / (dim as f64).sqrt();
    let [q, k, v] = inputs.clone();
    let expected = reference::attention(q.clone(), k.clone(), v.clone(), &case.mask, factor);
    assert_close(&format!("{case:?}"), <F as AttentionOps>::attention(q, k, v, &case.mask, factor), expected);

    let (fused, plain) = (inputs.each_ref().map(leaf), inputs.each_ref().map(leaf));
    let [q, k, v] = fused.clone();
    let fused_gradients = pull(<A as AttentionOps>::attention(q, k, v, &case.mask, factor));
    let [q, k, v] = plain.clone();
    let plain_gradients = pull(reference::attention(q, k, v, &case.mask, factor));
    // A score's gradient is a weight times what its value pulls with, less the mean of that over all keys.
    // With one key these are equal, and what is left is rounding, which is held against the terms: of values
    // like ours each is about 0.2 times its weight, half of which is taken here, and they add up over keys
    // and queries as noise does.
    let (weight, queries) = (1.0 / keys as f64, queries as f64);
    let sizes = [0.1 * weight.sqrt(), 0.1 * weight * queries.sqrt(), 0.0];
    for ((i, (fused, plain)), size) in fused.iter().zip(&plain).enumerate().zip(sizes) {
        let what = format!("gradient {i} of {case:?}");
        let terms = size * (plain.dims().iter().product::<usize>() as f64).sqrt();
        let (found, expected) = (gradient(fused, &fused_gradients), gradient(plain, &plain_gradients));
        assert_close_for_terms_of(&what, terms, found, expected);
    }
}

fn range(keys: usize) -> impl Strategy<Value = std::ops::Range<u32>> {
    (0..=keys as u32, 0..=keys as u32).prop_map(|(a, b)| a.min(b)..a.max(b))
}

fn mask(batch: usize, keys: usize) -> impl Strategy<Value = AttentionMask> {
    let ranges = move || proptest::collection::vec(range(keys), batch);
    let ends = proptest::collection::btree_set(1..=keys as u32, 0..6);
    prop_oneof![
        Just(AttentionMask::Full),
        ranges().prop_map(|ranges| AttentionMask::Keys(ranges.into())),
        ranges().prop_map(|ranges| AttentionMask::Causal(ranges.into())),
        (ends, any::<bool>()).prop_map(move |(mut ends, causal)| {
            ends.insert(keys as u32);
            let ends = std::iter::once(0).chain(ends).collect();
            if causal { AttentionMask::CausalSegments(ends) } else { AttentionMask::Segments(ends) }
        }),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (1usize..4, 1usize..150, 1usize..4, 1usize..4, 1usize..40);
    sizes.prop_flat_map(|(batch, seq, kv_heads, group, dim)| {
        mask(batch, seq).prop_map(move |mask| Case {
            batch,
            queries: seq,
            keys: seq,
            kv_heads,
            group,
            dim,
            mask,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn attention_equals_its_reference(case in case()) {
        check(&case, 1.0);
    }

    #[test]
    fn padding_and_company_change_no_bit_of_a_causal_row(length in 1usize..700, padding in 0usize..150) {
        let seq = padding + length;
        let mask = AttentionMask::Causal([0..seq as u32, padding as u32..seq as u32].into());
        let shapes = [[2, seq, 4, 8], [2, seq, 2, 8], [2, seq, 2, 8]];
        let inputs = [0, 1, 2].map(|i| values(shapes[i], 10 + i as u64, 1.0));
        let [q, k, v] = inputs.clone();
        let padded = <F as AttentionOps>::attention(q, k, v, &mask, 0.3);
        let row = |x: &Tensor<F, 4>| {
            let x = x.clone().narrow(0, 1, 1).narrow(1, padding, length).into_data();
            Tensor::<F, 4>::from_data(x, &Default::default())
        };
        let [q, k, v] = inputs.each_ref().map(row);
        let alone = AttentionMask::Causal([0..length as u32].into());
        let alone = <F as AttentionOps>::attention(q, k, v, &alone, 0.3);
        prop_assert!(bits(row(&padded)) == bits(alone));
    }

    #[test]
    fn company_changes_no_bit_of_a_causal_segment(before in 0usize..150, length in 1usize..400) {
        let seq = before + length;
        let mask = AttentionMask::CausalSegments([0, before as u32, seq as u32].into());
        let shapes = [[1, seq, 4, 8], [1, seq, 2, 8], [1, seq, 2, 8]];
        let inputs = [0, 1, 2].map(|i| values(shapes[i], 20 + i as u64, 1.0));
        let [q, k, v] = inputs.clone();
        let beside = <F as AttentionOps>::attention(q, k, v, &mask, 0.3);
        let segment = |x: &Tensor<F, 4>| {
            Tensor::<F, 4>::from_data(x.clone().narrow(1, before, length).into_data(), &Default::default())
        };
        let [q, k, v] = inputs.each_ref().map(segment);
        let alone = AttentionMask::Causal([0..length as u32].into());
        let alone = <F as AttentionOps>::attention(q, k, v, &alone, 0.3);
        prop_assert!(bits(segment(&beside)) == bits(alone));
    }

    #[test]
    fn cross_attention_equals_its_reference(queries in 1usize..30, keys in 1usize..200, group in 1usize..3) {
        let ranges = [0..keys as u32, (keys / 2) as u32..keys as u32];
        let mask = AttentionMask::Keys(ranges.into());
        check(&Case { batch: 2, queries, keys, kv_heads: 2, group, dim: 16, mask }, 1.0);
    }
}

#[test]
fn a_query_that_sees_nothing_gets_zeros_and_gives_no_gradient() {
    let mask = AttentionMask::Causal([40..100, 0..0].into());
    let case = Case { batch: 2, queries: 100, keys: 100, kv_heads: 2, group: 2, dim: 8, mask };
    check(&case, 1.0);
    let x = values([2, 100, 2, 8], 4, 1.0);
    let y = <F as AttentionOps>::attention(x.clone(), x.clone(), x, &case.mask, 1.0);
    let y = y.into_data().to_vec::<f32>().expect("f32");
    assert!(y[..40 * 16].iter().chain(&y[100 * 16..]).all(|&y| y == 0.0));
}

#[test]
fn large_scores_do_not_overflow() {
    let mask = AttentionMask::Full;
    let x = values([1, 70, 1, 16], 5, 60.0);
    let y = <F as AttentionOps>::attention(x.clone(), x.clone(), x.clone(), &mask, 1.0);
    assert_close("large scores", y, reference::attention(x.clone(), x.clone(), x, &mask, 1.0));
    check(&Case { batch: 1, queries: 70, keys: 70, kv_heads: 1, group: 2, dim: 16, mask }, 40.0);
}

#[test]
fn windows_of_sixty_four_and_uneven_ones_agree() {
    for ends in [vec![0, 64, 128, 192, 256], vec![0, 16, 80, 81, 200, 256]] {
        let mask = AttentionMask::Segments(ends.into());
        check(&Case { batch: 1, queries: 256, keys: 256, kv_heads: 3, group: 1, dim: 64, mask }, 1.0);
    }
}

#[test]
fn heads_split_from_one_projection_are_read_in_place() {
    let qkv = values([2, 50, 3, 4, 8], 6, 1.0);
    let part = |i| qkv.clone().narrow(2, i, 1).squeeze_dim::<4>(2);
    let copied = |i| Tensor::<F, 4>::from_data(part(i).into_data(), &Default::default());
    let mask = AttentionMask::Causal([0..50, 3..50].into());
    let found = <F as AttentionOps>::attention(part(0), part(1), part(2), &mask, 0.3);
    assert_close("views", found, <F as AttentionOps>::attention(copied(0), copied(1), copied(2), &mask, 0.3));
}

#[test]
fn attention_does_not_depend_on_threads() {
    let shapes = [[2, 150, 6, 32], [2, 150, 2, 32], [2, 150, 2, 32]];
    let masks =
        [AttentionMask::Causal([0..150, 20..150].into()), AttentionMask::Segments([0, 70, 71, 150].into())];
    assert_same_on_any_number_of_threads(|| {
        let run = |mask: &AttentionMask| {
            let inputs = shapes.map(|shape| leaf(&values(shape, 7, 1.0)));
            let [q, k, v] = inputs.clone();
            let out = <A as AttentionOps>::attention(q, k, v, mask, 0.2);
            let mut found = vec![bits(out.clone().inner())];
            let gradients = pull(out);
            found.extend(inputs.iter().map(|input| bits(gradient(input, &gradients))));
            found
        };
        masks.iter().flat_map(run).collect()
    });
}

#[test]
fn attention_with_a_bias_has_the_bits_of_its_parts_and_their_gradients() {
    let [q, k, v] = [([2, 5, 3, 4], 1), ([2, 7, 3, 4], 2), ([2, 7, 3, 4], 3)]
        .map(|(shape, seed)| values(shape, seed, 1.0));
    let added = [values([1, 3, 5, 7], 4, 1.0), values([2, 1, 1, 7], 5, 1.0)];
    let inputs = [&q, &k, &v].map(leaf);
    let found = A::biased_attention(inputs.clone(), &added.each_ref().map(frozen));
    let alone = F::biased_attention([q.clone(), k.clone(), v.clone()], &added);
    assert_eq!(bits(found.clone().inner()), bits(alone));
    let parts = [&q, &k, &v].map(leaf);
    let [q_bhsk, k_bhsk, v_bhsk] = parts.clone().map(|part| part.swap_dims(1, 2));
    let scores = q_bhsk.matmul(k_bhsk.swap_dims(2, 3));
    let weights = reference::biased_softmax(scores, &added.each_ref().map(frozen));
    let composed = weights.matmul(v_bhsk).swap_dims(1, 2);
    assert_close("the output", found.clone().inner(), composed.clone().inner());
    let (found, composed) = (pull(found), pull(composed));
    for (input, part) in inputs.iter().zip(&parts) {
        assert_close("a gradient", gradient(input, &found), gradient(part, &composed));
    }
}

#[test]
fn what_is_added_to_scores_has_its_gradient_if_it_is_tracked() {
    let [q, k, v] = [([2, 5, 3, 4], 1), ([2, 7, 3, 4], 2), ([2, 7, 3, 4], 3)]
        .map(|(shape, seed)| values(shape, seed, 1.0));
    let [bias, mask] = [values([1, 3, 5, 7], 4, 1.0), values([2, 1, 1, 7], 5, 1.0)];
    let [trained, composed_bias] = [leaf(&bias), leaf(&bias)];
    let inputs = [&q, &k, &v].map(leaf);
    let found = A::biased_attention(inputs.clone(), &[frozen(&mask), trained.clone()]);
    let [q_bhsk, k_bhsk, v_bhsk] = [&q, &k, &v].map(|x| frozen(x).swap_dims(1, 2));
    let scores = q_bhsk.matmul(k_bhsk.swap_dims(2, 3));
    let weights = reference::biased_softmax(scores, &[frozen(&mask), composed_bias.clone()]);
    let composed = weights.matmul(v_bhsk).swap_dims(1, 2);
    let (found, composed) = (pull(found), pull(composed));
    assert_close("the bias's", gradient(&trained, &found), gradient(&composed_bias, &composed));
    assert!(inputs.iter().all(|input| input.grad(&found).is_some()));
}
