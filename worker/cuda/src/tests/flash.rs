//! Attention in one kernel, of inputs in half precision, beside the CPU's of the same inputs.

use std::io::Write;

use burn::{backend::Flex, tensor::Tensor};
use burn_cuda::{Cuda, CudaDevice};
use coxswain_nn::{
    dtypes::WeightsDtype,
    kernels::{AttentionMask, AttentionOps, AttentionSaved, ModelBackend, attends_in_one_kernel, precision},
};

use super::{assert_close, gpu, numbers, tensor};

/// `[batch, queries, keys, kv_heads, group, dim]`.
type Sizes = [usize; 6];

/// Output and gradients of attention whose inputs are rounded first, and the output's gradient, too, where it
/// `rounds`; queries lie between other numbers, as in
/// a joined projection, and keys and values by head.
fn attended<B: ModelBackend>(
    sizes: Sizes,
    mask: &AttentionMask,
    rounds: bool,
    device: &B::Device,
) -> Vec<Vec<f32>> {
    let [batch, queries, keys, kv_heads, group, dim] = sizes;
    let heads = kv_heads * group;
    let rounded = |shape: [usize; 4], seed| {
        let x: Tensor<B, 4> = tensor(shape, seed, device);
        B::rounded(x.reshape([batch, shape.iter().product::<usize>() / batch])).reshape(shape)
    };
    let q_bshk = rounded([batch, queries, heads + kv_heads, dim], 1).narrow(2, kv_heads, heads);
    let k_bshk = rounded([batch, kv_heads, keys, dim], 2).swap_dims(1, 2);
    let v_bshk = rounded([batch, kv_heads, keys, dim], 3).swap_dims(1, 2);
    let shape = [batch, queries, heads, dim];
    let dout_bshk = if rounds { rounded(shape, 4) } else { tensor(shape, 4, device) };
    let scale = 1.0 / (dim as f64).sqrt();
    let output = B::attention_saving(q_bshk.clone(), k_bshk.clone(), v_bshk.clone(), mask, scale);
    let out = numbers(output.out_bshk.clone());
    let saved = AttentionSaved { q_bshk, k_bshk, v_bshk, output };
    let gradients = B::attention_backward(saved, mask, scale, dout_bshk);
    std::iter::once(out).chain(gradients.map(numbers)).collect()
}

fn fuses(width: usize, gpu: &CudaDevice) -> bool {
    attends_in_one_kernel(&Tensor::<Cuda, 4>::zeros([1, 16, 1, width], gpu))
}

/// A GPU, and a thread that computes for a model of bfloat16 weights.
struct HalfModel {
    gpu: CudaDevice,
}

impl HalfModel {
    /// None where these kernels do not attend, with a line that says so.
    fn begin() -> Option<Self> {
        let model = Self { gpu: gpu()? };
        precision::follow(WeightsDtype::Bfloat16);
        if !fuses(16, &model.gpu) {
            let why = "this GPU does not multiply bfloat16 by mma.sync";
            let _ = writeln!(std::io::stderr(), "skipped: attention in one kernel: {why}");
            return None;
        }
        Some(model)
    }
}

impl Drop for HalfModel {
    fn drop(&mut self) {
        precision::follow(WeightsDtype::Float32);
    }
}

fn cases() -> Vec<(Sizes, AttentionMask)> {
    let causal = |ranges: &[std::ops::Range<u32>]| AttentionMask::Causal(ranges.into());
    vec![
        ([2, 50, 50, 2, 3, 16], AttentionMask::Full),
        ([1, 64, 64, 2, 1, 80], AttentionMask::Full),
        ([2, 33, 170, 2, 2, 64], AttentionMask::Keys([0..170, 35..161].into())),
        ([3, 150, 150, 2, 2, 128], causal(&[0..150, 20..150, 3..40])),
        // Fewer queries than keys, and more; keys that begin behind what a cube's queries see.
        ([1, 70, 150, 1, 2, 32], causal(&[0..150])),
        ([1, 150, 70, 1, 2, 32], causal(&[0..70])),
        ([1, 150, 150, 1, 2, 32], causal(&[70..150])),
        ([1, 70, 70, 1, 8, 256], causal(&[0..70])),
        ([1, 70, 70, 1, 2, 160], AttentionMask::Full),
        ([1, 130, 130, 2, 1, 32], AttentionMask::Segments([0, 20, 20, 84, 85, 130].into())),
        ([1, 130, 130, 2, 2, 32], AttentionMask::CausalSegments([0, 65, 130].into())),
    ]
}

#[test]
fn one_kernel_gives_what_products_give() {
    let Some(model) = HalfModel::begin() else { return };
    for (sizes, mask) in cases() {
        assert!(fuses(sizes[5], &model.gpu), "{sizes:?}");
        let expected = attended::<Flex>(sizes, &mask, true, &Default::default());
        let found = attended::<Cuda>(sizes, &mask, true, &model.gpu);
        for (what, (found, expected)) in ["output", "dq", "dk", "dv"].iter().zip(found.iter().zip(&expected))
        {
            // Weights and gradients of scores are rounded once each: within 2^-9 of a value.
            assert_close(&format!("{what} of {sizes:?}, {mask:?}"), found, expected, 4e-3);
        }
        assert!(
            found == attended::<Cuda>(sizes, &mask, true, &model.gpu),
            "{sizes:?}, {mask:?}: other bits the second time"
        );
    }
}

#[test]
fn the_gradient_of_the_output_is_rounded_for_everything_that_is_made_of_it() {
    let Some(model) = HalfModel::begin() else { return };
    let sizes = [2, 50, 50, 2, 2, 32];
    let [found, rounded] =
        [false, true].map(|rounds| attended::<Cuda>(sizes, &AttentionMask::Full, rounds, &model.gpu));
    assert!(found == rounded, "delta, or a product, is of another gradient");
}

#[test]
fn a_query_without_a_key_gets_zeros_and_gives_no_gradient() {
    let Some(model) = HalfModel::begin() else { return };
    // Keys from 40 on, and none, written in both ways.
    for [from, to] in [[0, 0], [30, 10]] {
        let mask = AttentionMask::Causal([40..64, from..to].into());
        let found = attended::<Cuda>([2, 64, 64, 2, 2, 32], &mask, true, &model.gpu);
        // Of output, dq, dk, dv: two batch rows of 64 tokens each.
        for values in &found {
            let token = values.len() / 128;
            let (before, after) = (&values[..40 * token], &values[64 * token..]);
            assert!(before.iter().chain(after).all(|&x| x == 0.0));
            assert!(values[41 * token..64 * token].iter().any(|&x| x != 0.0));
        }
    }
}

#[test]
fn what_is_no_number_reaches_the_output() {
    let Some(model) = HalfModel::begin() else { return };
    let x = || tensor::<Cuda, 4>([1, 40, 1, 32], 1, &model.gpu);
    let broken = x().slice_fill([0..1, 7..8, 0..1, 3..4], f32::NAN);
    for inputs in [[broken.clone(), x(), x()], [x(), broken.clone(), x()], [x(), x(), broken]] {
        let [q, k, v] = inputs;
        let out = numbers(Cuda::attention_saving(q, k, v, &AttentionMask::Full, 0.2).out_bshk);
        assert!(out.iter().any(|x| x.is_nan()));
    }
}

#[test]
fn other_models_and_other_widths_are_left_to_products() {
    let Some(model) = HalfModel::begin() else { return };
    assert!([8, 72, 144, 272].iter().all(|&width| !fuses(width, &model.gpu)));
    for weights in [WeightsDtype::Float32, WeightsDtype::Float16] {
        precision::follow(weights);
        assert!(!fuses(64, &model.gpu), "{weights:?}");
    }
}
