//! The model against Hugging Face Transformers and PEFT, on the fixtures of `fixtures/make_fixtures.py`.
//!
//! Every position is compared, padding included: where a query has no admissible key both sides give zeros
//! (see there).

use std::{collections::BTreeMap, fs, path::Path};

use coxswain_nn::{dtypes::FrozenDtype, kernels::precision};
use coxswain_task::ForwardJob;
use coxswain_worker::device::{Accelerator, Device, Tasks};
use safetensors::{Dtype, SafeTensors};

use crate::{fixture, relative_error};

/// All cases.
pub const CASES: [&str; 11] = [
    "flat-gqa-left",
    "nested-tied-right",
    "mqa-sharded-bf16",
    "rslora-patterns",
    "text-only-f16",
    "frozen",
    "dropout",
    "qwen3-tied-left",
    "qwen3-untied-right",
    "qwen3-mqa-sharded-bf16",
    "qwen3-frozen",
];

/// Cases whose weights are bfloat16 in the file. Of the others rounding the weights alone moves gradients by
/// a tenth to more than themselves (these are small models with random weights; Transformers does the same),
/// so that in bfloat16 they say nothing.
pub const IN_BFLOAT16: [&str; 2] = ["mqa-sharded-bf16", "qwen3-mqa-sharded-bf16"];

/// How far results may be from the reference, relatively.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Outputs of layers, logits, the loss.
    pub values: f64,
    /// Gradients of the adapter.
    pub gradients: f64,
}

impl Tolerance {
    /// How far PyTorch itself is on this case under autocast in bfloat16: code that rounds like that cannot
    /// be asked to be nearer.
    pub fn of_autocast(case: &str) -> Self {
        let bytes = fs::read(fixture("golden").join(case).join("bfloat16.json")).unwrap();
        let worst: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        let of = |what: &str| worst[what].as_f64().unwrap();
        Self { values: of("values"), gradients: of("gradients") }
    }
}

/// What computes, and how.
#[derive(Clone, Copy)]
pub struct Computer {
    /// The device.
    pub device: Device,
    /// What knows its GPUs.
    pub accelerator: &'static dyn Accelerator,
    /// Type of the frozen matrices.
    pub dtype: FrozenDtype,
}

/// Tensors of a file by name: shape, and values as f64.
struct Tensors(BTreeMap<String, (Vec<usize>, Vec<f64>)>);

impl Tensors {
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter().map(|(name, view)| {
            let floats = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().unwrap()));
            let integers = |b: &[u8]| i64::from_le_bytes(b.try_into().unwrap()) as f64;
            let values = match view.dtype() {
                Dtype::F32 => view.data().chunks(4).map(floats).collect(),
                Dtype::I64 => view.data().chunks(8).map(integers).collect(),
                other => panic!("{name}: {other:?}"),
            };
            (name, (view.shape().to_vec(), values))
        });
        Self(tensors.collect())
    }
}

/// Runs a case with its adapter, if it has one, and without, and compares every tensor. A CPU rounds for
/// products of bfloat16 only where there is room for it.
pub fn hold(case: &str, computer: Computer, tolerance: Tolerance) {
    precision::allow_bfloat16_matmul(tolerance.values >= 1e-2);
    if fixture("golden").join(case).join("adapter").exists() {
        compare(case, true, computer, tolerance);
    }
    compare(case, false, computer, tolerance);
}

fn compare(case: &str, adapter: bool, computer: Computer, tolerance: Tolerance) {
    let dir = fixture("golden").join(case);
    let out = tempfile::tempdir().unwrap();
    let (adapter_dir, file) = (dir.join("adapter"), out.path().join("out.safetensors"));
    let job = ForwardJob {
        model: &dir.join("model"),
        backbone: None,
        gradients: false,
        adapter: adapter.then_some(adapter_dir.as_path()),
        inputs: &dir.join("inputs.safetensors"),
        out: &file,
        dtype: computer.dtype,
    };
    let tasks = Tasks { cpu: coxswain_tasks::on_cpu().leak(), accelerator: computer.accelerator };
    tasks.forward(&job, computer.device).unwrap().unwrap();
    let (ours, expected) = (Tensors::read(&file), Tensors::read(&dir.join("expected.safetensors")));

    // Both first, so that a run that is off shows by how much everywhere.
    let (mut worst, mut off) = ([0.0f64; 2], Vec::new());
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
        let allowed = if gradient { tolerance.gradients } else { tolerance.values };
        if error > allowed || error.is_nan() {
            off.push(format!("{name} by {error:.1e}"));
        }
        let slot = &mut worst[usize::from(gradient)];
        *slot = slot.max(error);
    }
    let missing: Vec<_> =
        expected.0.keys().filter(|name| !name.starts_with("base.") && !ours.0.contains_key(*name)).collect();
    assert!(!adapter || missing.is_empty(), "{case}: we lack {missing:?}");
    let Computer { device, dtype, .. } = computer;
    println!("{case} on {device}, {dtype:?}: values {:.1e}, gradients {:.1e}", worst[0], worst[1]);
    assert!(off.is_empty(), "{case} on {device}, {dtype:?}: off ({tolerance:?}): {off:?}");
}
