//! Products whose results are rounded, and what reads them from row to row: in widths whose rows burn pads
//! when it casts a tensor on a GPU.

use burn::tensor::{DType, Tensor};
use burn_cuda::{Cuda, CudaDevice};
use coxswain_nn::kernels::{JoinedLayers, LinearOps, LowRank};

use super::{assert_close, gpu, numbers, tensor};

/// Inputs, and outputs of a layer: none fills the 512 bytes that rows are padded to.
const WIDTHS: [[usize; 2]; 3] = [[64, 24], [40, 72], [264, 132]];
/// Rows of an input.
const ROWS: usize = 37;

fn update(scale: f64, [inputs, outputs]: [usize; 2], gpu: &CudaDevice) -> LowRank<Cuda> {
    let (a_ri, b_or) = (tensor([8, inputs], 5, gpu), tensor([outputs, 8], 6, gpu));
    LowRank { a_ri, b_or, scale, dropout: None }
}

#[test]
fn joined_outputs_are_rounded_where_the_next_kernel_reads_them() {
    let Some(gpu) = gpu() else { return };
    for [inputs, outputs] in WIDTHS {
        let (x, w) =
            (tensor::<Cuda, 2>([ROWS, inputs], 1, &gpu), tensor::<Cuda, 2>([2 * outputs, inputs], 2, &gpu));
        for updates in [0, 2] {
            let of = |rounded| {
                let layers = JoinedLayers {
                    w_oi: w.clone().cast(DType::BF16).into(),
                    bias_o: Some(tensor([2 * outputs], 3, &gpu)),
                    updates: (0..updates).map(|_| update(0.5, [inputs, outputs], &gpu)).collect(),
                    outputs: vec![outputs; 2],
                    rounded,
                };
                <Cuda as LinearOps>::joined(x.clone(), layers)
            };
            let (wide, rounded) = (of(false), of(true));
            assert_eq!((wide.dtype(), rounded.dtype()), (DType::F32, DType::BF16));
            let what = format!("{updates} updates, {inputs} inputs, {outputs} outputs each");
            // Rounded before the update is added, and after: each within 2^-9 of a value.
            assert_close(&what, &numbers(rounded), &numbers(wide), 5e-3);
        }
    }
}

#[test]
fn an_update_that_no_kernel_reduces_is_raised_by_one_from_half_precision() {
    let Some(gpu) = gpu() else { return };
    // No whole vectors of inputs, and whole vectors of outputs.
    for [inputs, outputs] in [[30, 24], [41, 132]] {
        let x = tensor::<Cuda, 2>([ROWS, inputs], 1, &gpu).cast(DType::BF16);
        let w = tensor::<Cuda, 2>([outputs, inputs], 2, &gpu).cast(DType::BF16);
        let of = |x: Tensor<Cuda, 2>| {
            <Cuda as LinearOps>::lora_linear(x, w.clone(), None, update(0.5, [inputs, outputs], &gpu))
        };
        let (found, expected) = (of(x.clone()), of(x.cast(DType::F32)));
        let what = format!("a layer of {inputs} to {outputs} of an input in half precision");
        // What is between the update's matrices is rounded once, of the input in half precision.
        assert_close(&what, &numbers(found), &numbers(expected), 5e-3);
    }
}
