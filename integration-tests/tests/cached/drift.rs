//! Drift is measured after the phase change, a few probes a step: nobody waits for it, and what is measured
//! does not depend on when.

use std::path::Path;

use coxswain_proto::run_spec::RunSpec;

use super::{BATCH, Run, resumed, solo, spec};

/// Live for two steps of 24, so that a cached phase has 22 steps: two of them measure, the second and the
/// third, and the fifth may begin a generation where drift decides.
const INTERVAL: u64 = 24;
/// The second cached phase.
const CHANGE: u64 = INTERVAL + 2;
const MEASURED: [u64; 2] = [CHANGE + 1, CHANGE + 2];
const DECIDED: u64 = CHANGE + 4;
const STEPS: u64 = DECIDED + 2;

fn long(output: &Path, more: &[&str]) -> RunSpec {
    let (interval, steps) = (format!("cache.interval.steps={INTERVAL}"), format!("train.steps={STEPS}"));
    let schedule = [
        "cache.mode=periodic",
        &interval,
        "cache.live.steps=2",
        &steps,
        "cache.probe_samples=6",
        "train.checkpoint_every=1",
        "train.keep_checkpoints=99",
    ];
    spec(output, &[&schedule[..], more].concat())
}

/// Two runs over one store: the second finds every feature there, so that it computes none but for what is
/// measured.
fn cold_and_warm(dir: &Path, more: &[&str]) -> [Run; 2] {
    let store = format!("cache.dir={}", dir.join("store").display());
    ["cold", "warm"].map(|name| solo(&long(&dir.join(name), &[&[&*store], more].concat())))
}

#[test]
fn a_cache_phase_of_the_schedule_waits_for_no_probe() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let [cold, warm] = cold_and_warm(dir.path(), &[]);
    cold.assert_same(&warm);
    assert_eq!(warm.used(), ((STEPS - 4) * BATCH, 0));
    assert_eq!(warm.built, MEASURED, "three of six probes in each");
    let [drift] = &warm.cache().drift[..] else { panic!("one measurement: {:?}", warm.cache().drift) };
    assert_eq!((drift.step, drift.generation, drift.probes), (CHANGE, 1, 6));
    assert!(drift.relative_l2 > 0.0 && drift.loss_fresh != drift.loss_cached, "{drift:?}");
    assert_eq!(cold.cache().drift, warm.cache().drift, "computed or found, it is the same");
    // Whether there are probes changes nothing that is learned.
    let [without, _] = cold_and_warm(&dir.path().join("none"), &["cache.probe_samples=0"]);
    without.assert_same(&cold);
}

#[test]
fn drift_decides_while_the_old_generation_goes_on() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let [cold, warm] = cold_and_warm(dir.path(), &["cache.rebuild_above=1e-9"]);
    cold.assert_same(&warm);
    let cache_phases = |run: &Run| run.generations()[INTERVAL as usize..].to_vec();
    assert_eq!(cache_phases(&cold), [0, 0, 1, 1, 1, 1, 2, 2]);
    assert_eq!(warm.built, MEASURED);
    assert_eq!((warm.cache().drift[0].step, warm.cache().generations.clone()), (DECIDED, vec![1, 2]));
    let kept = solo(&long(&dir.path().join("kept"), &["cache.rebuild_above=100.0"]));
    assert_eq!(cache_phases(&kept), [0, 0, 1, 1, 1, 1, 1, 1]);
    // The same adapter at rest, the same probes: what is measured here is what the schedule alone would have
    // found at the phase change.
    let [scheduled, _] = cold_and_warm(&dir.path().join("scheduled"), &[]);
    let moved =
        |run: &Run| run.cache().drift.iter().map(|drift| drift.relative_l2.to_bits()).collect::<Vec<_>>();
    assert_eq!(moved(&scheduled), moved(&cold));
}

#[test]
fn a_measurement_that_was_cut_off_is_made_again_and_nothing_else_differs() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for (name, more) in [("schedule", &[][..]), ("drift", &["cache.rebuild_above=1e-9"])] {
        let spec = long(&dir.path().join(name), more);
        let whole = solo(&spec);
        let (losses, learned) = (whole.losses(), whole.learned());
        let moved = |run: &Run| -> Vec<_> {
            run.cache().drift.iter().map(|drift| (drift.step, drift.relative_l2.to_bits())).collect()
        };
        // At the phase change, between the portions, after the last, where it is decided, and behind that.
        for step in [CHANGE, CHANGE + 1, CHANGE + 2, CHANGE + 3, DECIDED, DECIDED + 1] {
            let again = resumed(&spec, step);
            let what = format!("{name}, resumed at step {step}");
            assert_eq!(losses[step as usize..], again.losses(), "{what}");
            assert!(again.learned() == learned, "{what}");
            assert_eq!(whole.generations()[step as usize..], again.generations(), "{what}");
            let measures = step <= CHANGE + 2 || (name == "drift" && step <= DECIDED);
            assert_eq!(moved(&again), if measures { moved(&whole) } else { vec![] }, "{what}");
        }
    }
}

#[test]
fn features_are_not_filled_ahead_for_a_generation_that_has_not_begun() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let run = |name: &str, batch: &str| {
        let schedule = ["cache.interval.steps=3", "train.steps=12", "train.checkpoint_every=0"];
        let live = ["cache.live.steps=1", "data.prefetch=8", batch];
        solo(&long(&dir.path().join(name), &[&schedule[..], &live].concat()))
    };
    let (one, all) = (run("one", "cache.encoder_batch=1"), run("all", "cache.encoder_batch=64"));
    assert_eq!(one.generations(), [0, 1, 1, 0, 2, 2, 0, 3, 3, 0, 4, 4]);
    one.assert_same(&all);
}
