//! The fixtures of Transformers and PEFT, through the trait object that training takes.

use coxswain_cuda::NVIDIA;
use coxswain_integration_tests::golden::{CASES, Computer, IN_BFLOAT16, Tolerance, hold};
use coxswain_nn::dtypes::FrozenDtype;
use coxswain_worker::device::Device;

use crate::gpus;

const FLOAT32: Tolerance = Tolerance { values: 1e-3, gradients: 1e-3 };

fn in_float32(device: Device) {
    for case in CASES {
        hold(case, Computer { device, accelerator: &NVIDIA, dtype: FrozenDtype::Float32 }, FLOAT32);
    }
}

/// Values within 2e-2, and gradients no further than PyTorch's own under autocast (up to a tenth on models as
/// small as these).
fn in_bfloat16(device: Device) {
    for case in IN_BFLOAT16 {
        let tolerance = Tolerance { values: 2e-2, ..Tolerance::of_autocast(case) };
        hold(case, Computer { device, accelerator: &NVIDIA, dtype: FrozenDtype::Bfloat16 }, tolerance);
    }
}

/// The fixtures of [`in_bfloat16`] in float16, whose mantissa is three bits longer: a quarter of what
/// autocast in bfloat16 is off.
fn in_float16(device: Device) {
    for case in IN_BFLOAT16 {
        let Tolerance { gradients, .. } = Tolerance::of_autocast(case);
        let tolerance = Tolerance { values: 5e-3, gradients: gradients / 4.0 };
        hold(case, Computer { device, accelerator: &NVIDIA, dtype: FrozenDtype::Float16 }, tolerance);
    }
}

/// The fixtures of bitsandbytes, whose weights are widened to bfloat16. They are float32 in the file, and
/// rounding them alone moves gradients of models as small as these by a tenth: twice that is allowed.
fn in_few_bits(device: Device) {
    let tolerance = Tolerance { values: 2e-2, gradients: 0.2 };
    for (case, dtype) in [("nf4", FrozenDtype::Nf4), ("int8", FrozenDtype::Int8)] {
        hold(case, Computer { device, accelerator: &NVIDIA, dtype }, tolerance);
    }
}

#[test]
fn the_cpu_gives_the_fixtures_within_a_gpus_tolerances() {
    in_float32(Device::Cpu);
    // They are bfloat16 in the file, and a CPU computes in float32 with them.
    for case in IN_BFLOAT16 {
        let computer = Computer { device: Device::Cpu, accelerator: &NVIDIA, dtype: FrozenDtype::Bfloat16 };
        hold(case, computer, FLOAT32);
    }
}

#[test]
fn a_gpu_gives_the_fixtures_in_float32() {
    if gpus("fixtures in float32").is_some() {
        in_float32(Device::Cuda(0));
    }
}

#[test]
fn a_gpu_gives_the_fixtures_in_bfloat16() {
    if gpus("fixtures in bfloat16").is_some() {
        in_bfloat16(Device::Cuda(0));
    }
}

#[test]
fn a_gpu_gives_the_fixtures_in_few_bits() {
    if gpus("fixtures in 4 and 8 bits").is_some() {
        in_few_bits(Device::Cuda(0));
    }
}

#[test]
fn a_gpu_gives_the_fixtures_in_float16() {
    if gpus("fixtures in float16").is_some() {
        in_float16(Device::Cuda(0));
    }
}
