//! Fused operations against their references, values and gradients, and against themselves on other numbers
//! of threads.

mod attention;
mod linear;
mod rowwise;

use burn::{
    backend::{Autodiff, Flex},
    tensor::{DType, Tensor, TensorData, backend::AutodiffBackend},
};

/// Backend of the values.
type F = Flex;
/// Backend of the gradients.
type A = Autodiff<Flex>;
type Gradients = <A as AutodiffBackend>::Gradients;

/// `f32` carries 7 digits; a reference that adds in another order agrees to 5.
const TOLERANCE: f64 = 1e-5;

/// Reproducible values in about `[-scale, scale]`.
fn values<const D: usize>(shape: [usize; D], seed: u64, scale: f32) -> Tensor<F, D> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
        })
        .collect();
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

fn leaf<const D: usize>(x: &Tensor<F, D>) -> Tensor<A, D> {
    Tensor::from_inner(x.clone()).require_grad()
}

fn frozen<const D: usize>(x: &Tensor<F, D>) -> Tensor<A, D> {
    Tensor::from_inner(x.clone())
}

/// Beside a weight in half precision the nearest values that bfloat16 has, which a processor that multiplies
/// such a weight as it is rounds to themselves.
fn beside<const D: usize>(half: bool, x: Tensor<F, D>) -> Tensor<F, D> {
    if half { x.cast(DType::BF16).cast(DType::F32) } else { x }
}

/// Gradients of `sum y * dy` with a fixed, uneven `dy`.
fn pull<const D: usize>(y: Tensor<A, D>) -> Gradients {
    pull_by(y.clone(), values(y.dims(), 99, 1.0))
}

/// Gradients of `sum y * dy`.
fn pull_by<const D: usize>(y: Tensor<A, D>, dy: Tensor<F, D>) -> Gradients {
    (y * Tensor::from_inner(dy)).sum().backward()
}

fn gradient<const D: usize>(x: &Tensor<A, D>, gradients: &Gradients) -> Tensor<F, D> {
    x.grad(gradients).expect("a tracked input has a gradient")
}

fn bits<const D: usize>(x: Tensor<F, D>) -> Vec<u32> {
    x.into_data().to_vec::<f32>().expect("f32").into_iter().map(f32::to_bits).collect()
}

/// Norm of the difference over the norm; a result that is zero but for rounding is held against values of
/// size 0.01.
#[track_caller]
fn assert_close<const D: usize>(what: &str, found: Tensor<F, D>, expected: Tensor<F, D>) {
    assert_close_for_terms_of(what, 0.0, found, expected);
}

/// As [`assert_close`] for a result that is the sum of terms of at least this norm, which may cancel.
#[track_caller]
fn assert_close_for_terms_of<const D: usize>(
    what: &str,
    terms: f64,
    found: Tensor<F, D>,
    expected: Tensor<F, D>,
) {
    assert_eq!(found.dims(), expected.dims(), "{what}: shape");
    let count = expected.dims().iter().product::<usize>();
    let size = norm(&expected).max(terms).max(0.01 * (count as f64).sqrt());
    let error = norm(&(found - expected)) / size;
    assert!(count == 0 || error <= TOLERANCE, "{what}: relative error {error:e}");
}

fn norm<const D: usize>(x: &Tensor<F, D>) -> f64 {
    let values = x.to_data().to_vec::<f32>().expect("f32");
    values.into_iter().map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

/// Runs `op` on pools of several sizes and expects the same bits from each.
fn assert_same_on_any_number_of_threads(op: impl Fn() -> Vec<Vec<u32>> + Sync) {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a small pool");
        pool.install(&op)
    };
    let first = run(1);
    for threads in [2, 3, 7] {
        assert!(first == run(threads), "{threads} threads give other bits than one");
    }
}
