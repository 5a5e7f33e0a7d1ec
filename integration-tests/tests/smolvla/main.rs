//! SmolVLA against LeRobot beyond the defaults that `worker/policies` holds: gradients of the language model
//! and of adapters in both streams, and twenty steps of training by the engine's own optimizer and schedule.
//! `fixtures/make_smolvla_training.py` has made the references.

mod gradients;
mod policy;
mod steps;

/// How far values are from the reference, over its largest one.
fn off(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len(), "as many values as in the reference");
    let largest = expected.iter().fold(1e-12f32, |most, value| most.max(value.abs()));
    found.iter().zip(expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}
