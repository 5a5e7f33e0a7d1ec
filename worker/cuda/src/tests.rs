//! Operations on a card against their references on the CPU. Without a card each test says so and passes.

use std::io::Write;

use burn::{
    backend::{Autodiff, Flex},
    tensor::{Tensor, TensorData, backend::Backend},
};

use burn_cuda::{Cuda, CudaDevice};
use coxswain_integration_tests::expert;
use coxswain_proto::run_spec::Recompute;
use coxswain_worker::{
    device::Accelerator,
    kernels::{AttentionMask, LowRank, ModelBackend},
};

use crate::Nvidia;

/// The first card, if this machine has one that can be used.
fn card() -> Option<CudaDevice> {
    match Nvidia.probe() {
        Ok(_) => Some(CudaDevice::new(0)),
        Err(missing) => {
            // A stderr that is closed loses a line, and nothing else.
            let _ = writeln!(std::io::stderr(), "skipped: operations on a card: {missing}");
            None
        }
    }
}

fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn tensor<B: Backend, const D: usize>(shape: [usize; D], seed: u64, device: &B::Device) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values(shape.iter().product(), seed), shape), device)
}

fn numbers<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data().convert::<f32>().to_vec().expect("converted to f32")
}

/// Norm of the difference over the norm.
#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let size = norm(&mut expected.iter().map(|&x| f64::from(x)));
    let error = norm(&mut found.iter().zip(expected).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    assert!(error <= tolerance * size, "{what}: relative error {:e}", error / size);
}

#[test]
fn what_is_missing_is_said_with_a_remedy() {
    if let Err(missing) = Nvidia.probe() {
        let said = missing.to_string();
        let remedies = ["install", "check", "newer"];
        assert!(remedies.iter().any(|remedy| said.contains(remedy)), "{said}");
    }
}

/// A block's worth of operations and the gradients of everything that is tracked; `bf16` narrows the weight.
fn block<B: ModelBackend>(device: &B::Device, bf16: bool) -> Vec<Vec<f32>> {
    let leaf = |shape: [usize; 2], seed| tensor::<Autodiff<B>, 2>(shape, seed, device).require_grad();
    let (x, a, b) = (leaf([128, 64], 1), leaf([8, 64], 2), leaf([192, 8], 3));
    let w = tensor::<B, 2>([192, 64], 4, device);
    let w = if bf16 { w.cast(burn::tensor::DType::BF16) } else { w };
    let gain = tensor::<B, 1>([64], 5, device);
    let update = LowRank { a_ri: a.clone(), b_or: b.clone(), scale: 0.5 };
    let normed = <Autodiff<B> as ModelBackend>::rms_norm(x.clone(), Tensor::from_inner(gain), 1e-6);
    let qkv = <Autodiff<B> as ModelBackend>::lora_linear(normed, Tensor::from_inner(w), None, update);
    let qkv = qkv.reshape([2, 64, 12, 16]);
    let part = |start| qkv.clone().narrow(2, start, 4);
    let mask = AttentionMask::Causal([0..64, 5..64].into());
    let out = <Autodiff<B> as ModelBackend>::attention(part(0), part(4), part(8), &mask, 0.25);
    let y = <Autodiff<B> as ModelBackend>::gelu_tanh(out.reshape([128, 64]));
    let dy = tensor::<B, 2>([128, 64], 6, device);
    let gradients = (y.clone() * Tensor::from_inner(dy)).sum().backward();
    let gradient = |leaf: &Tensor<Autodiff<B>, 2>| numbers(leaf.grad(&gradients).expect("tracked"));
    vec![numbers(y.inner()), gradient(&x), gradient(&a), gradient(&b)]
}

#[test]
fn a_block_agrees_with_the_cpu_in_float32_and_in_bfloat16() {
    let Some(card) = card() else { return };
    for (bf16, tolerance) in [(false, 1e-3), (true, 2e-2)] {
        let expected = block::<Flex>(&Default::default(), bf16);
        for (i, (found, expected)) in block::<Cuda>(&card, bf16).iter().zip(&expected).enumerate() {
            assert_close(&format!("value {i}, bf16 {bf16}"), found, expected, tolerance);
        }
    }
}

#[test]
fn the_expert_on_a_card_computes_what_pytorch_computes() {
    let Some(card) = card() else { return };
    for case in expert::CASES {
        expert::hold::<Cuda>(case, Recompute::Full, &card, 1e-3);
    }
}
