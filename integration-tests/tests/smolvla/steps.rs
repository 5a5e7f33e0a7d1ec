//! Twenty steps of training with LeRobot's draws: the loss of each is LeRobot's, whose optimizer, clipping
//! and schedule are a policy's own preset.

use coxswain_nn::params::Trainables;
use coxswain_policies::TuningSettings;
use coxswain_proto::{
    ids::Rank,
    run_spec::{Optimizer, PerGroup},
};
use coxswain_worker::{
    collective::Solo,
    zero::{LearningRateSchedule, Rates, ShardedOptimizer, StepInput},
};

use crate::policy::{Tensors, TunedPolicy, golden};

const STEPS: usize = 20;
const TOLERANCE: f64 = 1e-4;

/// What the policy is given of a step.
fn given(golden: &Tensors, steps: &Tensors, step: usize) -> Tensors {
    let mut given = golden.clone();
    let names = [
        ("state", "state.normalized"),
        ("action", "action.normalized"),
        ("noise", "noise"),
        ("time", "time"),
    ];
    for (name, to) in names {
        let (shape, values) = &steps[name];
        let each = values.len() / STEPS;
        given.insert(to.into(), (shape[1..].to_vec(), values[step * each..][..each].to_vec()));
    }
    given
}

/// Losses of the steps with this peak of the rate.
fn losses(steps: &Tensors, rate: f64) -> Vec<f64> {
    // LeRobot cuts its 1,000 of 30,000 steps of warm-up down to none of twenty.
    let preset = Optimizer {
        betas: [0.9, 0.95],
        eps: 1e-8,
        weight_decay: PerGroup::All(1e-10),
        clip_norm: PerGroup::All(10.0),
        min_lr_ratio: 2.5e-6 / rate,
        ..Optimizer::default()
    };
    let (golden, mut tuned) = (golden("expected.safetensors"), TunedPolicy::load(TuningSettings::default()));
    let layout = tuned.trainables.layout().clone();
    let schedule = LearningRateSchedule::new(&preset, Rates::from([("expert", rate)]), STEPS as u64);
    let mut optimizer = ShardedOptimizer::new(&layout, 1, Rank(0), &preset);
    let mut weights = tuned.trainables.to_vec();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (loss, mut grads) = tuned.gradients(&tuned.batch(&given(&golden, steps, step)));
        losses.push(loss);
        let input = StepInput { scale: 1.0, rates: schedule.rates(step as u64), resting: None };
        optimizer
            .step(grads.values_mut(), &mut weights, &input, &mut Solo::default())
            .expect("a world of one");
        tuned.trainables = Trainables::new(layout.clone(), weights.clone(), &Default::default());
    }
    losses
}

#[test]
fn twenty_steps_have_lerobots_losses() {
    let steps = golden("steps.safetensors");
    let untrained = &steps["losses.untrained"].1;
    for (name, rate) in [("preset", 1e-4), ("faster", 3e-3)] {
        let reference = &steps[&format!("losses.{name}")].1;
        let found = losses(&steps, rate);
        for (step, (found, there)) in found.into_iter().zip(reference).enumerate() {
            let off = (found / f64::from(*there) - 1.0).abs();
            println!("{name} {step}: {found:.6}, off by {off:.1e}; untrained {:.6}", untrained[step]);
            assert!(off <= TOLERANCE, "{name}, step {step}: {found}, and {there} in LeRobot");
        }
        // The losses say more than what the policy was before.
        let moved = reference.iter().zip(untrained).filter(|(a, b)| (**a / **b - 1.0).abs() > 1e-3).count();
        assert!(moved > STEPS / 2, "{name}: {moved} losses moved");
    }
}
