//! What should train does, on a real policy.

use coxswain_nn::params::{FlatGrads, Group, Init, TrainableLayout};
use coxswain_proto::ids::Step;
use coxswain_task::StageClock;
use coxswain_tasks::vla_flow::{
    data::MicroBatch,
    testing::small::{Fixture, batch, load, spec},
};

use super::peak;
use crate::{train::GradientWatch, zero::Rates};

#[test]
fn everything_trains_within_three_steps_of_the_zero_start() {
    let Fixture { policy, mut trainables } = load(&spec(&[]));
    let layout = trainables.layout().clone();
    let mut watch = GradientWatch::new(&layout, &peak());
    for step in 0..GradientWatch::STEPS as u64 {
        assert!(!watch.all_heard());
        let mut grads = FlatGrads::new(layout.len());
        let batch = MicroBatch { step: Step(step), ..batch(&[0, 1, 2]) };
        policy.forward_backward(&trainables, &batch, &mut grads, &mut StageClock::default()).expect("sound");
        watch.observe(&layout, &grads);
        assert_eq!(watch.verdict(&layout), Ok(()));
        let moved = trainables.to_vec().iter().zip(grads.values()).map(|(v, g)| v - 1e-3 * g).collect();
        trainables.set(moved);
    }
    assert!(watch.all_heard());
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
    assert!(silent.to_string().contains("lora_A"), "{silent}");
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
    assert!(watch.all_heard());
}
