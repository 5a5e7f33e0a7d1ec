//! A kernel that is launched by name and cannot be compiled: the next one multiplies.
//!
//! The software GPU refuses programs with a word in them if it is told so before it is loaded (`GPU_REFUSE`),
//! so the products are another process's. A real GPU refuses nothing, and the test shows less there.

use std::process::Command;

use burn::tensor::{DType, Tensor, TensorData};
use burn_cuda::{Cuda, CudaDevice};
use coxswain_nn::kernels::LinearOps;

use crate::gpus;

/// In that process: what it does.
const ROLE: &str = "COXSWAIN_TEST_REFUSED";
const TEST: &str = "products::refused::a_kernel_that_cannot_be_compiled_is_replaced_by_the_next";

#[test]
fn a_kernel_that_cannot_be_compiled_is_replaced_by_the_next() {
    if gpus("refused kernels").is_none() {
        return;
    }
    if std::env::var_os(ROLE).is_some() {
        return multiply();
    }
    let dir = tempfile::tempdir().expect("a directory");
    // What was compiled before must not be found.
    let settings = dir.path().join("cubecl.toml");
    let kept = dir.path().display();
    std::fs::write(&settings, format!("compilation.cache = {{ file = \"{kept}\" }}\n")).expect("written");
    let output = Command::new(std::env::current_exe().expect("a test has a binary"))
        .args(["--exact", TEST, "--nocapture", "--test-threads", "1"])
        .env(ROLE, "1")
        .env("COX_MATMUL", "named")
        .env("GPU_REFUSE", "mma")
        .env("GPU_CUBECL_TOML", &settings)
        .output()
        .expect("the test binary starts again");
    let told = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert!(told.contains("multiplied"), "the other process has done nothing:\n{told}");
}

/// Products of bfloat16 with an inner dimension that only named kernels are right for, twice: the second
/// finds what was remembered.
fn multiply() {
    let device = CudaDevice::new(0);
    let values = |count: usize| (0..count).map(|i| (i % 7) as f32 * 0.25 - 0.5).collect::<Vec<_>>();
    let (x, w) = (values(40 * 24), values(24 * 56));
    let expected: Vec<f32> =
        (0..40 * 56).map(|i| (0..24).map(|k| x[i / 56 * 24 + k] * w[k * 56 + i % 56]).sum()).collect();
    for _ in 0..2 {
        let side = |values: &[f32], shape: [usize; 2]| {
            Tensor::<Cuda, 2>::from_data(TensorData::new(values.to_vec(), shape), &device).cast(DType::BF16)
        };
        let y = <Cuda as LinearOps>::product(side(&x, [40, 24]), side(&w, [24, 56]));
        // Few bits: products and sums are exact in any order.
        assert_eq!(y.into_data().to_vec::<f32>().expect("float32"), expected);
    }
    println!("multiplied");
}
