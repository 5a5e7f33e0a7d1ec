//! What tests of policies hold beside LeRobot's files: values, gradients and weights that are a formula
//! (`integration-tests/fixtures`).

use std::{collections::BTreeMap, fs, path::Path};

use coxswain_nn::files::{floats, read_tensors};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

/// What of the difference to LeRobot, over the largest value, is let through: values, gradients, actions.
pub(crate) const VALUES: f32 = 1e-5;
pub(crate) const GRADIENTS: f32 = 1e-3;
pub(crate) const ACTIONS: f32 = 1e-4;

/// Tensors by name, each with its shape.
pub(crate) type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A file of a golden case, images in 0..1; and what is said about it.
pub(crate) fn golden_at(dir: &str, file: &str) -> (Tensors, Value) {
    let bytes = fs::read(Path::new(dir).join(file)).expect("part of the repository");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("safetensors");
    let about = header.metadata().as_ref().and_then(|all| serde_json::from_str(all.get("about")?).ok());
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let most = if name.starts_with("observation.images") { 255.0 } else { 1.0 };
        let values = floats(&view).unwrap_or_else(|| match view.dtype() {
            Dtype::I32 => {
                let ids = view.data().chunks(4);
                ids.map(|id| i32::from_le_bytes(id.try_into().expect("4 bytes")) as f32).collect()
            }
            _ => view.data().iter().map(|byte| f32::from(*byte) / most).collect(),
        });
        (name, (view.shape().to_vec(), values))
    });
    (tensors.collect(), about.unwrap_or_default())
}

/// Values against the reference's: off by at most so much of the largest.
pub(crate) fn close(what: &str, found: &[f32], expected: &[f32], most: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-12f32, |most, value| most.max(value.abs()));
    let off = found.iter().zip(expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    println!("{what}: {:.1e}", off / largest);
    assert!(off <= most * largest, "{what}: {off:e} of {largest:e}");
}

/// The tensors of a file.
pub(crate) fn read(file: &Path) -> Tensors {
    let found = read_tensors(file).expect("written").into_iter();
    found.map(|tensor| (tensor.name, (tensor.shape, tensor.values))).collect()
}

/// Numbers of variance 1: Murmur's last mixing of FNV-1a of the name and of their place.
pub(crate) fn wave(name: &str, count: usize) -> Vec<f64> {
    let of_name =
        name.bytes().fold(0x811C_9DC5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let mixed = |place: u32| {
        let x = place.wrapping_mul(0x9E37_79B9) ^ of_name;
        let x = (x ^ (x >> 16)).wrapping_mul(0x85EB_CA6B);
        let x = (x ^ (x >> 13)).wrapping_mul(0xC2B2_AE35);
        x ^ (x >> 16)
    };
    let number = |place| (f64::from(mixed(place)) / 2f64.powi(32) - 0.5) * 12f64.sqrt();
    (0..count as u32).map(number).collect()
}

/// Writes weights that are a formula of their names.
pub(crate) fn write_weights(
    dir: &Path,
    tensors: &[(String, Vec<usize>)],
    by_formula: fn(&str, &[usize]) -> Vec<f32>,
) {
    let bytes = |name: &str, shape: &[usize]| -> Vec<u8> {
        by_formula(name, shape).iter().flat_map(|value| value.to_le_bytes()).collect()
    };
    let all: Vec<_> = tensors.iter().map(|(name, shape)| (name, shape, bytes(name, shape))).collect();
    let views = all.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, (*shape).clone(), bytes).expect("its shape"))
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).expect("written");
}

/// Gradients by their names against the reference's rows, of which there is one for each that is not 0.
pub(crate) fn hold(what: &str, found: &BTreeMap<String, &Vec<f32>>, reference: &(Vec<usize>, Vec<f32>)) {
    let (shape, rows) = reference;
    let there: Vec<_> = found.iter().filter(|(_, g)| g.iter().any(|value| *value != 0.0)).collect();
    assert_eq!(there.len(), shape[0], "{what}: {:?}", there.iter().map(|(name, _)| name).collect::<Vec<_>>());
    let mut largest = 0.0f64;
    for ((name, g), row) in there.into_iter().zip(rows.chunks(4)) {
        let product = |wave: &[f64]| g.iter().zip(wave).map(|(g, w)| f64::from(*g) * w).sum::<f64>();
        let size = g.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let waves = (0..3).map(|number| product(&wave(&format!("{name}.{number}"), g.len())));
        for (found, expected) in std::iter::once(size).chain(waves).zip(row) {
            let off = (found - f64::from(*expected)).abs() / f64::from(row[0]);
            largest = largest.max(off);
            assert!(off <= f64::from(GRADIENTS), "{what}: {name}: {found} and {expected}, off by {off:e}");
        }
    }
    println!("{what}: {largest:.1e}");
}
