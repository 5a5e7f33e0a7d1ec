//! Training from a run spec alone: a world of one, in this process, without a coordinator.

use burn_flex::Flex;
use coxswain_integration_tests::solo::{self, quickstart as spec};
use coxswain_proto::run_spec::RunSpec;
use coxswain_tasks::vla_flow::VlaFlow;
use coxswain_worker::train::{Summary, TaskTrainer, TrainerOptions};

fn train(spec: &RunSpec, first_step: u64) -> Summary {
    let options = TrainerOptions { device: Default::default(), listener: None };
    solo::train(
        &mut TaskTrainer::<Flex>::new(coxswain_tasks::leaked(VlaFlow::<Flex>::default()), options),
        spec,
        first_step,
    )
}

fn bits(losses: &[f64]) -> Vec<u64> {
    losses.iter().map(|loss| loss.to_bits()).collect()
}

#[test]
fn a_resumed_run_repeats_the_losses_of_an_uninterrupted_one_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let whole = train(&spec(&dir.path().join("a"), &["train.steps=6", "train.checkpoint_every=0"]), 0);
    let spec = spec(
        &dir.path().join("b"),
        &["train.steps=6", "train.checkpoint_every=3", "train.keep_checkpoints=9"],
    );
    let first = train(&spec, 0);
    assert_eq!(bits(&whole.losses), bits(&first.losses), "checkpoints change nothing");
    let resumed = train(&spec, 3);
    assert_eq!(bits(&whole.losses[3..]), bits(&resumed.losses));
    let adapter =
        |run: &str| std::fs::read(dir.path().join(run).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(adapter("a") == adapter("b"), "the resumed run leaves another adapter");
}

#[test]
fn where_frozen_blocks_are_does_not_change_what_is_learned() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, offload: &str| {
        let overrides = ["train.steps=4", "lora.targets=all-linear", "train.recompute=full", offload];
        let losses = train(&spec(&dir.path().join(name), &overrides), 0).losses;
        let adapter = dir.path().join(name).join("adapter/adapter_model.safetensors");
        (bits(&losses), std::fs::read(adapter).unwrap())
    };
    let held = run("held", "memory.offload=none");
    for elsewhere in ["layers", "embedding"] {
        let there = run(elsewhere, &format!("memory.offload={elsewhere}"));
        assert_eq!(held.0, there.0, "{elsewhere}");
        assert!(held.1 == there.1, "another adapter: {elsewhere}");
    }
}

#[test]
fn micro_batch_and_recompute_do_not_change_what_is_learned() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, overrides: &[&str]| train(&spec(&dir.path().join(name), overrides), 0).losses;
    let reference = run("a", &["train.steps=4", "train.micro_batch=2", "train.recompute=full"]);
    let kept = run("b", &["train.steps=4", "train.micro_batch=2", "train.recompute=none"]);
    assert_eq!(bits(&reference), bits(&kept), "recompute is bitwise the same");
    for micro_batch in ["1", "3", "8"] {
        let other =
            run("c", &["train.steps=4", &format!("train.micro_batch={micro_batch}"), "train.resume=false"]);
        for (a, b) in reference.iter().zip(&other) {
            assert!(
                (a - b).abs() <= 1e-5 * a.abs(),
                "micro-batch {micro_batch}: {reference:?} and {other:?}"
            );
        }
    }
}

#[test]
fn activations_in_bfloat16_learn_alike_in_every_recompute_mode_and_nearly_as_much_as_in_float32() {
    const STEPS: usize = 30;
    let dir = tempfile::tempdir().unwrap();
    let steps = format!("train.steps={STEPS}");
    let run = |name: &str, activations: &str, recompute: &str| {
        let keys = [format!("model.activations_dtype={activations}"), format!("train.recompute={recompute}")];
        let own =
            [steps.as_str(), &keys[0], &keys[1], "train.checkpoint_every=15", "train.keep_checkpoints=9"];
        spec(&dir.path().join(name), &own)
    };
    let exact = train(&run("exact", "float32", "full"), 0).losses;
    let rounded = train(&run("rounded", "bfloat16", "selective"), 0).losses;
    assert_eq!(bits(&rounded), bits(&train(&run("kept", "bfloat16", "none"), 0).losses));
    // Another mode goes on where the first one was, with the same bits.
    assert_eq!(bits(&rounded[15..]), bits(&train(&run("rounded", "bfloat16", "full"), 15).losses));

    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let [begin, end] = [&exact[..5], &exact[STEPS - 5..]].map(mean);
    let [rounded_begin, rounded_end] = [&rounded[..5], &rounded[STEPS - 5..]].map(mean);
    assert!(end < 0.8 * begin, "there is something to learn: {exact:?}");
    assert_ne!(bits(&exact), bits(&rounded));
    for (found, expected) in [(rounded_begin, begin), (rounded_end, end)] {
        assert!((found / expected - 1.0).abs() < 0.02, "{rounded:?} in bfloat16, {exact:?} in float32");
    }
}
