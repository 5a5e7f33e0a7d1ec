//! Weights in 4 and 8 bits: widened to the host's bits, and multiplied as bfloat16 weights are.

use std::convert::Infallible;

use burn::{
    backend::{Autodiff, Flex},
    tensor::Tensor,
};
use burn_cuda::Cuda;
use coxswain_nn::{
    dtypes::Packing,
    kernels::{
        JoinedLayers, LinearLayer, LinearOps, LowRank, ModelBackend, PackedMatrix, RowOps, Weight, WeightOps,
        quantized::QuantizedMatrix,
    },
};
use coxswain_worker::memory::Gauge;
use half::bf16;

use super::{Outcome, assert_close, gpu, pulled, tensor, values};
use crate::gauge::GpuGauge;

/// A matrix whose blocks and rows are of different sizes.
fn matrix(packing: Packing, [outputs, inputs]: [usize; 2], seed: u64) -> QuantizedMatrix {
    let mut dense = values(outputs * inputs, seed);
    for (at, value) in dense.iter_mut().enumerate() {
        *value *= 0.02 * (1 + at / 64 % 7 + at / inputs % 3) as f32;
    }
    let read = |first: usize, to: &mut [f32]| -> Result<(), Infallible> {
        to.copy_from_slice(&dense[first..first + to.len()]);
        Ok(())
    };
    let Ok(matrix) = QuantizedMatrix::quantize(packing, [outputs, inputs], read);
    matrix
}

fn packed<B: ModelBackend>(
    packing: Packing,
    shape: [usize; 2],
    seed: u64,
    device: &B::Device,
) -> PackedMatrix<B> {
    PackedMatrix::on(&matrix(packing, shape, seed), device)
}

/// What the host says of a matrix, rounded.
fn rounded(matrix: &QuantizedMatrix) -> Vec<u16> {
    let mut wide = vec![0.0; matrix.shape().iter().product()];
    matrix.dequantize(0, &mut wide);
    wide.into_iter().map(|value| bf16::from_f32(value).to_bits()).collect()
}

#[test]
fn a_gpu_widens_few_bits_to_what_the_host_says() {
    let Some(gpu) = gpu() else { return };
    // Rows of whole vectors and others; blocks that end with rows and do not; up to nine ranges of scales.
    for inputs in [1, 7, 63, 100, 257, 64, 264, 1000] {
        for outputs in [1, 5, 140] {
            for packing in [Packing::Nf4, Packing::Int8] {
                // One below the other, the second of another number of rows.
                let both = [matrix(packing, [outputs, inputs], 1), matrix(packing, [3, inputs], 2)];
                let parts = both.each_ref().map(|matrix| PackedMatrix::<Cuda>::on(matrix, &gpu));
                let found: Vec<bf16> = Cuda::unpacked(&parts).into_data().into_vec().expect("bfloat16");
                let expected = both.iter().flat_map(rounded);
                let differ = found.iter().map(|value| value.to_bits()).zip(expected).enumerate();
                let differ = differ.filter(|(_, (found, expected))| found != expected).map(|(at, _)| at);
                let differ: Vec<usize> = differ.collect();
                assert_eq!(found.len(), (outputs + 3) * inputs);
                assert!(differ.is_empty(), "{packing:?} [{outputs}, {inputs}]: other bits at {differ:?}");
            }
        }
    }
}

/// Layers of an input that rounding to bfloat16 does not change: with an update, with updates beside each
/// other, and without.
fn layers<B: ModelBackend>(device: &B::Device) -> Vec<Outcome> {
    let mut all = Vec::new();
    for packing in [Packing::Nf4, Packing::Int8] {
        for (rank, [n, i, o]) in [(8, [37, 264, 520]), (32, [33, 72, 260]), (5, [6, 41, 30])] {
            let x = RowOps::rounded(tensor::<B, 2>([n, i], 3, device));
            let what = |what: &str| format!("{packing:?}, {i} to {o}, rank {rank}: {what}");
            let w = |seed| Weight::from(packed::<B>(packing, [o, i], seed, device));
            let update = |a_ri, b_or| LowRank { a_ri, b_or, scale: 0.5, dropout: None };
            all.extend(pulled::<B, 2, 2, 2>(&what("one"), device, [[rank, i], [o, rank]], |[a, b]| {
                let x = Tensor::from_inner(x.clone());
                let adapted =
                    LinearOps::lora_linear(x.clone(), w(1).lifted::<Autodiff<B>>(), None, update(a, b));
                adapted + <Autodiff<B> as LinearOps>::linear(x, w(2).lifted::<Autodiff<B>>(), None)
            }));
            let factors = [[rank, i], [o, rank], [rank, i], [o, rank]];
            all.extend(pulled::<B, 4, 2, 2>(&what("two"), device, factors, |[a, b, c, d]| {
                let layer = |seed, update| LinearLayer { w_oi: w(seed).lifted(), bias_o: None, update };
                let layers = vec![layer(1, Some(update(a, b))), layer(2, Some(update(c, d)))];
                let outputs = LinearOps::linears(Tensor::from_inner(x.clone()), layers);
                Tensor::cat(outputs, 1)
            }));
        }
    }
    all
}

#[test]
fn layers_of_few_bits_are_those_of_their_bfloat16() {
    let Some(gpu) = gpu() else { return };
    let found = layers::<Cuda>(&gpu);
    for ((what, found), (_, expected)) in found.iter().zip(&layers::<Flex>(&Default::default())) {
        assert_close(what, found, expected, 1e-5);
    }
}

/// An input that trains, through a layer by itself and two that are joined.
fn of_an_input<B: ModelBackend>(
    device: &B::Device,
    weight: impl Fn(Packing, [usize; 2], u64) -> Weight<B>,
) -> Vec<Outcome> {
    let mut all = Vec::new();
    for packing in [Packing::Nf4, Packing::Int8] {
        for (rank, width, outputs) in [(8, 264, [264, 88]), (64, 132, [300, 264]), (5, 41, [30, 21])] {
            let what = format!("{packing:?} {width} to {outputs:?}, rank {rank}");
            let of = |number: usize| [[rank, width], [outputs[number], rank]];
            let ([a, b], [c, d]) = (of(0), of(1));
            let w = |number: usize| {
                weight(packing, [outputs[number], width], 1 + number as u64).lifted::<Autodiff<B>>()
            };
            let update = |a_ri, b_or| LowRank { a_ri, b_or, scale: 0.1, dropout: None };
            all.extend(pulled::<B, 3, 2, 2>(&what, device, [[37, width], a, b], |[x, a, b]| {
                LinearOps::lora_linear(x, w(0), None, update(a, b))
            }));
            let shapes = [[37, width], a, b, c, d];
            all.extend(pulled::<B, 5, 2, 2>(
                &format!("{what}, joined"),
                device,
                shapes,
                |[x, a, b, c, d]| {
                    let (one, other) = (update(a, b), update(c, d));
                    match (w(0), w(1)) {
                        (Weight::Packed(first), Weight::Packed(second)) => {
                            let w_oi = Weight::Packed([first, second].concat());
                            let (updates, outputs) = (vec![one, other], outputs.to_vec());
                            let layers =
                                JoinedLayers { w_oi, bias_o: None, updates, outputs, rounded: false };
                            LinearOps::joined(x, layers)
                        }
                        (first, second) => {
                            let layer =
                                |w_oi, update| LinearLayer { w_oi, bias_o: None, update: Some(update) };
                            Tensor::cat(
                                LinearOps::linears(x, vec![layer(first, one), layer(second, other)]),
                                1,
                            )
                        }
                    }
                },
            ));
        }
    }
    all
}

#[test]
fn layers_of_few_bits_and_their_gradients_are_near_the_cpus() {
    let Some(gpu) = gpu() else { return };
    let found = of_an_input::<Cuda>(&gpu, |packing, shape, seed| packed(packing, shape, seed, &gpu).into());
    let expected =
        of_an_input::<Flex>(&Default::default(), |packing, shape, seed| matrix(packing, shape, seed).into());
    assert_eq!(found.len(), expected.len());
    for ((what, found), (_, expected)) in found.iter().zip(&expected) {
        assert_close(what, found, expected, 2e-2);
    }
}

#[test]
fn a_widened_weight_is_gone_with_its_product() {
    let Some(gpu) = gpu() else { return };
    const SIDE: usize = 1024;
    let (gauge, x) = (GpuGauge::new(0), Tensor::<Cuda, 2>::ones([8, SIDE], &gpu));
    let parts = [packed::<Cuda>(Packing::Nf4, [SIDE; 2], 1, &gpu)];
    gauge.take_most();
    let before = gauge.read().in_use;
    gauge.watch(true);
    let y = <Cuda as LinearOps>::linear(x, Weight::Packed(parts.to_vec()), None);
    gauge.watch(false);
    let (most, after) = (gauge.take_most(), gauge.read().in_use);
    let (wide, made) = (2 * (SIDE * SIDE) as u64, 4 * (8 * SIDE) as u64);
    assert!(after <= before + made, "{before} bytes before, {after} after");
    assert!(most >= before + wide && most < before + wide + wide / 8, "{most} at most, from {before}");
    drop(y);
}
