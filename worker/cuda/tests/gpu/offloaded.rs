//! What is not held in a GPU's memory, brought there in the middle of a run: moments, the table of token
//! embeddings, layers.

use coxswain_integration_tests::solo::{quickstart, train};
use coxswain_proto::run_spec::DeviceChoice;
use coxswain_worker::device::ChosenTrainer;

use crate::{gpus, tasks};

/// The losses of a few steps.
fn losses(offload: &str) -> Vec<f64> {
    let dir = tempfile::tempdir().expect("a directory for temporary files");
    let offload = format!("memory.offload={offload}");
    let settings = [
        &offload,
        "train.steps=3",
        "train.global_batch=2",
        "train.micro_batch=2",
        "train.recompute=full",
        "train.checkpoint_every=0",
        "eval.samples=0",
    ];
    let spec = quickstart(dir.path(), &settings);
    train(&mut ChosenTrainer::new(tasks(), Some(DeviceChoice::Cuda), 0, None), &spec, 0).losses
}

#[test]
fn a_gpu_learns_the_same_from_what_it_does_not_hold() {
    if gpus("what is offloaded").is_none() {
        return;
    }
    let held = losses("none");
    assert!(held.len() == 3 && held.iter().all(|loss| loss.is_finite()), "{held:?}");
    for elsewhere in ["embedding", "optimizer"] {
        assert_eq!(losses(elsewhere), held, "{elsewhere}");
    }
    // Layers that are brought are multiplied one by one, those that are held are joined.
    let streamed = losses("layers");
    let off = streamed.iter().zip(&held).map(|(there, here)| (there - here).abs() / here.abs());
    assert!(off.fold(0.0, f64::max) < 1e-4, "{streamed:?} and {held:?}");
}
