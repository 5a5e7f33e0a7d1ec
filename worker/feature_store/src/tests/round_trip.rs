//! What goes in comes out, as `round_trip` says.

use coxswain_proto::run_spec::CacheDtype;
use proptest::prelude::*;

use super::{super::round_trip, *};

const DTYPES: [CacheDtype; 3] = [CacheDtype::Float32, CacheDtype::Bfloat16, CacheDtype::Int8];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Any float at all, and many ordinary ones.
fn any_value() -> impl Strategy<Value = f32> {
    prop_oneof![1 => any::<u32>().prop_map(f32::from_bits), 4 => -8.0f32..8.0]
}

/// Tokens of width 24, ids and shapes.
fn any_record() -> impl Strategy<Value = (Vec<f32>, Vec<u32>, Vec<[u32; 3]>)> {
    let values =
        (0usize..6).prop_flat_map(|tokens| prop::collection::vec(any_value(), tokens * WIDTH as usize));
    let ids = prop::collection::vec(any::<u32>(), 0..9);
    (values, ids, prop::collection::vec(any::<[u32; 3]>(), 0..4))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn records_of_any_kind_come_back_as_rounding_says(
        records in prop::collection::vec(any_record(), 1..8),
        same_counts in any::<bool>(),
    ) {
        for dtype in DTYPES {
            let dir = tempfile::tempdir().unwrap();
            let namespace = open(dir.path(), dtype);
            let mut writer = namespace.writer().unwrap();
            let record = |i: usize| if same_counts { &records[0] } else { &records[i] };
            for i in 0..records.len() {
                let (values, ids, shapes) = record(i);
                writer.append(key(i as u64), &Record { ids, shapes, values }).unwrap();
            }
            prop_assert_eq!(writer.publish().unwrap(), records.len());
            // By the namespace that wrote it, and by one that finds the file.
            for namespace in [namespace, open(dir.path(), dtype)] {
                prop_assert_eq!(namespace.known(), records.len());
                for i in 0..records.len() {
                    let (values, ids, shapes) = record(i);
                    let found = namespace.get(&key(i as u64)).expect("just stored");
                    prop_assert_eq!(found.ids(), &ids[..]);
                    prop_assert_eq!(found.shapes(), &shapes[..]);
                    let (mut expected, mut read) = (values.clone(), vec![0.0; values.len()]);
                    round_trip(dtype, WIDTH as usize, &mut expected);
                    found.read_f32(&mut read).unwrap();
                    prop_assert_eq!(bits(&read), bits(&expected), "{:?}", dtype);
                }
            }
        }
    }

    #[test]
    fn rounding_twice_is_rounding_once(values in prop::collection::vec(any_value(), 4 * WIDTH as usize)) {
        for dtype in DTYPES {
            let mut once = values.clone();
            round_trip(dtype, WIDTH as usize, &mut once);
            let mut twice = once.clone();
            round_trip(dtype, WIDTH as usize, &mut twice);
            prop_assert_eq!(bits(&once), bits(&twice), "{:?}", dtype);
        }
    }

    #[test]
    fn rounding_errs_as_little_as_its_dtype_allows(values in prop::collection::vec(-1e3f32..1e3, WIDTH as usize)) {
        let largest = values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        for (dtype, bound) in [(CacheDtype::Bfloat16, 1.0 / 256.0), (CacheDtype::Int8, 0.5001 / 127.0)] {
            let mut rounded = values.clone();
            round_trip(dtype, WIDTH as usize, &mut rounded);
            for (x, y) in values.iter().zip(&rounded) {
                let scale = if dtype == CacheDtype::Int8 { largest } else { x.abs() };
                prop_assert!((x - y).abs() <= bound * scale, "{dtype:?}: {x} became {y}");
            }
        }
    }
}

#[test]
fn a_token_that_is_not_finite_is_no_number_in_int8() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![1.0; 2 * WIDTH as usize];
        values[3] = bad;
        round_trip(CacheDtype::Int8, WIDTH as usize, &mut values);
        let (first, second) = values.split_at(WIDTH as usize);
        assert!(first.iter().all(|x| x.is_nan()) && second.iter().all(|x| (x - 1.0).abs() < 1e-4));
    }
}

#[test]
fn bfloat16_is_that_of_the_half_crate() {
    for step in 0..1u32 << 16 {
        // All exponents, and mantissas on both sides of every tie.
        let x = f32::from_bits(step << 16 | [0x0000, 0x7fff, 0x8000, 0x8001, 0xffff][step as usize % 5]);
        let mut ours = [x];
        round_trip(CacheDtype::Bfloat16, 1, &mut ours);
        let theirs = half::bf16::from_f32(x).to_f32();
        assert!(ours[0].to_bits() == theirs.to_bits() || (x.is_nan() && ours[0].is_nan()), "{x}");
    }
}
