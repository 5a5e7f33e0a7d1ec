//! Updates that read what dropout leaves of a layer's input, beside the CPU's.

use burn::{
    backend::{Autodiff, Flex},
    tensor::{DType, Tensor},
};
use burn_cuda::Cuda;
use coxswain_nn::kernels::{
    Dropout, DropoutRows, LinearOps, LowRank, ModelBackend,
    dropout::{module_word, row_word},
};

use super::{Outcome, assert_close, gpu, pulled, tensor};

/// Tokens, inputs, outputs.
const SIZES: [usize; 3] = [37, 64, 24];

/// A layer whose update has this rank and drops that part of its input, which is of the weight's type or of
/// float32: its value, and the gradients of input, `a` and `b`. A CPU has half precision as float32.
fn layer<B: ModelBackend>(
    device: &B::Device,
    weight: DType,
    half: bool,
    rank: usize,
    rate: f64,
) -> Vec<Outcome> {
    let [tokens, inputs, outputs] = SIZES;
    let w = tensor::<B, 2>([outputs, inputs], 4, device).cast(weight);
    let w = if B::ON_HOST { w.cast(DType::F32) } else { w };
    let words: Vec<u64> = (0..tokens as u64).map(|row| row_word(3, row)).collect();
    let shapes = [[tokens, inputs], [rank, inputs], [outputs, rank]];
    pulled::<B, 3, 2, 2>("a layer that drops", device, shapes, |[x_ni, a_ri, b_or]| {
        let x_ni = match (half, B::ON_HOST) {
            (true, true) => x_ni.cast(weight).cast(DType::F32),
            (true, false) => x_ni.cast(weight),
            (false, _) => x_ni,
        };
        let rows = DropoutRows::new(words.clone(), None);
        let dropout = (rate > 0.0).then(|| Dropout { rows, module: module_word("layer"), rate });
        let update = LowRank { a_ri, b_or, scale: 0.5, dropout };
        <Autodiff<B> as LinearOps>::lora_linear(x_ni, Tensor::from_inner(w.clone()), None, update)
    })
}

#[test]
fn what_is_between_the_matrices_is_of_the_weights_type() {
    let Some(gpu) = gpu() else { return };
    let [tokens, inputs, outputs] = SIZES;
    let w = tensor::<Cuda, 2>([outputs, inputs], 4, &gpu).cast(DType::BF16);
    let (a_ri, b_or) = (tensor([8, inputs], 5, &gpu), tensor([outputs, 8], 6, &gpu));
    let words = (0..tokens as u64).map(|row| row_word(3, row)).collect();
    let dropout = Some(Dropout { rows: DropoutRows::new(words, None), module: 7, rate: 0.3 });
    let update = LowRank { a_ri, b_or, scale: 0.5, dropout };
    let (y, down) = Cuda::lora_linear_saving(tensor([tokens, inputs], 1, &gpu), w, None, &update);
    assert_eq!([y.dtype(), down.dtype()], [DType::F32, DType::BF16]);
}

#[test]
fn a_layer_that_drops_gives_what_the_cpu_gives_in_every_type() {
    let Some(gpu) = gpu() else { return };
    let host = Default::default();
    for (weight, half, tolerance) in [
        (DType::F32, false, 1e-3),
        (DType::BF16, false, 1e-2),
        (DType::BF16, true, 2e-2),
        (DType::F16, true, 5e-3),
    ] {
        // Ranks with kernels of their own, and one without.
        for rank in [8, 32, 5] {
            let found = layer::<Cuda>(&gpu, weight, half, rank, 0.3);
            let expected = layer::<Flex>(&host, weight, half, rank, 0.3);
            for ((what, found), (_, expected)) in found.iter().zip(&expected) {
                assert_close(
                    &format!("{what}, rank {rank}, {weight:?}, half {half}"),
                    found,
                    expected,
                    tolerance,
                );
            }
            let kept = layer::<Cuda>(&gpu, weight, half, rank, 0.0);
            assert!(
                found.iter().zip(&kept).all(|(dropped, kept)| dropped.1 != kept.1),
                "nothing was dropped"
            );
        }
    }
}
