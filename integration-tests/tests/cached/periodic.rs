//! `cache.mode: periodic`: LoRA trains in live phases alone, and what happened to be stored changes nothing.

use std::{collections::BTreeMap, path::Path};

use coxswain_proto::run_spec::RunSpec;
use safetensors::SafeTensors;

use super::{BATCH, EPOCH, Run, SAMPLES, resumed, solo, spec, use_of};

/// Live for three steps of eight, so that phases end within epochs, too.
fn periodic(output: &Path, more: &[&str]) -> RunSpec {
    let schedule = [
        "cache.mode=periodic",
        "cache.interval.steps=8",
        "cache.live.steps=3",
        "train.steps=18",
        "cache.probe_samples=6",
    ];
    spec(output, &[&schedule[..], more].concat())
}

/// How many samples are first records of a generation that begins where drift was measured.
const PROBES: u64 = 6;

const CACHE_PHASES: [u64; 18] = [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 2, 2, 0, 0];

/// Bits of all tensors of a checkpoint whose names contain `text`: weights and both moments.
fn tensors(run: &Run, step: u64, text: &str) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for file in ["trainables.safetensors", "optimizer-rank0000-of-0001.safetensors"] {
        let bytes = run.file(&format!("checkpoints/step-{step:08}/{file}"));
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let mine = tensors.iter().filter(|(name, _)| name.contains(text));
        found.extend(mine.map(|(name, view)| (name.to_owned(), view.data().to_vec())));
    }
    assert!(!found.is_empty(), "nothing named {text}");
    found
}

#[test]
fn the_adapter_moves_in_live_steps_and_rests_with_its_moments_in_cached_ones() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let every = ["train.checkpoint_every=1", "train.keep_checkpoints=99"];
    let run = solo(&periodic(dir.path(), &every));
    assert_eq!(run.generations(), CACHE_PHASES);
    for step in 1..18 {
        let cached = CACHE_PHASES[step as usize] > 0;
        let moved = |text: &str| tensors(&run, step, text) != tensors(&run, step + 1, text);
        assert_eq!(moved("lora_"), !cached, "LoRA in step {step}");
        assert!(moved("expert.") && moved("sensor."), "expert and sensor in step {step}");
    }
    assert_eq!(use_of(&run, 0..3), (0, 0), "live steps ask for no features");
    let (hits, misses) = use_of(&run, 3..8);
    assert_eq!((hits + misses, misses), (5 * BATCH, SAMPLES), "every sample is computed once");
    assert_eq!(run.cache().generations, [1, 2]);
}

#[test]
fn the_adapters_schedule_may_run_over_its_live_steps_alone() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let shape = ["optimizer.schedule=linear", "optimizer.warmup_steps=1", "optimizer.min_lr_ratio=0"];
    let over_live = [&shape[..], &["optimizer.schedule_over=live"]].concat();
    let all = solo(&periodic(&dir.path().join("all"), &shape));
    let live = solo(&periodic(&dir.path().join("live"), &over_live));
    let in_live_steps = |run: &Run| -> Vec<f64> {
        let rates = run.rates.iter().zip(CACHE_PHASES);
        rates.filter(|(_, generation)| *generation == 0).map(|(rate, _)| rate / 1e-3).collect()
    };
    // Eight of the eighteen steps are live: one of warm-up, and a line over the other seven.
    let due = [0.5, 1.0, 6.0 / 7.0, 5.0 / 7.0, 4.0 / 7.0, 3.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0];
    for (found, due) in in_live_steps(&live).into_iter().zip(due) {
        assert!((found - due).abs() < 1e-12, "{found} for {due}");
    }
    assert!((in_live_steps(&all)[7] - 1.0 / 17.0).abs() < 1e-12, "{:?}", all.rates);
    assert_ne!(all.losses(), live.losses());
}

#[test]
fn a_cold_store_and_a_warm_one_give_the_same_bits() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for dtype in ["float32", "int8"] {
        let dtype_key = format!("cache.dtype={dtype}");
        let store = format!("cache.dir={}", dir.path().join("store").display());
        let run =
            |name: &str| solo(&periodic(&dir.path().join(format!("{dtype}-{name}")), &[&store, &dtype_key]));
        let (cold, warm) = (run("cold"), run("warm"));
        cold.assert_same(&warm);
        let computed = 2 * SAMPLES - PROBES;
        assert_eq!(cold.used(), (10 * BATCH - computed, computed), "{dtype}: what was probed is there");
        assert_eq!(warm.used(), (10 * BATCH, 0), "{dtype}");
    }
}

#[test]
fn drift_is_measured_where_a_live_phase_ends_and_told() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let run = solo(&periodic(dir.path(), &[]));
    let [drift] = &run.cache().drift[..] else { panic!("one measurement: {:?}", run.cache().drift) };
    assert_eq!((drift.step, drift.generation, drift.probes), (11, 1, 6));
    assert!(drift.relative_l2 > 0.0 && drift.relative_l2 < 1.0 && drift.cosine > 0.5, "{drift:?}");
    assert!(drift.loss_fresh > 0.0 && drift.loss_fresh != drift.loss_cached, "{drift:?}");
    assert_eq!(run.notes_with("features have moved by"), 1, "{:?}", run.notes);
    assert_eq!(run.notes_with("features are read from cache version 2"), 1, "{:?}", run.notes);
}

#[test]
fn a_generation_that_is_kept_computes_what_is_missing_with_its_own_adapter() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let keep = ["cache.rebuild_above=100.0"];
    let whole = solo(&periodic(&dir.path().join("a"), &keep));
    assert_eq!(whole.generations().iter().max(), Some(&1), "little drift keeps the generation");
    assert_eq!(whole.used(), (10 * BATCH - SAMPLES, SAMPLES));
    // Without a place to store anything, all of it is computed every time, with the adapter of then.
    let never = solo(&periodic(&dir.path().join("b"), &[&keep[..], &["cache.budget=1"]].concat()));
    assert_eq!(never.used(), (0, 10 * BATCH));
    assert_eq!(never.notes_with("cache.budget"), 1, "{:?}", never.notes);
    whole.assert_same(&never);
    let rebuilt = solo(&periodic(&dir.path().join("c"), &[]));
    assert_ne!(whole.losses(), rebuilt.losses(), "a new generation has other features");
}

#[test]
fn a_run_resumed_anywhere_ends_with_the_same_bits() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let every = ["train.checkpoint_every=1", "train.keep_checkpoints=99"];
    let spec = periodic(dir.path(), &every);
    let whole = solo(&spec);
    let (losses, learned) = (whole.losses(), whole.learned());
    // In a live phase, at the phase change, in a cached phase, at its end.
    for step in [2, 3, 5, 8, 11, 14] {
        let again = resumed(&spec, step);
        assert_eq!(losses[step as usize..], again.losses(), "resumed at step {step}");
        assert!(again.learned() == learned, "resumed at step {step}");
        assert_eq!(again.used().1, 0, "everything was there when it resumed at step {step}");
    }
}

#[test]
fn a_run_resumed_anywhere_keeps_the_generation_that_little_drift_keeps() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let every = ["train.checkpoint_every=1", "train.keep_checkpoints=99", "cache.rebuild_above=100.0"];
    let spec = periodic(dir.path(), &every);
    let whole = solo(&spec);
    // In the cached phase, in the live phase after it, where it is decided, and after that.
    for step in [5, 9, 11, 13] {
        let again = resumed(&spec, step);
        assert_eq!(whole.generations()[step as usize..], again.generations(), "resumed at step {step}");
        assert_eq!(whole.losses()[step as usize..], again.losses(), "resumed at step {step}");
        assert_eq!(again.used().1, 0, "everything was there when it resumed at step {step}");
    }
}

#[test]
fn several_draws_share_a_feature() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = format!("cache.dir={}", dir.path().join("store").display());
    let run = |name: &str| solo(&periodic(&dir.path().join(name), &[&store, "expert.repeated_noise=4"]));
    let (cold, warm) = (run("cold"), run("warm"));
    cold.assert_same(&warm);
    assert_eq!((cold.used().1, warm.used().1), (2 * SAMPLES - PROBES, 0));
    assert_eq!(EPOCH, 4, "the schedule above cuts epochs");
}
