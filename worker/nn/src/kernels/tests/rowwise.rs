//! Norms, gates, GELU and rotary.

use proptest::prelude::*;

use super::*;
use crate::kernels::{AdaNorm, AttentionOps, RowOps, reference};

const EPS: f64 = 1e-6;

fn check_norms(rows: usize, dim: usize, scale: f32) {
    let (x, gain) = (values([rows, dim], 1, scale), values([dim], 2, 2.0));
    assert_close(
        "rms_norm",
        F::rms_norm(x.clone(), gain.clone(), EPS),
        reference::rms_norm(x.clone(), gain.clone(), EPS),
    );
    assert_close(
        "layer_norm",
        <F as RowOps>::layer_norm(x.clone(), EPS),
        reference::layer_norm(x.clone(), EPS),
    );

    let (fused, plain) = (leaf(&x), leaf(&x));
    let fused_gradients = pull(A::rms_norm(fused.clone(), frozen(&gain), EPS));
    let plain_gradients = pull(reference::rms_norm(plain.clone(), frozen(&gain), EPS));
    let (found, expected) = (gradient(&fused, &fused_gradients), gradient(&plain, &plain_gradients));
    // dx is the difference of two terms, r g and x r^3 (x . g) / d, which cancel where a row has few
    // elements: rounding is relative to the terms, not to what is left of them.
    assert_close_for_terms_of("rms_norm dx", norm(&root_weighted(&x, &gain)), found, expected);

    if dim > 2 {
        let fused_gradients = pull(<A as RowOps>::layer_norm(fused.clone(), EPS));
        let plain_gradients = pull(reference::layer_norm(plain.clone(), EPS));
        let (found, expected) = (gradient(&fused, &fused_gradients), gradient(&plain, &plain_gradients));
        let terms = norm(&(values(x.dims(), 99, 1.0) / deviation(&x)));
        assert_close_for_terms_of("layer_norm dx", terms, found, expected);
    }
}

/// `dy g / sqrt(mean(x^2) + eps)`: the first term of the gradient of [`reference::rms_norm`] under the pull
/// of [`pull`].
fn root_weighted(x: &Tensor<F, 2>, gain: &Tensor<F, 1>) -> Tensor<F, 2> {
    let root = (x.clone() * x.clone()).mean_dim(1).add_scalar(EPS).sqrt();
    values(x.dims(), 99, 1.0) * gain.clone().unsqueeze() / root
}

/// `sqrt(var(x) + eps)` of every row: what the terms of a layer norm's gradient are divided by.
fn deviation(x: &Tensor<F, 2>) -> Tensor<F, 2> {
    let centred = x.clone() - x.clone().mean_dim(1);
    (centred.clone() * centred).mean_dim(1).add_scalar(EPS).sqrt()
}

fn check_modulated(batch: usize, tokens: usize, dim: usize) {
    let inputs =
        [values([batch * tokens, dim], 3, 2.0), values([batch, dim], 4, 1.0), values([batch, dim], 5, 1.0)];
    let [x, scale, shift] = inputs.clone();
    assert_close(
        "modulated",
        F::modulated_layer_norm(x.clone(), scale.clone(), shift.clone(), EPS),
        reference::modulated_layer_norm(x, scale, shift, EPS),
    );
    let (fused, plain) = (inputs.each_ref().map(leaf), inputs.each_ref().map(leaf));
    let [x, scale, shift] = fused.clone();
    let fused_gradients = pull(A::modulated_layer_norm(x, scale, shift, EPS));
    let [x, scale, shift] = plain.clone();
    let plain_gradients = pull(reference::modulated_layer_norm(x, scale, shift, EPS));
    let terms = norm(&(values([batch * tokens, dim], 99, 1.0) / deviation(&inputs[0])));
    for (i, (fused, plain)) in fused.iter().zip(&plain).enumerate() {
        let what = format!("modulated, gradient {i}");
        let terms = if i == 0 { terms } else { 0.0 };
        let (found, expected) = (gradient(fused, &fused_gradients), gradient(plain, &plain_gradients));
        assert_close_for_terms_of(&what, terms, found, expected);
    }
}

/// Scales and shifts side by side, in either order, and an input that others read as well: as its parts would
/// have it.
fn check_ada(batch: usize, tokens: usize, dim: usize) {
    let inputs = [values([batch * tokens, dim], 3, 2.0), values([batch, 2 * dim], 4, 1.0)];
    for shift_first in [false, true] {
        let (fused, plain) = (inputs.each_ref().map(leaf), inputs.each_ref().map(leaf));
        let [x, ada] = fused.clone();
        let fused_gradients = pull(x.clone() + A::ada_layer_norm(x, ada, AdaNorm { shift_first, eps: EPS }));
        let [x, ada] = plain.clone();
        let half = |start| ada.clone().narrow(1, start, dim);
        let (scale, shift) = if shift_first { (half(dim), half(0)) } else { (half(0), half(dim)) };
        let plain_gradients = pull(x.clone() + A::modulated_layer_norm(x, scale, shift, EPS));
        for (fused, plain) in fused.iter().zip(&plain) {
            let (found, expected) = (gradient(fused, &fused_gradients), gradient(plain, &plain_gradients));
            assert!(found.into_data() == expected.into_data(), "the same operations, the same bits");
        }
    }
}

fn check_pointwise(rows: usize, width: usize, scale: f32) {
    let (gate, up) = (values([rows, width], 6, scale), values([rows, width], 7, 1.5));
    assert_close("swiglu", F::swiglu(gate.clone(), up.clone()), reference::swiglu(gate.clone(), up.clone()));
    assert_close("gelu", F::gelu_tanh(gate.clone()), reference::gelu_tanh(gate.clone()));

    let (fused, plain) = ([leaf(&gate), leaf(&up)], [leaf(&gate), leaf(&up)]);
    let fused_gradients = pull(A::swiglu(fused[0].clone(), fused[1].clone()));
    let plain_gradients = pull(reference::swiglu(plain[0].clone(), plain[1].clone()));
    for (fused, plain) in fused.iter().zip(&plain) {
        assert_close("swiglu gradient", gradient(fused, &fused_gradients), gradient(plain, &plain_gradients));
    }
    let fused_gradients = pull(A::gelu_tanh(fused[0].clone()));
    let plain_gradients = pull(reference::gelu_tanh(plain[0].clone()));
    assert_close(
        "gelu gradient",
        gradient(&fused[0], &fused_gradients),
        gradient(&plain[0], &plain_gradients),
    );
}

fn check_rotary([batch, seq, heads, dim]: [usize; 4], tables: usize) {
    let x = values([batch, seq, heads, dim], 8, 1.0);
    let (cos, sin) = (values([tables, seq, dim], 9, 1.0), values([tables, seq, dim], 10, 1.0));
    assert_close(
        "rotary",
        F::rotary(x.clone(), cos.clone(), sin.clone()),
        reference::rotary(x.clone(), cos.clone(), sin.clone()),
    );
    let (fused, plain) = (leaf(&x), leaf(&x));
    let fused_gradients = pull(A::rotary(fused.clone(), frozen(&cos), frozen(&sin)));
    let plain_gradients = pull(reference::rotary(plain.clone(), frozen(&cos), frozen(&sin)));
    assert_close("rotary dx", gradient(&fused, &fused_gradients), gradient(&plain, &plain_gradients));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn norms_equal_their_references(rows in 1usize..40, dim in 1usize..200, scale in 0.01f32..30.0) {
        check_norms(rows, dim, scale);
    }

    #[test]
    fn modulated_norm_equals_its_reference(batch in 1usize..4, tokens in 1usize..20, dim in 3usize..100) {
        check_modulated(batch, tokens, dim);
        check_ada(batch, tokens, dim);
    }

    #[test]
    fn gates_and_gelu_equal_their_references(rows in 1usize..40, width in 1usize..300, scale in 0.1f32..8.0) {
        check_pointwise(rows, width, scale);
    }

    #[test]
    fn rounding_equals_its_reference(rows in 0usize..40, width in 1usize..300, scale in 1e-6f32..1e6) {
        check_rounding(rows, width, scale);
    }

    #[test]
    fn rotary_equals_its_reference(batch in 1usize..4, seq in 1usize..20, heads in 1usize..4, half in 1usize..40, shared: bool) {
        check_rotary([batch, seq, heads, 2 * half], if shared { 1 } else { batch });
    }
}

/// As `half` rounds, and GPUs: ties to even. Not as the reference does here, whose cast goes through f64 and
/// rounds some ties up.
fn to_nearest(x: &Tensor<F, 2>) -> Vec<u32> {
    let values = x.to_data().to_vec::<f32>().expect("f32").into_iter();
    values.map(|value| half::bf16::from_f32(value).to_f32().to_bits()).collect()
}

fn check_rounding(rows: usize, width: usize, scale: f32) {
    let (x, y) = (values([rows, width], 17, scale), values([rows, width], 18, scale));
    assert_eq!(bits(F::rounded(x.clone())), to_nearest(&x));
    assert_eq!(bits(F::widened(F::narrowed(x.clone()))), to_nearest(&x));
    assert_eq!(bits(F::rounded_sum(x.clone(), y.clone())), to_nearest(&(x.clone() + y.clone())));
    // Gradients pass as they are, unrounded.
    let (tracked, other) = (leaf(&x), leaf(&y));
    let gradients = pull(A::rounded_sum(A::rounded(tracked.clone()), other.clone()));
    let dy = bits(values([rows, width], 99, 1.0));
    assert_eq!([bits(gradient(&tracked, &gradients)), bits(gradient(&other, &gradients))], [dy.clone(), dy]);
}

#[test]
fn rounding_leaves_shared_tensors_and_views_alone() {
    let x = values([5, 6], 19, 1.0);
    let before = bits(x.clone());
    let rounded = F::rounded(x.clone());
    assert_ne!(bits(rounded), before);
    let part = F::rounded(x.clone().narrow(0, 1, 3));
    assert_eq!(part.dims(), [3, 6]);
    assert_eq!(bits(F::rounded_sum(x.clone(), x.clone())), to_nearest(&(x.clone() * 2.0)));
    assert_eq!(bits(x), before);
    let infinite =
        F::rounded(Tensor::from_floats([[f32::MAX, f32::NEG_INFINITY, f32::NAN]], &Default::default()));
    let infinite = infinite.into_data().to_vec::<f32>().expect("f32");
    assert!(infinite[..2] == [f32::INFINITY, f32::NEG_INFINITY] && infinite[2].is_nan());
}

#[test]
fn wide_and_long_tensors_cross_block_boundaries() {
    check_norms(37, 1536, 1.0);
    check_modulated(3, 11, 768);
    check_ada(3, 11, 768);
    check_pointwise(19, 2048, 4.0);
    check_rounding(19, 2048, 4.0);
    check_rotary([2, 150, 3, 64], 2);
}

#[test]
fn gates_saturate_without_nan() {
    let x = Tensor::<F, 2>::from_floats([[-1e4, -200.0, -90.0, 90.0, 200.0, 1e4]], &Default::default());
    for y in [F::swiglu(x.clone(), x.ones_like()), F::gelu_tanh(x)] {
        let y = y.into_data().to_vec::<f32>().expect("f32");
        assert!(y[..3].iter().all(|y| y.abs() < 1e-30), "{y:?}");
        assert_eq!(y[3..], [90.0, 200.0, 1e4]);
    }
}

#[test]
fn views_are_read_where_they_are_and_nan_is_kept() {
    let x = values([2, 6, 3, 8], 11, 1.0);
    let (cos, sin) = (values([1, 6, 8], 12, 1.0), values([1, 6, 8], 13, 1.0));
    let view = x.swap_dims(1, 2).narrow(1, 1, 2).swap_dims(1, 2);
    let copied = Tensor::from_data(view.to_data(), &Default::default());
    assert_close("view", F::rotary(view, cos.clone(), sin.clone()), F::rotary(copied, cos, sin));

    let poisoned = values([2, 40], 14, 1.0) * f32::NAN;
    for y in [
        <F as RowOps>::layer_norm(poisoned.clone(), EPS),
        F::gelu_tanh(poisoned.clone()),
        F::swiglu(poisoned.clone(), poisoned),
    ] {
        assert!(y.into_data().to_vec::<f32>().expect("f32").iter().all(|y| y.is_nan()));
    }
}

#[test]
fn rowwise_operations_do_not_depend_on_threads() {
    let (x, gain) = (values([300, 96], 15, 1.0), values([96], 16, 1.0));
    assert_same_on_any_number_of_threads(|| {
        let tracked = leaf(&x);
        let gradients =
            pull(A::swiglu(A::rms_norm(tracked.clone(), frozen(&gain), EPS), A::gelu_tanh(tracked.clone())));
        vec![bits(F::rms_norm(x.clone(), gain.clone(), EPS)), bits(gradient(&tracked, &gradients))]
    });
}
