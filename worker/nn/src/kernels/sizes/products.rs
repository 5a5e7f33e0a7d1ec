//! Multiplications and additions of products, from the shapes of what is multiplied. `k` are the values that
//! each element of a result is a sum over:
//!
//! ```text
//! matrix product [.., n, k] x [.., k, o]     2nko
//! convolution, and its two gradients         2k for each element of the output
//! attention, p scores, heads of width d      forward 4pd    backward 10pd: scores again, and four products
//! ```
//!
//! Counted is what has to be computed: a causal row of s tokens has s(s+1)/2 scores, padding has none. What
//! is done value by value (norms, activations, sums) is left out.

use burn_ir::{FloatOperationIr, ModuleOperationIr, OperationIr, TensorIr};

use crate::kernels::AttentionMask;

/// Multiplications and additions of one of burn's own operations.
pub(super) fn of(op: &OperationIr) -> u64 {
    use ModuleOperationIr as Module;
    match op {
        OperationIr::Float(_, FloatOperationIr::Matmul(it)) => {
            2 * elements(&it.out) * it.lhs.shape.last().map_or(0, |&inner| inner as u64)
        }
        OperationIr::Module(Module::Conv1d(_) | Module::Conv2d(_) | Module::Conv3d(_)) => {
            convolution(op.outputs().next(), op.inputs().nth(1))
        }
        OperationIr::Module(
            Module::Conv1dXBackward(_)
            | Module::Conv1dWeightBackward(_)
            | Module::Conv2dXBackward(_)
            | Module::Conv2dWeightBackward(_)
            | Module::Conv3dXBackward(_)
            | Module::Conv3dWeightBackward(_),
        ) => convolution(op.inputs().nth(2), op.inputs().nth(1)),
        _ => 0,
    }
}

/// `output` or its gradient `[n, o, ..]`, `weight` `[o, i, kernel ..]`.
fn convolution(output: Option<&TensorIr>, weight: Option<&TensorIr>) -> u64 {
    output.zip(weight).map_or(0, |(output, weight)| {
        2 * elements(output) * elements(weight) / weight.shape.first().map_or(1, |&outputs| outputs as u64)
    })
}

fn elements(tensor: &TensorIr) -> u64 {
    tensor.shape.num_elements() as u64
}

/// Multiplications and additions of `[n, i]` by `[i, o]`, in whatever order: a product and both its gradients
/// cost the same.
pub(super) fn linear([rows, inputs, outputs]: [usize; 3]) -> u64 {
    2 * rows as u64 * inputs as u64 * outputs as u64
}

/// Scores of one head: queries of a row of the batch with each key that they may attend to, over all rows.
pub(super) fn scores(mask: &AttentionMask, [rows, queries, keys]: [usize; 3]) -> u64 {
    let [queries, keys] = [queries, keys].map(|n| n as u64);
    match mask {
        AttentionMask::Full => rows as u64 * queries * keys,
        AttentionMask::Keys(valid) => valid.iter().map(|valid| queries * valid.len() as u64).sum(),
        AttentionMask::Causal(valid) => valid
            .iter()
            .map(|valid| {
                // Queries before the first key see none, each from there on one more, up to all keys.
                let (after, all) = (queries.saturating_sub(valid.start.into()), valid.len() as u64);
                let rising = after.min(all);
                rising * (rising + 1) / 2 + (after - rising) * all
            })
            .sum(),
        AttentionMask::Segments(ends) => {
            ends.windows(2).map(|pair| u64::from(pair[1] - pair[0]).pow(2)).sum()
        }
        AttentionMask::CausalSegments(ends) => {
            let lengths = ends.windows(2).map(|pair| u64::from(pair[1] - pair[0]));
            lengths.map(|length| length * (length + 1) / 2).sum()
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::{
        backend::Autodiff,
        tensor::{Tensor, module::conv1d, ops::ConvOptions},
    };

    use super::*;
    use crate::kernels::{
        LinearOps, LowRank,
        sizes::{Account, Sizes},
    };

    const ROWS: usize = 5;

    fn counted(run: impl FnOnce(&Account)) -> u64 {
        let account = Account::open();
        run(&account);
        account.flops()
    }

    #[test]
    fn a_linear_layer_and_its_gradients_are_counted_by_hand() {
        let count = |tracked: [bool; 2]| {
            counted(|account| {
                let [x, w] = [([ROWS, 7], tracked[0]), ([3, 7], tracked[1])].map(|(shape, tracked)| {
                    let tensor = Tensor::<Autodiff<Sizes>, 2>::zeros(shape, account.device());
                    if tracked { tensor.require_grad() } else { tensor }
                });
                let y = <Autodiff<Sizes> as LinearOps>::linear(x, w, None);
                if tracked != [false; 2] {
                    y.backward();
                }
            })
        };
        let one = 2 * 5 * 7 * 3;
        assert_eq!(count([false, false]), one);
        assert_eq!(count([true, false]), 2 * one, "the gradient of the input");
        assert_eq!(count([true, true]), 3 * one, "and that of the weight");
    }

    #[test]
    fn an_adapter_costs_its_two_thin_products_and_four_on_the_way_back() {
        let count = |x_tracked: bool| {
            counted(|account| {
                let zeros = |shape| Tensor::<Autodiff<Sizes>, 2>::zeros(shape, account.device());
                let x = if x_tracked { zeros([ROWS, 7]).require_grad() } else { zeros([ROWS, 7]) };
                let (a_ri, b_or) = (zeros([2, 7]).require_grad(), zeros([3, 2]).require_grad());
                let update = LowRank { a_ri, b_or, scale: 1.0, dropout: None };
                <Autodiff<Sizes> as LinearOps>::lora_linear(x, zeros([3, 7]), None, update).backward();
            })
        };
        let [dense, down, up] = [7 * 3, 7 * 2, 2 * 3].map(|weights| 2 * 5 * weights);
        // Back through `b`, and the gradients of `a` and `b`; below that through `a` and the weight.
        let constant_input = dense + down + up + (up + down + up);
        assert_eq!(count(false), constant_input);
        assert_eq!(count(true), constant_input + down + dense);
    }

    #[test]
    fn burns_own_products_and_convolutions_are_counted() {
        let matmul = counted(|account| {
            let [x, y] =
                [[4, ROWS, 7], [4, 7, 3]].map(|shape| Tensor::<Sizes, 3>::zeros(shape, account.device()));
            x.matmul(y);
        });
        assert_eq!(matmul, 4 * 2 * 5 * 7 * 3);
        let convolution = counted(|account| {
            let [x, w] = [[2, 6, 10], [8, 3, 4]]
                .map(|shape| Tensor::<Autodiff<Sizes>, 3>::zeros(shape, account.device()).require_grad());
            conv1d(x, w, None, ConvOptions::new([2], [0], [1], 2)).backward();
        });
        // 2 x 8 x 4 values, each a sum over 3 x 4, and the same for either gradient.
        assert_eq!(convolution, 3 * 2 * (2 * 8 * 4) * (3 * 4));
    }

    #[test]
    fn scores_are_those_that_a_mask_admits() {
        let of = |mask, sizes| scores(&mask, sizes);
        assert_eq!(of(AttentionMask::Full, [2, 3, 5]), 30);
        assert_eq!(of(AttentionMask::Keys(vec![0..5, 2..4].into()), [2, 3, 5]), 3 * 5 + 3 * 2);
        assert_eq!(of(AttentionMask::Causal(vec![0..6, 2..6].into()), [2, 6, 6]), 21 + 10);
        assert_eq!(of(AttentionMask::Causal(vec![1..4, 0..0].into()), [2, 6, 6]), 6 + 2 * 3);
        assert_eq!(of(AttentionMask::Segments(vec![0, 4, 6].into()), [1, 6, 6]), 16 + 4);
        assert_eq!(of(AttentionMask::CausalSegments(vec![0, 4, 6].into()), [1, 6, 6]), 10 + 3);
    }
}
