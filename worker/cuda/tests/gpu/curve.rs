//! Fifty steps of the quickstart's model: the losses of one device beside another's.
//!
//! Rounding grows through training, so single steps may part further than a forward pass does. What is held
//! is the mean over the curve of the distance between two losses, in parts of the loss.

use coxswain_integration_tests::solo::{quickstart, train};
use coxswain_proto::run_spec::DeviceChoice;
use coxswain_worker::device::ChosenTrainer;

use crate::{gpus, tasks};

const STEPS: usize = 50;

/// Types of weights and of activations.
type Dtypes = [&'static str; 2];

const FLOAT32: Dtypes = ["float32"; 2];
const WEIGHTS: Dtypes = ["bfloat16", "float32"];
const ACTIVATIONS: Dtypes = ["float32", "bfloat16"];

/// The losses of `steps` steps.
fn losses(device: DeviceChoice, [weights, activations]: Dtypes, steps: usize) -> Vec<f64> {
    let dir = tempfile::tempdir().expect("a directory for temporary files");
    let settings = [
        format!("train.steps={steps}"),
        format!("model.weights_dtype={weights}"),
        format!("model.activations_dtype={activations}"),
        // A CPU is what others are held against: it computes in float32.
        "launch.bfloat16_matmul=false".to_owned(),
        "train.global_batch=4".to_owned(),
        "train.micro_batch=4".to_owned(),
        "train.checkpoint_every=0".to_owned(),
        "eval.samples=0".to_owned(),
    ];
    let spec = quickstart(dir.path(), &settings.each_ref().map(String::as_str));
    let summary = train(&mut ChosenTrainer::new(tasks(), Some(device), 0, None), &spec, 0);
    assert_eq!(summary.losses.len(), steps);
    summary.losses
}

/// Mean distance in parts of the reference. Not a number where either has one.
fn distance(losses: &[f64], reference: &[f64]) -> f64 {
    assert_eq!(losses.len(), reference.len());
    let parts = losses.iter().zip(reference).map(|(a, b)| (a - b).abs() / b.abs());
    parts.sum::<f64>() / reference.len() as f64
}

#[track_caller]
fn assert_close(what: &str, losses: &[f64], reference: &[f64], tolerance: f64) {
    let found = distance(losses, reference);
    println!("{what}: {found:.1e} apart over {} steps, {:?} to {:?}", losses.len(), losses[0], losses.last());
    assert!(found <= tolerance, "{what}: {found:.1e} apart, {losses:?} and {reference:?}");
}

#[test]
fn what_is_bfloat16_learns_the_curve_of_float32_on_the_cpu() {
    const FEW: usize = 8;
    let [float32, weights, activations] =
        [FLOAT32, WEIGHTS, ACTIVATIONS].map(|dtypes| losses(DeviceChoice::Cpu, dtypes, FEW));
    // They are bfloat16 in the file, and a CPU computes in float32 with them.
    assert_close("cpu, weights in bfloat16", &weights, &float32, 1e-6);
    assert_close("cpu, activations in bfloat16", &activations, &float32, 2e-2);
    assert_ne!(activations, float32, "something is rounded");
    assert!(distance(&[f64::NAN], &[1.0]).is_nan(), "not a number is never close");
}

#[test]
fn a_gpu_learns_from_few_bits_as_the_cpu_does() {
    const FEW: usize = 4;
    if gpus("a few steps in 4 and 8 bits beside the CPU").is_none() {
        return;
    }
    for weights in ["nf4", "int8"] {
        let [found, expected] =
            [DeviceChoice::Cuda, DeviceChoice::Cpu].map(|device| losses(device, [weights, "float32"], FEW));
        assert_close(&format!("GPU, {weights}"), &found, &expected, 2e-2);
    }
}

#[test]
fn a_gpu_learns_the_cpus_curve() {
    if gpus("fifty steps beside the CPU").is_none() {
        return;
    }
    let reference = losses(DeviceChoice::Cpu, FLOAT32, STEPS);
    assert!(reference[STEPS - 1] < reference[0], "the CPU learns nothing: {reference:?}");
    for (what, dtypes, tolerance) in
        [("float32", FLOAT32, 1e-3), ("weights", WEIGHTS, 2e-2), ("activations", ACTIVATIONS, 2e-2)]
    {
        let found = losses(DeviceChoice::Cuda, dtypes, STEPS);
        assert_close(&format!("GPU, {what}"), &found, &reference, tolerance);
    }
}
