//! What the gauge sees within a pass.

use burn::tensor::Tensor;
use burn_cuda::Cuda;
use coxswain_nn::kernels::RowOps;
use coxswain_worker::memory::Gauge;

use super::gpu;
use crate::gauge::GpuGauge;

/// 4 MiB of float32.
const SHAPE: [usize; 2] = [1024, 1024];
const BYTES: u64 = 4 << 20;

#[test]
fn what_is_gone_at_the_end_of_a_pass_is_seen_while_it_is_watched() {
    let Some(gpu) = gpu() else { return };
    let gauge = GpuGauge::new(0);
    // The third of these holds both of its inputs; afterwards one is left.
    let pass = |x: Tensor<Cuda, 2>| {
        let (gate, up) = (Cuda::gelu_tanh(x.clone()), Cuda::gelu_erf(x));
        Cuda::swiglu(gate, up)
    };
    let x = Tensor::<Cuda, 2>::ones(SHAPE, &gpu);
    gauge.take_most();
    let before = gauge.read().in_use;
    for watched in [true, false] {
        gauge.watch(watched);
        let y = pass(x.clone());
        gauge.watch(false);
        assert_eq!(gauge.read().in_use, before + BYTES, "one tensor more");
        let seen = gauge.take_most();
        assert_eq!(seen, if watched { before + 3 * BYTES } else { 0 }, "of three within");
        drop(y);
    }
}
