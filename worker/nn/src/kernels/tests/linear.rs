//! Linear layers: plain, biased, half-precision weights, low-rank updates.

use std::convert::Infallible;

use burn::tensor::{DType, backend::Backend};
use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::{
    dtypes::Packing,
    kernels::{
        Dropout, DropoutRows, LinearOps, LowRank, PackedMatrix, Weight,
        dropout::{module_word, row_word},
        precision,
        quantized::QuantizedMatrix,
        reference,
    },
};

type Linear = fn(Tensor<A, 2>, Tensor<A, 2>, Option<Tensor<A, 1>>) -> Tensor<A, 2>;
type Lora = fn(Tensor<A, 2>, Tensor<A, 2>, Option<Tensor<A, 1>>, LowRank<A>) -> Tensor<A, 2>;

fn check_linear([tokens, inputs, outputs]: [usize; 3], biased: bool, half: bool) {
    let x = beside(half, values([tokens, inputs], 1, 1.0));
    let w = values([outputs, inputs], 2, 1.0);
    let w = if half { w.cast(DType::BF16) } else { w };
    let bias = biased.then(|| values([outputs], 3, 1.0));
    let found = <F as LinearOps>::linear(x.clone(), w.clone(), bias.clone());
    assert_close("linear", found, reference::linear(x.clone(), w.clone(), bias.clone()));

    let run = |op: Linear| {
        let (x, w, bias) = (leaf(&x), if half { frozen(&w) } else { leaf(&w) }, bias.as_ref().map(leaf));
        let dy = beside(half, values([tokens, outputs], 99, 1.0));
        let gradients = pull_by(op(x.clone(), w.clone(), bias.clone()), dy);
        let dw = (!half).then(|| gradient(&w, &gradients));
        (gradient(&x, &gradients), dw, bias.map(|bias| gradient(&bias, &gradients)))
    };
    let (found, expected) = (run(<A as LinearOps>::linear), run(reference::linear));
    assert_close("linear dx", found.0, expected.0);
    if let (Some(found), Some(expected)) = (found.1, expected.1) {
        assert_close("linear dw", found, expected);
    }
    if let (Some(found), Some(expected)) = (found.2, expected.2) {
        assert_close("linear db", found, expected);
    }
}

/// Drops a third of the input of an update of so many rows.
fn dropout<B: Backend>(tokens: usize) -> Dropout<B> {
    let words = (0..tokens as u64).map(|row| row_word(3, row)).collect();
    Dropout { rows: DropoutRows::new(words, None), module: module_word("layer"), rate: 0.3 }
}

fn check_lora([tokens, inputs, outputs]: [usize; 3], rank: usize, biased: bool, half: bool, drops: bool) {
    let x = beside(half, values([tokens, inputs], 4, 1.0));
    let w = values([outputs, inputs], 5, 1.0);
    let w = if half { w.cast(DType::BF16) } else { w };
    let bias = biased.then(|| values([outputs], 6, 1.0));
    let (a, b) = (values([rank, inputs], 7, 1.0), values([outputs, rank], 8, 1.0));
    let dropped = drops.then(|| dropout(tokens));
    let update = LowRank { a_ri: a.clone(), b_or: b.clone(), scale: 1.7, dropout: dropped };
    let found = F::lora_linear(x.clone(), w.clone(), bias.clone(), update.clone());
    assert_close("lora", found, reference::lora_linear(x.clone(), w.clone(), bias.clone(), update));

    let run = |op: Lora| {
        let (x, a_ri, b_or) = (leaf(&x), leaf(&a), leaf(&b));
        let dropped = drops.then(|| dropout(tokens));
        let update = LowRank { a_ri: a_ri.clone(), b_or: b_or.clone(), scale: 1.7, dropout: dropped };
        let dy = beside(half, values([tokens, outputs], 99, 1.0));
        let gradients = pull_by(op(x.clone(), frozen(&w), bias.as_ref().map(frozen), update), dy);
        [gradient(&x, &gradients), gradient(&a_ri, &gradients), gradient(&b_or, &gradients)]
    };
    for (i, (found, expected)) in run(A::lora_linear).into_iter().zip(run(reference::lora_linear)).enumerate()
    {
        assert_close(&format!("lora gradient {i}"), found, expected);
    }
}

/// Rows of a larger input, as an input of their own.
fn rows(x: &Tensor<F, 2>, range: std::ops::Range<usize>) -> Tensor<F, 2> {
    let width = x.dims()[1];
    let values = x.to_data().to_vec::<f32>().expect("f32");
    let values = values[range.start * width..range.end * width].to_vec();
    Tensor::from_data(TensorData::new(values, [range.len(), width]), &Default::default())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_row_depends_on_itself_alone(
        (tokens, first, count) in (1usize..200).prop_flat_map(|tokens| (Just(tokens), 0..tokens))
            .prop_flat_map(|(tokens, first)| (Just(tokens), Just(first), 1..=tokens - first)),
        [inputs, outputs] in [3usize..1100, 2usize..140],
        rank in 1usize..17,
        biased: bool,
        half: bool,
    ) {
        let (x, w) = (values([tokens, inputs], 1, 1.0), values([outputs, inputs], 2, 1.0));
        let w = if half { w.cast(DType::BF16) } else { w };
        let bias = biased.then(|| values([outputs], 3, 1.0));
        let (a_ri, b_or) = (values([rank, inputs], 4, 1.0), values([outputs, rank], 5, 1.0));
        let of = |x: Tensor<F, 2>| {
            let update = LowRank { a_ri: a_ri.clone(), b_or: b_or.clone(), scale: 0.7, dropout: None };
            let plain = <F as LinearOps>::linear(x.clone(), w.clone(), bias.clone());
            [plain, F::lora_linear(x, w.clone(), bias.clone(), update)]
        };
        let range = first..first + count;
        let part = of(rows(&x, range.clone()));
        for (whole, part) in of(x).into_iter().zip(part) {
            prop_assert!(bits(rows(&whole, range.clone())) == bits(part));
        }
    }

    #[test]
    fn linear_equals_its_reference(shape in [1usize..70, 1usize..150, 1usize..300], biased: bool, half: bool) {
        check_linear(shape, biased, half);
    }

    #[test]
    fn lora_equals_its_reference(shape in [1usize..70, 1usize..150, 1usize..300], rank in 1usize..17, biased: bool, half: bool, drops: bool) {
        check_lora(shape, rank, biased, half, drops);
    }
}

/// A matrix of few bits.
fn few_bits(packing: Packing, shape: [usize; 2]) -> QuantizedMatrix {
    let dense = values(shape, 5, 1.0).to_data().to_vec::<f32>().expect("f32");
    let read = |first: usize, to: &mut [f32]| -> Result<(), Infallible> {
        to.copy_from_slice(&dense[first..first + to.len()]);
        Ok(())
    };
    let Ok(matrix) = QuantizedMatrix::quantize(packing, shape, read);
    matrix
}

/// The values, each rounded to the nearest bfloat16. This backend's cast goes through `bf16::from_f64`, which
/// drops the lowest three bits first.
fn halves(x: Tensor<F, 2>) -> Tensor<F, 2> {
    let shape = x.dims();
    let values = x.to_data().to_vec::<f32>().expect("f32").into_iter().map(bf16::from_f32);
    let values = TensorData::new(values.collect::<Vec<_>>(), shape);
    Tensor::from_data(values, (&Default::default(), DType::BF16))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_weight_of_few_bits_counts_as_what_it_says(
        [tokens, inputs, outputs] in [1usize..90, 1usize..150, 1usize..300],
        rank in 1usize..17,
        int8: bool,
        drops: bool,
        packed: bool,
    ) {
        let matrix = few_bits(if int8 { Packing::Int8 } else { Packing::Nf4 }, [outputs, inputs]);
        let dense = matrix.tensor(&Default::default());
        // Words, as a device has them, are widened to bfloat16.
        let (few, dense): (Weight<F>, _) = match packed {
            true => (PackedMatrix::on(&matrix, &Default::default()).into(), halves(dense)),
            false => (matrix.into(), dense),
        };
        let (x, bias) = (values([tokens, inputs], 4, 1.0), values([outputs], 6, 1.0));
        let (a, b) = (values([rank, inputs], 7, 1.0), values([outputs, rank], 8, 1.0));
        let run = |w: Weight<A>| {
            let inputs = [leaf(&x), leaf(&a), leaf(&b)];
            let [x, a_ri, b_or] = inputs.clone();
            let bias = leaf(&bias);
            let update = LowRank { a_ri, b_or, scale: 1.7, dropout: drops.then(|| dropout(tokens)) };
            let plain = <A as LinearOps>::linear(x.clone(), w.clone(), Some(bias.clone()));
            let adapted = A::lora_linear(x, w, None, update);
            let sum = plain.clone() + adapted.clone();
            let gradients = pull(sum);
            let pulled = inputs.map(|input| gradient(&input, &gradients));
            let [dx, da, db] = pulled;
            (vec![plain.inner(), adapted.inner(), dx, da, db], gradient(&bias, &gradients))
        };
        let (found, expected) = (run(few.lifted()), run(Weight::<F>::from(dense).lifted()));
        let of = ["plain", "adapted", "dx", "da", "db"];
        for (of, (found, expected)) in of.into_iter().zip(found.0.into_iter().zip(expected.0)) {
            assert_close(of, found, expected);
        }
        assert_close("bias", found.1, expected.1);
    }
}

#[test]
fn a_weight_that_trains_beside_its_update_gets_its_gradient() {
    let (x, w) = (values([5, 6], 9, 1.0), values([7, 6], 10, 1.0));
    let (a, b) = (values([2, 6], 11, 1.0), values([7, 2], 12, 1.0));
    let run = |op: Lora| {
        let inputs = [leaf(&x), leaf(&w), leaf(&a), leaf(&b)];
        let [x, w, a_ri, b_or] = inputs.clone();
        let gradients = pull(op(x, w, None, LowRank { a_ri, b_or, scale: 0.5, dropout: None }));
        inputs.map(|input| gradient(&input, &gradients))
    };
    for (found, expected) in run(A::lora_linear).into_iter().zip(run(reference::lora_linear)) {
        assert_close("gradient", found, expected);
    }
}

#[test]
fn only_tracked_arguments_get_gradients() {
    let (x, w) = (values([5, 6], 13, 1.0), values([7, 6], 14, 1.0));
    let (frozen_x, trained_w) = (frozen(&x), leaf(&w));
    let gradients = pull(<A as LinearOps>::linear(frozen_x.clone(), trained_w.clone(), None));
    assert!(frozen_x.grad(&gradients).is_none() && trained_w.grad(&gradients).is_some());
}

#[test]
fn transposed_weights_are_read_as_what_they_are() {
    let (x, w) = (values([9, 20], 15, 1.0), values([20, 33], 16, 1.0));
    assert_close("transposed", <F as LinearOps>::linear(x.clone(), w.clone().transpose(), None), x.matmul(w));
}

#[test]
fn linear_layers_do_not_depend_on_threads() {
    let (x, w) = (values([130, 300], 17, 1.0), values([520, 300], 18, 1.0));
    let (a, b) = (values([8, 300], 19, 1.0), values([520, 8], 20, 1.0));
    assert_same_on_any_number_of_threads(|| {
        let inputs = [leaf(&x), leaf(&a), leaf(&b)];
        let [tracked, a_ri, b_or] = inputs.clone();
        let dropped = Some(dropout(130));
        let y =
            A::lora_linear(tracked, frozen(&w), None, LowRank { a_ri, b_or, scale: 2.0, dropout: dropped });
        let mut found = vec![bits(y.clone().inner())];
        let gradients = pull(y);
        found.extend(inputs.iter().map(|input| bits(gradient(input, &gradients))));
        let trained = leaf(&w);
        let gradients = pull(<A as LinearOps>::linear(frozen(&x), trained.clone(), None));
        found.push(bits(gradient(&trained, &gradients)));
        found
    });
}

#[test]
fn a_run_may_have_half_precision_weights_widened() {
    let of = |half: bool, allowed: bool| {
        precision::allow_bfloat16_matmul(allowed);
        let (x, w, dy) = (values([70, 130], 21, 1.0), values([66, 130], 22, 1.0), values([70, 66], 23, 1.0));
        let w = w.cast(DType::BF16);
        let w = if half { w } else { w.cast(DType::F32) };
        let y = <F as LinearOps>::linear(x, w.clone(), None);
        [y, F::linear_input_gradient(dy, w)].map(bits)
    };
    let wide = of(false, true);
    assert!(of(true, false) == wide);
    let [rounds, has] = [of(true, true) != wide, precision::has_bfloat16_products()];
    assert_eq!(rounds, has, "only a processor with the instruction rounds");
}
