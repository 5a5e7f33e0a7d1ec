//! Products as the library is asked for them; no library is needed.

use burn::tensor::DType;
use coxswain_nn::kernels::matrix_library::{Matrix, MatrixProduct};
use cubecl::{device::DeviceId, server::Handle, stream_id::StreamId};

use super::shape::{Number, Shape};

fn matrix(dtype: DType, shape: &[usize], strides: &[usize]) -> Matrix {
    let memory = Handle::new(StreamId::current(), 1 << 20).binding();
    Matrix { memory, dtype, shape: shape.to_vec(), strides: strides.to_vec() }
}

fn product(x: Matrix, w: Matrix, out: Matrix) -> MatrixProduct {
    MatrixProduct {
        device: DeviceId { type_id: 0, index_id: 0 },
        x,
        w,
        out,
        may_round: true,
        bias: None,
        more: None,
    }
}

#[test]
fn a_layer_reads_its_weight_where_it_lies() {
    // x [6, 32], the weight [8, 32] seen from its other side.
    let weight = matrix(DType::BF16, &[32, 8], &[1, 32]);
    let asked =
        product(matrix(DType::BF16, &[6, 32], &[32, 1]), weight, matrix(DType::F32, &[6, 8], &[8, 1]));
    let shape = Shape::of(&asked).expect("taken");
    assert_eq!((shape.a.sizes, shape.a.apart, shape.a.transposed), ([32, 8], 32, true));
    assert_eq!((shape.b.sizes, shape.b.apart, shape.b.transposed), ([32, 6], 32, false));
    assert_eq!((shape.d.sizes, shape.d.apart, shape.d.number), ([8, 6], 8, Number::F32));
    assert!(!shape.rounds, "bfloat16 is what it is");
    assert_eq!(shape.a.reach(), 8 * 32 * 2);
}

#[test]
fn a_weights_gradient_reads_both_sides_where_they_lie() {
    // dy [6, 8] seen from its other side, x [6, 32].
    let (dy, x) = (matrix(DType::F32, &[8, 6], &[1, 8]), matrix(DType::F32, &[6, 32], &[32, 1]));
    let shape = Shape::of(&product(dy, x, matrix(DType::F32, &[8, 32], &[32, 1]))).expect("taken");
    assert_eq!((shape.a.sizes, shape.a.transposed), ([32, 6], false));
    assert_eq!((shape.b.sizes, shape.b.apart, shape.b.transposed), ([8, 6], 8, true));
    assert!(shape.rounds);
}

#[test]
fn matrices_that_lie_evenly_are_multiplied_at_once() {
    let x = matrix(DType::BF16, &[2, 3, 6, 32], &[3 * 6 * 32, 6 * 32, 32, 1]);
    let out = matrix(DType::BF16, &[2, 3, 6, 8], &[3 * 6 * 8, 6 * 8, 8, 1]);
    let one = matrix(DType::BF16, &[1, 1, 32, 8], &[256, 256, 8, 1]);
    let shape = Shape::of(&product(x.clone(), one, out.clone())).expect("taken");
    assert_eq!([shape.a.offset, shape.b.offset, shape.d.offset], [0, 6 * 32, 6 * 8]);
    assert_eq!(shape.d.count, 6);
    let uneven = matrix(DType::BF16, &[2, 3, 32, 8], &[0, 32 * 8, 8, 1]);
    assert_eq!(Shape::of(&product(x, uneven, out)), None, "one for every three is none for all");
}

#[test]
fn what_begins_in_the_middle_of_memory_says_how_it_is_aligned() {
    let at = |bytes: u64, apart: usize| {
        let mut x = matrix(DType::BF16, &[6, 32], &[apart, 1]);
        x.memory.offset_start = Some(bytes);
        let w = matrix(DType::BF16, &[32, 8], &[8, 1]);
        Shape::of(&product(x, w, matrix(DType::F32, &[6, 8], &[8, 1]))).expect("taken").b.aligned
    };
    assert_eq!([at(0, 32), at(16, 32), at(0, 33), at(4096, 128)], [64, 16, 2, 256]);
}

#[test]
fn what_the_library_is_not_asked_for_is_left() {
    let out = || matrix(DType::F32, &[6, 8], &[8, 1]);
    let (x, w) = (matrix(DType::BF16, &[6, 32], &[32, 1]), matrix(DType::BF16, &[32, 8], &[8, 1]));
    for (what, asked) in [
        (
            "neither rows nor columns lie whole",
            product(matrix(DType::BF16, &[6, 32], &[64, 2]), w.clone(), out()),
        ),
        (
            "a bias for a narrow result",
            MatrixProduct {
                bias: Some(matrix(DType::F32, &[8], &[1])),
                ..product(x.clone(), w.clone(), matrix(DType::BF16, &[6, 8], &[8, 1]))
            },
        ),
        (
            "a sum onto another shape",
            MatrixProduct {
                more: Some(matrix(DType::F32, &[8, 6], &[6, 1])),
                ..product(x.clone(), w.clone(), out())
            },
        ),
        ("two types", product(matrix(DType::F32, &[6, 32], &[32, 1]), w.clone(), out())),
        ("a type it has not", product(x.clone(), w.clone(), matrix(DType::F64, &[6, 8], &[8, 1]))),
        ("a result from its other side", product(x, w.clone(), matrix(DType::F32, &[6, 8], &[1, 6]))),
        (
            "nothing",
            product(matrix(DType::BF16, &[0, 32], &[32, 1]), w, matrix(DType::F32, &[0, 8], &[8, 1])),
        ),
    ] {
        assert_eq!(Shape::of(&asked), None, "{what}");
    }
}
