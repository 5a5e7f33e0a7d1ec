//! `cache.mode: exact`: the same bits as without a cache.

use super::{EPOCH, Run, SAMPLES, UPPER_LAYERS, solo, spec, use_of};

/// Runs two epochs without a cache, with a cold store, and with the warm one; returns the last two.
fn compared(overrides: &[&str]) -> (Run, Run) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = format!("cache.dir={}", dir.path().join("store").display());
    let steps = format!("train.steps={}", 2 * EPOCH);
    let run = |name: &str, more: &[&str]| {
        let all: Vec<&str> = [&[steps.as_str()], overrides, more].concat();
        solo(&spec(&dir.path().join(name), &all))
    };
    let off = run("off", &[]);
    let cold = run("cold", &["cache.mode=exact", &store]);
    let warm = run("warm", &["cache.mode=exact", &store]);
    off.assert_same(&cold);
    off.assert_same(&warm);
    assert!(off.summary.cache.is_none());
    (cold, warm)
}

#[test]
fn lora_on_the_upper_layers_keeps_the_input_of_the_first_of_them() {
    let (cold, warm) = compared(&[UPPER_LAYERS]);
    assert_eq!(cold.used(), (SAMPLES, SAMPLES), "the first epoch fills, the second reads");
    assert_eq!(use_of(&cold, 0..EPOCH), (0, SAMPLES));
    assert_eq!(warm.used(), (2 * SAMPLES, 0), "another launch on the same store reads alone");
    assert!(cold.cache().tap.contains("decoder layer 4"), "{}", cold.cache().tap);
    assert_eq!((cold.cache().stored, cold.cache().total), (SAMPLES, SAMPLES));
    assert!(warm.cache().bytes > 0 && warm.cache().rounding_error == 0.0);
    assert!(cold.steps.iter().all(|(_, generation, _)| *generation == 1));
}

#[test]
fn lora_on_every_layer_keeps_the_image_features() {
    let (cold, warm) = compared(&[]);
    assert!(cold.cache().tap.contains("image features"), "{}", cold.cache().tap);
    assert_eq!((cold.used(), warm.used()), ((SAMPLES, SAMPLES), (2 * SAMPLES, 0)));
}

#[test]
fn a_frozen_model_keeps_its_final_states_and_several_draws_share_them() {
    for repeats in ["expert.repeated_noise=1", "expert.repeated_noise=4"] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let store = format!("cache.dir={}", dir.path().join("store").display());
        let steps = format!("train.steps={}", 2 * EPOCH);
        let run = |name: &str, more: &[&str]| {
            let all: Vec<&str> = [&[steps.as_str(), repeats, "lora=null"], more].concat();
            solo(&spec(&dir.path().join(name), &all))
        };
        let (off, cold) = (run("off", &[]), run("cold", &["cache.mode=exact", &store]));
        assert_eq!(off.losses(), cold.losses(), "{repeats}");
        assert!(off.file("expert.safetensors") == cold.file("expert.safetensors"));
        assert!(cold.cache().tap.contains("final"), "{}", cold.cache().tap);
        assert_eq!(cold.used(), (SAMPLES, SAMPLES));
    }
}

const ROUNDED: &str = "model.activations_dtype=bfloat16";

#[test]
fn activations_in_bfloat16_are_kept_apart_from_those_in_float32_and_change_no_bit_either() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = format!("cache.dir={}", dir.path().join("store").display());
    let steps = format!("train.steps={}", 2 * EPOCH);
    let run = |name: &str, more: &[&str]| {
        let all: Vec<&str> = [&[steps.as_str(), UPPER_LAYERS, &store], more].concat();
        solo(&spec(&dir.path().join(name), &all))
    };
    let wide = run("wide", &["cache.mode=exact"]);
    let off = run("off", &[ROUNDED]);
    let cold = run("cold", &[ROUNDED, "cache.mode=exact"]);
    let warm = run("warm", &[ROUNDED, "cache.mode=exact"]);
    assert_ne!(wide.losses(), off.losses());
    off.assert_same(&cold);
    off.assert_same(&warm);
    assert_eq!(
        (cold.used(), warm.used()),
        ((SAMPLES, SAMPLES), (2 * SAMPLES, 0)),
        "a namespace of their own"
    );
    let again = run("again", &["cache.mode=exact"]);
    wide.assert_same(&again);
    assert_eq!(again.used(), (2 * SAMPLES, 0), "and the other one is as it was");

    // What a layer is handed is a bfloat16 already: half the disk, and still the same bits.
    let narrow = run("narrow", &[ROUNDED, "cache.mode=exact", "cache.dtype=bfloat16"]);
    off.assert_same(&narrow);
    assert_eq!(narrow.cache().rounding_error, 0.0);
}

#[test]
fn activations_in_bfloat16_below_a_tap_of_float32_change_no_bit_either() {
    compared(&[ROUNDED]);
    compared(&[ROUNDED, "expert.repeated_noise=4", "train.recompute=selective"]);
}

#[test]
fn rounded_features_are_close_and_do_not_depend_on_what_was_there() {
    for (dtype, within) in [("bfloat16", 0.01), ("int8", 0.02)] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let store = format!("cache.dir={}", dir.path().join("store").display());
        let dtype = format!("cache.dtype={dtype}");
        let run = |name: &str, more: &[&str]| {
            let all: Vec<&str> = [&["train.steps=6", UPPER_LAYERS], more].concat();
            solo(&spec(&dir.path().join(name), &all))
        };
        let off = run("off", &[]);
        let cold = run("cold", &["cache.mode=exact", &store, &dtype]);
        let warm = run("warm", &["cache.mode=exact", &store, &dtype]);
        cold.assert_same(&warm);
        assert_ne!(off.losses(), cold.losses(), "{dtype} rounds");
        for (a, b) in off.summary.losses.iter().zip(&cold.summary.losses) {
            assert!((a - b).abs() <= within * a.abs(), "{dtype}: {a} and {b}");
        }
        let error = warm.cache().rounding_error;
        assert!(error > 0.0 && error < 0.02, "{dtype}: {error}");
    }
}

#[test]
fn how_samples_are_batched_when_they_are_computed_changes_nothing() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let run = |name: &str, batch: &str| {
        let overrides = ["train.steps=4", UPPER_LAYERS, "cache.mode=exact", batch];
        solo(&spec(&dir.path().join(name), &overrides))
    };
    let one = run("a", "cache.encoder_batch=1");
    one.assert_same(&run("b", "cache.encoder_batch=3"));
    one.assert_same(&run("c", "cache.encoder_batch=64"));
}
