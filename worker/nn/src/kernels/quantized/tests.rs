//! Against bitsandbytes, on the fixtures of `integration-tests/fixtures/make_quantized.py`; and on its own.

use std::{convert::Infallible, fs, path::Path};

use burn::backend::Flex;
use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;
use crate::kernels::{packed::PackedMatrix, sizes::Sizes};

const CASES: [&str; 5] = ["wide", "uneven", "odd", "zeros", "spread"];

fn fixture() -> Vec<u8> {
    let path = "../../integration-tests/fixtures/golden/quantized.safetensors";
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect("it is checked in")
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let stored = file.tensor(name).expect("every case has it");
    stored.data().as_chunks::<4>().0.iter().map(|le| f32::from_le_bytes(*le)).collect()
}

fn quantized(packing: Packing, shape: [usize; 2], values: &[f32]) -> QuantizedMatrix {
    let read = |first: usize, to: &mut [f32]| -> Result<(), Infallible> {
        to.copy_from_slice(&values[first..first + to.len()]);
        Ok(())
    };
    let Ok(matrix) = QuantizedMatrix::quantize(packing, shape, read);
    matrix
}

fn widened(matrix: &QuantizedMatrix) -> Vec<f32> {
    let mut values = vec![f32::NAN; matrix.shape().iter().product()];
    matrix.dequantize(0, &mut values);
    values
}

#[track_caller]
fn assert_near(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let size = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= 1e-6 * size, "{what} [{at}]: {found} for {expected}");
    }
}

/// A matrix of the fixture, quantized.
fn case(file: &SafeTensors<'_>, name: &str, packing: Packing) -> QuantizedMatrix {
    let w = file.tensor(&format!("{name}.w")).expect("every case has one");
    let values = floats(file, &format!("{name}.w"));
    quantized(packing, [w.shape()[0], w.shape()[1]], &values)
}

#[test]
fn the_dynamic_type_has_the_values_of_bitsandbytes() {
    let bytes = fixture();
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    assert_eq!(floats(&file, "dynamic"), *dynamic::VALUES);
}

#[test]
fn nf4_is_that_of_bitsandbytes() {
    let bytes = fixture();
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    for name in CASES {
        let matrix = case(&file, name, Packing::Nf4);
        let Codes::Nf4(found) = &matrix.codes else { panic!("asked for NF4") };
        let (codes, scales, ranges, mean) = found.parts();
        let stored = |part: &str| file.tensor(&format!("{name}.nf4.{part}")).expect("every case").data();
        assert!(codes == stored("codes"), "{name}: codes");
        assert!(scales == stored("scales"), "{name}: scales");
        let numbers = |part: &str| floats(&file, &format!("{name}.nf4.{part}"));
        assert_near(&format!("{name}: ranges"), ranges, &numbers("ranges"));
        assert_near(&format!("{name}: mean"), &[mean], &numbers("mean"));
        assert_near(&format!("{name}: values"), &widened(&matrix), &numbers("values"));
    }
}

#[test]
fn int8_is_that_of_bitsandbytes() {
    let bytes = fixture();
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    for name in CASES {
        let matrix = case(&file, name, Packing::Int8);
        let Codes::Int8(found) = &matrix.codes else { panic!("asked for int8") };
        let (codes, absmax) = found.parts();
        let stored = file.tensor(&format!("{name}.int8.codes")).expect("every case");
        assert!(bytemuck::cast_slice::<i8, u8>(codes) == stored.data(), "{name}: codes");
        let numbers = |part: &str| floats(&file, &format!("{name}.int8.{part}"));
        assert_near(&format!("{name}: absmax"), absmax, &numbers("absmax"));
        assert_near(&format!("{name}: values"), &widened(&matrix), &numbers("values"));
    }
}

#[test]
fn a_matrix_takes_the_bytes_that_are_counted() {
    for shape in [[28, 640], [7, 100], [5, 63], [1, 1], [300, 257]] {
        let values = vec![0.5; shape[0] * shape[1]];
        let Codes::Nf4(nf4) = quantized(Packing::Nf4, shape, &values).codes else { panic!("asked for NF4") };
        let (codes, scales, ranges, mean) = nf4.parts();
        let bytes = codes.len() + scales.len() + size_of_val(ranges) + size_of_val(&mean);
        assert_eq!(bytes as u64, QuantizedMatrix::bytes(Packing::Nf4, shape));
        let Codes::Int8(int8) = quantized(Packing::Int8, shape, &values).codes else {
            panic!("asked for it")
        };
        let (codes, absmax) = int8.parts();
        let bytes = codes.len() + size_of_val(absmax);
        assert_eq!(bytes as u64, QuantizedMatrix::bytes(Packing::Int8, shape));
    }
}

#[test]
fn what_is_not_finite_is_seen() {
    for packing in [Packing::Nf4, Packing::Int8] {
        let mut values = vec![1.0; 640];
        assert!(quantized(packing, [5, 128], &values).is_finite());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            values[300] = bad;
            assert!(!quantized(packing, [5, 128], &values).is_finite(), "{bad} in {packing:?}");
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let shape = [700, 321];
    let values: Vec<f32> =
        (0..shape[0] * shape[1]).map(|at| ((at * 7919 % 1009) as f32 - 504.0) / 97.0).collect();
    for packing in [Packing::Nf4, Packing::Int8] {
        let of = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a small pool");
            widened(&pool.install(|| quantized(packing, shape, &values)))
        };
        assert!(of(1) == of(3), "{packing:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_matrix_comes_back_from_its_words(shape in [1usize..70, 1usize..300], int8: bool) {
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(|at| (at as f32 * 0.7).sin()).collect();
        let packing = if int8 { Packing::Int8 } else { Packing::Nf4 };
        let matrix = quantized(packing, shape, &values);
        let packed = PackedMatrix::<Flex>::on(&matrix, &Default::default());
        let bytes = 4 * packed.words().dims()[0];
        prop_assert_eq!(bytes as u64, QuantizedMatrix::device_bytes(packing, shape));
        prop_assert_eq!(widened(&packed.on_host()), widened(&matrix));
        let hollow = QuantizedMatrix::hollow(packing, shape);
        let hollow = PackedMatrix::<Sizes>::on(&hollow, &Default::default());
        prop_assert_eq!(4 * hollow.words().dims()[0], bytes);
    }

    #[test]
    fn a_part_is_a_part_of_the_whole(
        shape in [1usize..9, 1usize..300],
        from in 0.0f64..1.0,
        to in 0.0f64..1.0,
        int8: bool,
    ) {
        let len = shape[0] * shape[1];
        let values: Vec<f32> = (0..len).map(|at| (at as f32 * 0.7).sin()).collect();
        let packing = if int8 { Packing::Int8 } else { Packing::Nf4 };
        let matrix = quantized(packing, shape, &values);
        let [from, to] = [from.min(to), from.max(to)].map(|at| (at * len as f64) as usize);
        let mut part = vec![f32::NAN; to - from];
        matrix.dequantize(from, &mut part);
        prop_assert_eq!(&part[..], &widened(&matrix)[from..to]);
    }
}
