//! Training whose flat parameter buffer lies in a device's memory against training whose lies in the host's:
//! the same policy, on Flex.

use burn::backend::Flex;
use coxswain_nn::{
    kernels::flat::{Flat, FlatOn, OnDevice},
    params::{FlatGrads, Group, TrainableLayout},
};
use coxswain_proto::{
    ids::{Rank, Step},
    run_spec::{Optimizer, RunSpec},
};
use coxswain_task::StageClock;
use coxswain_tasks::vla_flow::{
    data::MicroBatch,
    testing::small::{EVERYWHERE, Fixture, batch, load, relative_error, shaken, spec},
};
use serde_json::json;

use super::peak;
use crate::{
    collective::{Cuts, Solo},
    train::GradientWatch,
    zero::{Keeps, Partition, Rates, ReplicatedOptimizer, StepInput},
};

const STEPS: u64 = 5;

fn whole(layout: &TrainableLayout) -> Partition {
    Partition::new(Cuts::equal(layout.len(), 1), Rank(0))
}

/// Losses, gradient norms, and what the trainables have come to.
fn trained<F: FlatOn<Flex>>(spec: &RunSpec) -> (Vec<[f64; 2]>, Vec<f32>) {
    let Fixture { policy, mut trainables } = shaken(spec);
    let layout = trainables.layout().clone();
    let place = F::place(&trainables.device());
    let mut grads = FlatGrads::<F>::at(&place, layout.len());
    let mut watch = GradientWatch::new(&layout, &peak());
    let mut optimizer = ReplicatedOptimizer::<F>::at(
        &place,
        &layout,
        whole(&layout),
        &Optimizer::default(),
        Keeps::default(),
    );
    optimizer.begin(0, 0, &trainables.to_vec());
    let mut told = Vec::new();
    for step in 0..STEPS {
        grads.zero();
        let (mut loss, mut valid) = (0.0, 0.0);
        for rows in [&[0usize, 1][..], &[2]] {
            let batch = MicroBatch { step: Step(step), ..batch(rows) };
            let micro = policy
                .forward_backward(&trainables, &batch, &mut grads, &mut StageClock::default())
                .expect("sound");
            (loss, valid) = (loss + micro.loss_sum, valid + micro.valid);
        }
        watch.observe(&layout, &grads);
        let rates = Rates::from([("lora", 1e-3), ("expert", 1e-3), ("sensor", 1e-3)]);
        // As in a cached phase: in the last step the adapter rests.
        let resting = (step + 1 == STEPS).then_some(Group::LORA);
        let input = StepInput { scale: 1.0 / valid, rates, resting };
        let mut weights: F = trainables.take();
        let sums = grads.values_but(resting, &layout);
        let outcome = optimizer.step(sums, &mut weights, &input, &mut Solo::default()).expect("a step");
        trainables.put(weights);
        told.push([loss / valid, outcome.grad_norm]);
    }
    assert!(watch.is_over());
    let lent = trainables.lend(|_, values| values.to_vec());
    assert!(lent == trainables.to_vec());
    (told, lent)
}

#[test]
fn training_with_the_flat_namespace_on_a_device_is_training_with_it_on_the_host() {
    for targets in [json!(EVERYWHERE), json!(r".*language_model\.layers\.[345]\..*(v_proj|up_proj)")] {
        let spec = spec(&[("lora", json!({"rank": 2, "targets": targets}))]);
        let (host, device) = (trained::<Vec<f32>>(&spec), trained::<OnDevice<Flex>>(&spec));
        for (step, (a, b)) in host.0.iter().zip(&device.0).enumerate() {
            let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max);
            assert!(apart < 1e-5, "step {step}: loss and norm {a:?} on the host, {b:?} on the device");
        }
        let error = relative_error(&device.1, &host.1);
        assert!(error < 1e-5, "values are {error:e} apart");
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_named_wherever_it_lies() {
    fn named<F: Flat>(place: &F::Place) -> String {
        let layout = load(&spec(&[])).trainables.layout().clone();
        let mut grads = FlatGrads::<F>::at(place, layout.len());
        let bad = layout.params()[3].offset + 1;
        grads.values_mut().edit(|values| values[bad] = f32::NAN);
        let mut weights = F::zeros(place, layout.len());
        let input = StepInput { scale: 1.0, rates: peak(), resting: None };
        let mut optimizer = ReplicatedOptimizer::<F>::at(
            place,
            &layout,
            whole(&layout),
            &Optimizer::default(),
            Keeps::default(),
        );
        let error = optimizer.step(grads.values_mut(), &mut weights, &input, &mut Solo::default());
        error.expect_err("not finite").to_string()
    }
    let (host, device) = (named::<Vec<f32>>(&()), named::<OnDevice<Flex>>(&Default::default()));
    assert!(host == device && host.contains(".lora_"), "{host} {device}");
}
