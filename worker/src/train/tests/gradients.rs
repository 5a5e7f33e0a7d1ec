//! What should train does, on a real policy.

use coxswain_nn::params::{FlatGrads, Group, Init, TrainableLayout};
use coxswain_proto::{
    ids::{Rank, Step},
    run_spec::{Optimizer, PerGroup},
};
use coxswain_task::StageClock;
use coxswain_tasks::vla_flow::{
    data::MicroBatch,
    testing::small::{Fixture, batch, load, shaken, spec},
};

use super::peak;
use crate::{
    collective::{Cuts, Solo},
    train::GradientWatch,
    zero::{Keeps, Partition, Rates, ReplicatedOptimizer, StepInput},
};

#[test]
fn everything_trains_within_three_steps_of_the_zero_start() {
    let Fixture { policy, mut trainables } = load(&spec(&[]));
    let layout = trainables.layout().clone();
    let mut watch = GradientWatch::new(&layout, &peak());
    for step in 0..GradientWatch::STEPS as u64 {
        assert!(!watch.is_over());
        let mut grads = FlatGrads::new(layout.len());
        let batch = MicroBatch { step: Step(step), ..batch(&[0, 1, 2]) };
        policy.forward_backward(&trainables, &batch, &mut grads, &mut StageClock::default()).expect("sound");
        watch.observe(&layout, &grads);
        assert_eq!(watch.verdict(&layout), Ok(()));
        let moved = trainables.to_vec().iter().zip(grads.values()).map(|(v, g)| v - 1e-3 * g).collect();
        trainables.set(moved);
    }
    assert!(watch.is_over());
}

#[test]
fn a_trainable_without_a_gradient_is_found_and_named() {
    let mut layout = TrainableLayout::default();
    layout.add("lost".into(), &[2], Group::LORA, true, Init::Zeros);
    let Fixture { policy, trainables } = load(&spec(&[]));
    let mut grads = FlatGrads::new(trainables.layout().len());
    policy
        .forward_backward(&trainables, &batch(&[0]), &mut grads, &mut StageClock::default())
        .expect("sound");
    let mut watch = GradientWatch::new(trainables.layout(), &peak());
    for tries in 1..GradientWatch::STEPS {
        // However often a step is tried, it counts once.
        (0..=tries).for_each(|_| watch.observe(trainables.layout(), &grads));
        assert_eq!(watch.verdict(trainables.layout()), Ok(()), "too early to tell");
        assert_eq!(watch.verdict(trainables.layout()), Ok(()), "a step without samples");
    }
    watch.observe(trainables.layout(), &grads);
    let silent = watch.verdict(trainables.layout()).expect_err("the adapters never got a gradient");
    assert!(silent.to_string().contains("lora_A") && !silent.is_all(), "{silent}");
    assert!(watch.is_over(), "said once");
    grads.values_mut().fill(0.0);
    let mut watch = GradientWatch::new(trainables.layout(), &peak());
    let tell = |watch: &mut GradientWatch| {
        watch.observe(trainables.layout(), &grads);
        watch.verdict(trainables.layout())
    };
    assert_eq!([tell(&mut watch), tell(&mut watch)], [Ok(()), Ok(())]);
    assert!(tell(&mut watch).expect_err("nothing has a gradient").is_all());
}

#[test]
fn what_has_no_learning_rate_is_not_expected_to_train() {
    let Fixture { policy, trainables } = load(&spec(&[]));
    let mut grads = FlatGrads::new(trainables.layout().len());
    policy
        .forward_backward(&trainables, &batch(&[0]), &mut grads, &mut StageClock::default())
        .expect("sound");
    // A fresh adapter that rests: `lora_A` never gets a gradient, because `lora_B` stays zero.
    let resting = Rates::from([("lora", 0.0), ("expert", 1e-4), ("sensor", 1e-4)]);
    let mut watch = GradientWatch::new(trainables.layout(), &resting);
    // The expert's output layer has moved.
    grads.values_mut().iter_mut().for_each(|g| *g += 1e-3);
    for param in trainables.layout().params().iter().filter(|param| param.group == Group::LORA) {
        grads.values_mut()[param.offset..param.offset + param.len()].fill(0.0);
    }
    for _ in 0..2 * GradientWatch::STEPS {
        watch.observe(trainables.layout(), &grads);
        assert_eq!(watch.verdict(trainables.layout()), Ok(()));
    }
    assert!(watch.is_over());
}

#[test]
fn adapters_learn_through_an_expert_that_keeps_its_bits() {
    let Fixture { policy, mut trainables } = shaken(&spec(&[]));
    let layout = trainables.layout().clone();
    let partition = Partition::new(Cuts::equal(layout.len(), 1), Rank(0));
    let settings = Optimizer { weight_decay: PerGroup::All(0.1), ..Optimizer::default() };
    let mut optimizer =
        ReplicatedOptimizer::<Vec<f32>>::at(&(), &layout, partition, &settings, Keeps::default());
    let before = trainables.to_vec();
    optimizer.begin(0, 0, &before);
    let rates = Rates::from([("lora", 1e-2), ("expert", 0.0), ("sensor", 0.0)]);
    let mut losses = Vec::new();
    for _ in 0..8 {
        let mut grads = FlatGrads::new(layout.len());
        let micro = policy
            .forward_backward(&trainables, &batch(&[0, 1, 2]), &mut grads, &mut StageClock::default())
            .expect("sound");
        losses.push(micro.loss_sum);
        let input = StepInput { scale: 1.0 / micro.valid, rates: rates.clone(), resting: None };
        let mut weights: Vec<f32> = trainables.take();
        optimizer
            .step(grads.values_mut(), &mut weights, &input, &mut Solo::default())
            .expect("finite gradients");
        trainables.put(weights);
    }
    let after = trainables.to_vec();
    for param in layout.params() {
        let stays = before[param.range()] == after[param.range()];
        assert_eq!(stays, param.group != Group::LORA, "{}", param.name);
    }
    assert!(losses[7] < 0.95 * losses[0], "{losses:?}");
}
