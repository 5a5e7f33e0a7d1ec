//! What a GPU is asked first: one kernel, one product, and a thousand products that each need the one before.
//! Small, so that what fails is the kernel, the library or the order of work, and not memory or time.

use std::time::Duration;

use burn::tensor::{DType, Tensor, TensorData};
use burn_cuda::{Cuda, CudaDevice};
use coxswain_nn::kernels::LinearOps;
use coxswain_worker::selftest::Finding;

use crate::{clock, cublas};

const SECTION: &str = "first";
/// Products in a row.
const IN_ORDER: usize = 1000;
/// Side of the matrices that are multiplied in a row.
const SIDE: usize = 64;

/// Asks all three of a GPU.
pub fn findings(gpu: usize) -> Vec<Finding> {
    let device = CudaDevice::new(gpu);
    type Probe = fn(&CudaDevice) -> Result<String, String>;
    let probes: [(&str, Probe); 3] =
        [("a kernel", kernel), ("a matmul", product), ("a thousand matmuls in order", in_order)];
    probes.iter().map(|(what, probe)| Finding::checked(SECTION, what, probe(&device))).collect()
}

fn tensor(shape: [usize; 2], value: impl Fn(usize) -> f32, device: &CudaDevice) -> Tensor<Cuda, 2> {
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// What the GPU has, in float32.
fn numbers(x: Tensor<Cuda, 2>) -> Result<Vec<f32>, String> {
    let data = x.try_into_data().map_err(|why| format!("the GPU does not answer: {why:?}"))?;
    data.convert::<f32>().to_vec().map_err(|why| format!("{why:?}"))
}

fn multiplied(x: Tensor<Cuda, 2>, w: &Tensor<Cuda, 2>) -> Tensor<Cuda, 2> {
    <Cuda as LinearOps>::product(x, w.clone())
}

/// `Ok` with the time if all values are right, `Err` with the first that is wrong.
fn compared(found: &[f32], expected: impl Fn(usize) -> f32, took: Duration) -> Result<String, String> {
    let wrong = found.iter().enumerate().find(|&(at, &value)| value != expected(at));
    match wrong {
        None => Ok(format!("{} values are correct, after {took:.1?}", found.len())),
        Some((at, value)) => Err(format!("value {at} is {value} instead of {}", expected(at))),
    }
}

fn kernel(device: &CudaDevice) -> Result<String, String> {
    let began = clock::now();
    let value = |at: usize| (at % 7) as f32 * 0.25 - 0.5;
    let found = numbers(tensor([10, 100], value, device) * 2.0 + 1.0)?;
    compared(&found, |at| value(at) * 2.0 + 1.0, began.elapsed())
}

fn product(device: &CudaDevice) -> Result<String, String> {
    let began = clock::now();
    // No kernel's tile divides these sides. Few bits: products and sums are exact in any order.
    let (rows, inner, columns) = (136, 72, 104);
    let (a, b) = (|at: usize| (at % 7) as f32 * 0.25 - 0.5, |at: usize| (at % 5) as f32 * 0.5 - 1.0);
    let [x, w] = [tensor([rows, inner], a, device), tensor([inner, columns], b, device)];
    let found = numbers(multiplied(x.cast(DType::BF16), &w.cast(DType::BF16)))?;
    let element = |at: usize| -> f32 {
        (0..inner).map(|k| a(at / columns * inner + k) * b(k * columns + at % columns)).sum()
    };
    let finding = compared(&found, element, began.elapsed())?;
    Ok(format!("{}: {finding}", cublas::told()))
}

/// Each product moves the columns on by one, and a kernel stands between each and the next: one that began
/// too early, or too late, leaves them elsewhere.
fn in_order(device: &CudaDevice) -> Result<String, String> {
    let value = |at: usize| (at % 127) as f32;
    let moves = |at: usize| f32::from(u8::from((at / SIDE + 1) % SIDE == at % SIDE));
    let moves = tensor([SIDE, SIDE], moves, device).cast(DType::BF16);
    let next = |x: Tensor<Cuda, 2>| multiplied(x, &moves).cast(DType::BF16);
    let first = next(tensor([SIDE, SIDE], value, device).cast(DType::BF16));
    numbers(first.clone())?;
    let began = clock::now();
    let found = numbers((1..IN_ORDER).fold(first, |x, _| next(x)))?;
    let took = began.elapsed();
    let from = |at: usize| at / SIDE * SIDE + (at % SIDE + SIDE - IN_ORDER % SIDE) % SIDE;
    let finding = compared(&found, |at| value(from(at)), took)?;
    Ok(format!(
        "{finding} ({:.1} us per matmul and conversion)",
        took.as_secs_f64() * 1e6 / (IN_ORDER - 1) as f64
    ))
}
