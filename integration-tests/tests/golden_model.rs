//! The model against Hugging Face Transformers and PEFT, on the fixtures of `fixtures/make_fixtures.py`.
//!
//! Relative error is the norm of the difference over the norm of the reference. Everything is float32 on the CPU, and every position
//! is compared, padding included: where a query has no admissible key both sides give zeros (see `make_fixtures.py`).

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use coxswain_worker::model::qwen::forward;
use safetensors::{Dtype, SafeTensors};

const VALUE_TOLERANCE: f64 = 1e-4;
const GRADIENT_TOLERANCE: f64 = 1e-3;

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/golden").join(case)
}

/// Tensors of a file by name: shape, and values as f64.
struct Tensors(BTreeMap<String, (Vec<usize>, Vec<f64>)>);

impl Tensors {
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter().map(|(name, view)| {
            let values = match view.dtype() {
                Dtype::F32 => view
                    .data()
                    .chunks(4)
                    .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
                    .collect(),
                Dtype::I64 => {
                    view.data().chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect()
                }
                other => panic!("{name}: {other:?}"),
            };
            (name, (view.shape().to_vec(), values))
        });
        Self(tensors.collect())
    }
}

fn relative_error(ours: &[f64], reference: &[f64]) -> f64 {
    let difference: f64 = ours.iter().zip(reference).map(|(a, b)| (a - b).powi(2)).sum();
    let norm: f64 = reference.iter().map(|b| b.powi(2)).sum();
    if norm == 0.0 { difference.sqrt() } else { (difference / norm).sqrt() }
}

/// Runs a case and compares every tensor; returns the largest relative errors of values and of gradients.
fn compare(case: &str, adapter: bool) -> (f64, f64) {
    let dir = golden(case);
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("out.safetensors");
    let adapter_dir = dir.join("adapter");
    let inputs = dir.join("inputs.safetensors");
    forward::run(&dir.join("model"), adapter.then_some(adapter_dir.as_path()), &inputs, &file).unwrap();
    let (ours, expected) = (Tensors::read(&file), Tensors::read(&dir.join("expected.safetensors")));

    let mut worst = (0.0f64, 0.0f64);
    for (name, (shape, values)) in &ours.0 {
        let reference = if adapter || !adapter_dir.exists() { name.clone() } else { format!("base.{name}") };
        let Some((expected_shape, expected)) = expected.0.get(&reference) else {
            assert!(!adapter, "{case}: Transformers has no {name}");
            continue;
        };
        assert_eq!(shape, expected_shape, "{case}: shape of {name}");
        if name == "position_ids" {
            assert_eq!(values, expected, "{case}: {name}");
            continue;
        }
        let error = relative_error(values, expected);
        let gradient = name.starts_with("grad.");
        let tolerance = if gradient { GRADIENT_TOLERANCE } else { VALUE_TOLERANCE };
        assert!(error <= tolerance, "{case}: {name} differs by {error:.2e}, more than {tolerance:.0e}");
        let slot = if gradient { &mut worst.1 } else { &mut worst.0 };
        *slot = slot.max(error);
    }
    let missing: Vec<_> =
        expected.0.keys().filter(|name| !name.starts_with("base.") && !ours.0.contains_key(*name)).collect();
    assert!(!adapter || missing.is_empty(), "{case}: we lack {missing:?}");
    println!("{case}: values {:.1e}, gradients {:.1e}", worst.0, worst.1);
    worst
}

macro_rules! golden_cases {
    ($($test:ident: $case:literal;)*) => {$(
        #[test]
        fn $test() {
            compare($case, golden($case).join("adapter").exists());
            compare($case, false);
        }
    )*};
}

golden_cases! {
    published_layout_with_grouped_queries_odd_images_and_left_padding: "flat-gqa-left";
    nested_layout_with_tied_head_and_right_padding: "nested-tied-right";
    one_key_head_and_sharded_bfloat16_weights: "mqa-sharded-bf16";
    rank_stabilised_adapter_with_patterns_in_the_older_spelling: "rslora-patterns";
    text_alone_from_float16_with_an_adapter_on_the_head: "text-only-f16";
    a_frozen_model_with_an_image_in_every_row: "frozen";
}
