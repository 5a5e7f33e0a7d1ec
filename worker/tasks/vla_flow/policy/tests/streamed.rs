//! Frozen blocks that are read when they run: the same bits as from blocks that are held, and faults of their
//! file as errors.

use std::{cell::Cell, fs, path::Path};

use super::*;
use coxswain_models::pretrained::{blocks::InMemory, frozen::FrozenBytes};
use coxswain_task::{FrozenWeights, Module};

const LANGUAGE: &str = r".*language_model.*(q_proj|up_proj)";
const TOP: &str = r".*language_model\.layers\.[45]\..*(q_proj|down_proj)";

fn lora(targets: &str) -> (&'static str, Value) {
    ("lora", json!({"rank": 2, "targets": targets}))
}

fn recompute(mode: &str) -> (&'static str, Value) {
    ("train", json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": mode}))
}

fn weights(dtype: &str) -> (&'static str, Value) {
    ("model", json!({"path": MODEL, "weights_dtype": dtype}))
}

/// A policy with its blocks held, and with its blocks streamed.
fn both(changes: &[(&str, Value)]) -> [Fixture; 2] {
    let streamed = [changes, &[("memory", json!({"offload": "layers"}))]].concat();
    [shaken(&spec(changes)), shaken(&spec(&streamed))]
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn streaming_changes_no_bit_of_loss_gradient_or_sample() {
    // Everywhere; one tower; a tower that is run without a tape up to its upper layers.
    for targets in [EVERYWHERE, LANGUAGE, TOP] {
        for (mode, dtype) in [("full", "float32"), ("selective", "float32"), ("full", "bfloat16")] {
            let [held, streamed] = both(&[lora(targets), recompute(mode), weights(dtype)]);
            let batch = batch(&[0, 1, 2]);
            assert!(held.run(&batch) == streamed.run(&batch), "{targets} {mode} {dtype}");
            let sample = |fixture: &Fixture| {
                fixture.policy.sample_actions(&fixture.trainables, &batch, 1).expect("a sound batch")
            };
            assert_eq!(bits(&sample(&held)), bits(&sample(&streamed)), "{targets} {mode} {dtype}");
            assert_eq!(held.policy.most_streamed(), 0);
            // In bfloat16 the file's own bytes are used, except for gains and biases.
            let most = streamed.policy.most_streamed();
            assert!(most > 0 && (dtype == "float32" || most < 100 << 10), "{most}");
        }
    }
}

#[test]
fn a_frozen_model_is_streamed_whatever_is_recomputed() {
    for mode in ["none", "full"] {
        let [held, streamed] = both(&[("lora", Value::Null), recompute(mode)]);
        assert!(held.run(&batch(&[0, 2])) == streamed.run(&batch(&[0, 2])), "{mode}");
    }
}

#[test]
fn kept_features_are_the_same_from_streamed_blocks_and_steps_begin_with_them() {
    let exact = ("cache", json!({"mode": "exact", "tap": {"layer": 3}}));
    let periodic = ("cache", json!({"mode": "periodic"}));
    for (targets, cache) in [(TOP, exact), (EVERYWHERE, periodic)] {
        let [held, streamed] = both(&[lora(targets), recompute("full"), cache]);
        let batch = batch(&[0, 1, 2]);
        let features = |fixture: &Fixture| {
            fixture.policy.features_below(&fixture.trainables, &batch).expect("a sound batch")
        };
        let kept = features(&held);
        assert_eq!(bits(&kept.values), bits(&features(&streamed).values), "{targets}");
        let cached = MicroBatch { pixel_values: vec![], features: Some(kept), ..batch.clone() };
        assert!(held.run(&cached) == streamed.run(&cached), "{targets}");
    }
}

#[test]
fn the_names_of_features_do_not_depend_on_where_weights_are() {
    let periodic = ("cache", json!({"mode": "periodic"}));
    let [held, streamed] = both(&[lora(EVERYWHERE), recompute("full"), periodic]);
    let digest = |fixture: &Fixture| {
        fixture.policy.weights_below(Tap::Final).expect("readable").digest().expect("readable")
    };
    assert_eq!(digest(&held), digest(&streamed));
}

#[test]
fn the_report_says_what_is_streamed_and_how_much_of_it_is_in_memory() {
    let [held, streamed] = both(&[lora(EVERYWHERE), recompute("full")]);
    let report =
        |fixture: &Fixture| fixture.policy.trainable_report(fixture.trainables.layout(), Default::default());
    let (held, rows) = (report(&held), report(&streamed));
    let sum =
        |rows: &[Module], of: fn(&Module) -> u64| rows.iter().filter(|row| !row.trains).map(of).sum::<u64>();
    assert_eq!(rows[2].module, "streamed");
    let parameters = |row: &Module| row.parameters as u64;
    assert_eq!(sum(&rows, parameters), sum(&held, parameters));
    let tensors = streamed.policy.model().outline().tensors();
    let bytes = FrozenBytes::of(&tensors, |tensor| 4 * tensor.elements as u64);
    assert_eq!(sum(&rows, |row| row.bytes), bytes.in_memory(InMemory::TwoBlocks));
    assert_eq!(sum(&held, |row| row.bytes), bytes.in_memory(InMemory::All));
}

/// A copy of the model that may be damaged, streamed, with a copied weight in every block.
fn of_a_copy() -> (tempfile::TempDir, Fixture) {
    let copy = tempfile::tempdir().expect("a temporary directory");
    for entry in fs::read_dir(MODEL).expect("part of the repository") {
        let path = entry.expect("readable").path();
        fs::copy(&path, copy.path().join(path.file_name().expect("a file"))).expect("there is room");
    }
    let model = ("model", json!({"path": copy.path()}));
    let streamed = ("memory", json!({"offload": "layers"}));
    let fixture = shaken(&spec(&[lora(EVERYWHERE), recompute("full"), model, streamed]));
    (copy, fixture)
}

fn cut(dir: &Path) {
    let file = fs::File::options().write(true).open(dir.join("model.safetensors")).expect("it is ours");
    file.set_len(100_000).expect("it is ours");
}

#[test]
fn a_file_cut_short_ends_the_step_with_an_error_that_names_file_and_tensor() {
    for late in [Pass::Forward, Pass::Backward] {
        let (copy, fixture) = of_a_copy();
        let mut grads = FlatGrads::new(fixture.trainables.layout().len());
        let done = Cell::new(false);
        let mut clock = StageClock::new(|pass| {
            if pass == late && !done.replace(true) {
                cut(copy.path());
            }
        });
        let fixture = &fixture;
        let outcome =
            fixture.policy.forward_backward(&fixture.trainables, &batch(&[0, 1]), &mut grads, &mut clock);
        let error = outcome.expect_err("most of the file is gone");
        let message = error.to_string();
        let StepError::Weights { step, source } = error else { panic!("{message}") };
        assert_eq!((step, source.path), (Step(3), copy.path().join("model.safetensors")), "{late:?}");
        let layer = if late == Pass::Forward { "visual.blocks.0." } else { "layers.5." };
        assert!(source.tensor.contains(layer), "{late:?}: {message}");
        assert!(message.contains("100000") && message.contains("memory.offload"), "{message}");
    }
}
