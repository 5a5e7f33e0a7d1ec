//! cuBLASLt, or what stands for it: right for all matrices that it is asked for, and in its turn among burn's
//! work.

use burn::tensor::{DType, Tensor, TensorData};
use burn_cuda::{Cuda, CudaDevice};
use coxswain_cuda::NVIDIA;
use coxswain_nn::kernels::{
    LinearOps, Residual,
    matrix_library::{MatrixProduct, multiply},
};
use cubecl::{Runtime, client::ComputeClient, cuda::CudaRuntime, device::Device};

use super::matrices::{Case, Number, PlacedMatrices, cases, is_right, product};
use crate::{gpus, skipped_unless};

/// A client of the first GPU, if products are the library's there.
fn client(test: &str) -> Option<ComputeClient<CudaRuntime>> {
    gpus(test)?;
    let multiplier = NVIDIA.multiplier();
    let found =
        if multiplier.starts_with("cuBLASLt") { Ok(()) } else { Err(format!("{multiplier} multiply")) };
    skipped_unless(test, found)?;
    Some(CudaRuntime::client(&CudaDevice::new(0)))
}

/// One product by the library: what it left there, guards included.
fn by_library(
    client: &ComputeClient<CudaRuntime>,
    case: &Case,
    [number, result]: [Number; 2],
) -> Result<Vec<f32>, String> {
    let (x, w) = (PlacedMatrices::new(&case.x, number, 1), PlacedMatrices::new(&case.w, number, 2));
    let [x, w, out] =
        [&x, &w, &PlacedMatrices::nothing(&case.out(), result)].map(|placed| placed.upload(client));
    let device = CudaDevice::new(0).to_id();
    let (x, w, to) = (x.matrix(), w.matrix(), out.matrix());
    let asked = MatrixProduct { device, x, w, out: to, may_round: false, bias: None, more: None };
    if !multiply(asked) {
        return Err("not taken".to_owned());
    }
    out.read(client)
}

#[test]
fn the_library_is_right_for_matrices_of_every_layout_and_type() {
    let Some(client) = client("cuBLASLt") else { return };
    let (mut wrong, mut right) = (Vec::new(), 0);
    for case in &cases() {
        for numbers in
            [[Number::Bf16, Number::Float], [Number::Bf16, Number::Bf16], [Number::Float, Number::Float]]
        {
            // A result in bfloat16 keeps 8 bits of sums that are of the size of the inner dimension's root.
            let tolerance = if numbers[1] == Number::Bf16 { 2e-2 } else { 1e-4 };
            let expected = product(
                &PlacedMatrices::new(&case.x, numbers[0], 1),
                &PlacedMatrices::new(&case.w, numbers[0], 2),
            );
            let outcome = by_library(&client, case, numbers)
                .and_then(|found| is_right(&found, &expected, case.x.columns, tolerance));
            match outcome {
                Ok(()) => right += 1,
                Err(why) => wrong.push(format!("{numbers:?} {case}: {why}")),
            }
        }
    }
    println!("cuBLASLt: {right} right");
    assert!(wrong.is_empty(), "{} products are wrong: {wrong:#?}", wrong.len());
}

#[test]
fn the_library_gives_the_same_bits_again() {
    let Some(client) = client("the same bits") else { return };
    let numbers = [Number::Bf16, Number::Float];
    let bits = |case: &Case| -> Vec<u32> {
        let found = by_library(&client, case, numbers).expect("taken");
        found.into_iter().map(f32::to_bits).collect()
    };
    for case in cases().iter().take(8) {
        assert_eq!(bits(case), bits(case), "{case}");
    }
}

fn matrix(shape: [usize; 2], seed: u64) -> Tensor<Cuda, 2> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| next()).collect();
    Tensor::from_data(TensorData::new(values, shape), &CudaDevice::new(0))
}

fn numbers(x: Tensor<Cuda, 2>) -> Vec<f32> {
    x.into_data().convert::<f32>().to_vec().expect("converted")
}

/// `x w` by the host, from what the GPU has of both.
fn by_host(x: &Tensor<Cuda, 2>, w: &Tensor<Cuda, 2>) -> Vec<f32> {
    let ([n, inner], [_, o]) = (x.dims(), w.dims());
    let (x, w) = (numbers(x.clone()), numbers(w.clone()));
    let element = |i: usize| (0..inner).map(|k| x[i / o * inner + k] * w[k * o + i % o]).sum::<f32>();
    (0..n * o).map(element).collect()
}

fn assert_near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= 1e-3 * expected.abs().max(1.0), "{i}: {found}, not {expected}");
    }
}

/// Nothing here waits before the end: each product's input is made just before, changed in place just after,
/// and its result read by a kernel at once; memory that is let go is given to what comes next.
#[test]
fn products_stand_in_their_turn_among_other_work() {
    if client("the order of products").is_none() {
        return;
    }
    let (first, w, seed) = (matrix([48, 64], 1), matrix([64, 64], 2) * 0.1, matrix([48, 64], 3));
    let mut found = first.clone();
    let mut expected = numbers(first);
    let (weights, seeds) = (numbers(w.clone()), numbers(seed.clone()));
    for round in 0..12 {
        let input = found * 0.5 + seed.clone();
        let output = <Cuda as LinearOps>::product(input.clone(), w.clone());
        // In place, if the product's memory is let go too soon.
        let spoilt = input * f32::NAN;
        drop(spoilt);
        found = output + 0.25 * round as f32;
        let input: Vec<f32> = expected.iter().zip(&seeds).map(|(x, s)| x * 0.5 + s).collect();
        let element =
            |i: usize| (0..64).map(|k| input[i / 64 * 64 + k] * weights[k * 64 + i % 64]).sum::<f32>();
        expected = (0..48 * 64).map(|i| element(i) + 0.25 * round as f32).collect();
    }
    assert_near(&numbers(found), &expected);
}

#[test]
fn products_of_what_another_thread_has_made_wait_for_it() {
    if client("products across threads").is_none() {
        return;
    }
    for round in 0..8 {
        let made = std::thread::spawn(move || (matrix([32, 48], round) * 2.0) + 1.0);
        let x = made.join().expect("made");
        let w = matrix([48, 40], 100 + round) * 0.2;
        let y = <Cuda as LinearOps>::product(x.clone(), w.clone());
        // And the other way round: its result is another thread's.
        let (sent, given) = (y.clone(), std::thread::spawn(move || numbers(y * 3.0)));
        let expected: Vec<f32> = by_host(&x, &w).into_iter().map(|value| value * 3.0).collect();
        assert_near(&given.join().expect("read"), &expected);
        drop(sent);
    }
}

#[test]
fn a_narrow_weight_is_multiplied_where_it_lies() {
    if client("a narrow weight").is_none() {
        return;
    }
    let (x, weight) = (matrix([20, 64], 7), matrix([40, 64], 8).cast(DType::BF16));
    let y = <Cuda as LinearOps>::linear(x.clone(), weight.clone(), None);
    let rounded = x.cast(DType::BF16).cast(DType::F32);
    assert_near(&numbers(y), &by_host(&rounded, &weight.cast(DType::F32).transpose()));
}

#[test]
fn a_bias_and_a_residual_are_added_on_the_way() {
    if client("a bias and a residual").is_none() {
        return;
    }
    let (x, w, stream) = (matrix([20, 64], 1), matrix([40, 64], 2) * 0.2, matrix([20, 40], 3));
    let bias = matrix([1, 40], 4).reshape([40]);
    let product = by_host(&x, &w.clone().transpose());
    let (biases, streams) = (numbers(bias.clone().reshape([1, 40])), numbers(stream.clone()));
    let expected = |biased: bool, summed: bool| -> Vec<f32> {
        let added = |i: usize| {
            let bias = if biased { biases[i % 40] } else { 0.0 };
            product[i] + bias + if summed { streams[i] } else { 0.0 }
        };
        (0..product.len()).map(added).collect()
    };
    for biased in [false, true] {
        let bias = || biased.then(|| bias.clone());
        let y = <Cuda as LinearOps>::linear(x.clone(), w.clone(), bias());
        assert_near(&numbers(y), &expected(biased, false));
        let residual = Residual { x_no: stream.clone(), rounded: false };
        let sum = <Cuda as LinearOps>::linear_residual(residual, x.clone(), w.clone(), bias());
        assert_near(&numbers(sum), &expected(biased, true));
    }
    assert_near(&numbers(stream), &streams);
}
