//! What a GPU is asked first, each in a process of its own: whether it computes at all, and whether it
//! multiplies. Small, so that what fails is the kernel, and not memory or time.

use std::time::Instant;

use burn::tensor::{DType, Tensor, TensorData};
use burn_cuda::{Cuda, CudaDevice};
use coxswain_cuda::NVIDIA;
use coxswain_nn::kernels::LinearOps;

use crate::gpus;

/// Of matrices that are multiplied: no kernel's tile divides it, and cubek's tuned kernels are not asked.
const INNER: usize = 72;

fn tensor(shape: [usize; 2]) -> Tensor<Cuda, 2> {
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(|i| (i % 7) as f32 * 0.25 - 0.5).collect();
    Tensor::from_data(TensorData::new(values, shape), &CudaDevice::new(0))
}

fn numbers(x: Tensor<Cuda, 2>) -> Vec<f32> {
    x.into_data().convert::<f32>().to_vec().expect("converted")
}

#[test]
fn an_elementwise_kernel_computes() {
    if gpus("an elementwise kernel").is_none() {
        return;
    }
    let began = Instant::now();
    let (x, expected) = (tensor([10, 100]), tensor([10, 100]));
    let found = numbers(x * 2.0 + 1.0);
    let expected: Vec<f32> = numbers(expected).into_iter().map(|x| x * 2.0 + 1.0).collect();
    assert_eq!(found, expected);
    println!("a first kernel was compiled and run within {:.1?}", began.elapsed());
}

#[test]
fn a_product_of_bfloat16_is_right() {
    if gpus("a product").is_none() {
        return;
    }
    let began = Instant::now();
    let (x, w) = (tensor([136, INNER]), tensor([INNER, 104]));
    let [a, b] = [&x, &w].map(|side| numbers(side.clone()));
    let y = <Cuda as LinearOps>::product(x.cast(DType::BF16), w.cast(DType::BF16));
    // Few bits: products and sums are exact in any order.
    let element = |i: usize| (0..INNER).map(|k| a[i / 104 * INNER + k] * b[k * 104 + i % 104]).sum::<f32>();
    assert_eq!(numbers(y), (0..136 * 104).map(element).collect::<Vec<_>>());
    println!("{}: a first product within {:.1?}", NVIDIA.multiplier(), began.elapsed());
}
