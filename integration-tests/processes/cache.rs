//! Kept features with real processes: whichever process dies wherever, the bits are those of the undisturbed
//! run, and nothing half written is served.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{
    CoxProcess,
    processes::{coordinator_of, signal, wait_for_coordinator, worker_of},
    read_json,
    tiny::{Tiny, audit, results},
};

const STEPS: u64 = 8;
const CHECKPOINT_EVERY: u64 = 3;

/// Two live steps, two cached ones, and so on: generation 1 serves steps 2 and 3, the next one steps 6 and 7.
const PERIODIC: [&str; 4] =
    ["cache.mode=periodic", "cache.interval.steps=4", "cache.live.steps=2", "cache.probe_samples=4"];
/// Periodic phases in which generation 1 goes on serving, whatever the drift.
const KEPT: [&str; 5] = [PERIODIC[0], PERIODIC[1], PERIODIC[2], PERIODIC[3], "cache.rebuild_above=1000.0"];

/// Where rank 1 stands when something happens to it: in a live step, at the phase change, while it computes
/// features, in a cached step, in the live step after that, and where the second cached phase begins.
const PLACES: [(&str, u64); 6] = [
    ("backward", 1),
    ("cachebuild", 2),
    ("communication", 2),
    ("backward", 3),
    ("forward", 5),
    ("cachebuild", 6),
];

fn tiny() -> Tiny {
    Tiny::new(STEPS, CHECKPOINT_EVERY)
}

/// What the run leaves when nothing happens; trained once for all tests of this process.
fn undisturbed(flags: &[&str]) -> Vec<Vec<u8>> {
    static TRAINED: Mutex<Option<HashMap<String, Vec<Vec<u8>>>>> = Mutex::new(None);
    let mut trained = TRAINED.lock().unwrap_or_else(PoisonError::into_inner);
    let train = || {
        let tiny = tiny();
        let (status, printed) = tiny.start(flags).finish();
        assert!(status.success(), "{printed}");
        results(&tiny.output())
    };
    trained.get_or_insert_default().entry(flags.concat()).or_insert_with(train).clone()
}

/// Waits for the end; everything learned must be as without the fault, and no sample lost or trained on
/// twice.
fn assert_as_undisturbed(tiny: &Tiny, running: CoxProcess, flags: &[&str], what: &str) -> String {
    let (status, printed) = running.finish();
    assert!(status.success(), "{what}: {status}\n{printed}");
    assert!(results(&tiny.output()) == undisturbed(flags), "{what}: something else was learned\n{printed}");
    let audit = audit(&tiny.output());
    assert_eq!(
        (&audit["missing"], &audit["duplicate"]),
        (&0.into(), &0.into()),
        "{what}: {audit:#}\n{printed}"
    );
    printed
}

fn cache(output: &Path) -> Value {
    read_json(&output.join("summary.json"))["cache"].clone()
}

#[test]
fn two_processes_with_exact_features_learn_what_two_without_learn() {
    let tiny = tiny();
    tiny.assert_undisturbed(tiny.start(&["cache.mode=exact"]), "exact");
    let cache = cache(&tiny.output());
    assert_eq!(cache["hits"].as_u64().zip(cache["misses"].as_u64()), Some((0, 32)), "{cache:#}");
}

#[test]
fn a_second_launch_finds_what_the_first_has_computed() {
    let (first, second) = (tiny(), tiny());
    let store = format!("cache.dir={}", first.output().join("store").display());
    let flags = [&PERIODIC[..], &[&store]].concat();
    let printed = assert_as_undisturbed(&first, first.start(&flags), &PERIODIC, "the first");
    for line in [
        "from step 2 on, features are read from cache version 1",
        "from step 4 on, features are computed live",
        "features have moved by",
    ] {
        assert!(printed.contains(line), "{line}:\n{printed}");
    }
    assert_as_undisturbed(&second, second.start(&flags), &PERIODIC, "the second");
    let (first, second) = (cache(&first.output()), cache(&second.output()));
    // Probes that generation 2 begins with are there when a step needs them.
    let used = first["hits"].as_u64().zip(first["misses"].as_u64()).expect("counts");
    assert!(used.0 + used.1 == 16 && used.0 <= 4, "{first:#}");
    assert_eq!((&second["hits"], &second["misses"]), (&16.into(), &0.into()), "{second:#}");
    assert_eq!(first["drift"], second["drift"]);
}

#[test]
fn a_worker_killed_at_any_cache_phase_costs_nothing() {
    for flags in [&PERIODIC[..], &KEPT] {
        for (phase, step) in PLACES {
            let what =
                format!("kill -9 in {phase} of step {step}, {}", flags.last().expect("there are some"));
            let tiny = tiny();
            let held = tiny.hold(1, phase, step);
            let mut running = tiny.start(flags);
            held.wait(&mut running);
            signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
            assert_as_undisturbed(&tiny, running, flags, &what);
        }
    }
}

/// What was measured of features. The losses beside it are under the expert of whatever step measured.
fn moved(output: &Path) -> Vec<[Value; 5]> {
    let cache = cache(output);
    let fields = ["step", "generation", "relative_l2", "cosine", "probes"];
    let of = |drift: &Value| fields.map(|field| drift[field].clone());
    cache["drift"].as_array().expect("an array").iter().map(of).collect()
}

#[test]
fn a_worker_or_the_coordinator_killed_while_drift_is_measured_changes_nothing() {
    // Cached phases of eight steps: one of them measures, the second, and the fourth may begin a generation
    // where drift decides.
    let long =
        ["cache.mode=periodic", "cache.interval.steps=10", "cache.live.steps=2", "cache.probe_samples=4"];
    let decides = [&long[..], &["cache.rebuild_above=1e-9"]].concat();
    let tiny = || Tiny::new(17, CHECKPOINT_EVERY);
    for flags in [&long[..], &decides] {
        let undisturbed = tiny();
        let (status, printed) = undisturbed.start(flags).finish();
        assert!(status.success(), "{printed}");
        let drift = moved(&undisturbed.output());
        assert_eq!(drift.len(), 1, "{printed}");
        for (phase, step) in [("cachebuild", 13), ("communication", 13), ("forward", 14), ("backward", 15)] {
            for rank in [Some(1), None] {
                let what =
                    format!("{phase} of step {step}, {rank:?} killed, {}", flags.last().expect("some"));
                let tiny = tiny();
                let held = tiny.hold(1, phase, step);
                let mut running = tiny.start(flags);
                held.wait(&mut running);
                match rank {
                    Some(rank) => signal(worker_of(running.pid(), rank).expect("it lives"), Signal::SIGKILL),
                    None => {
                        let coordinator = coordinator_of(running.pid()).expect("it lives");
                        signal(coordinator, Signal::SIGKILL);
                        wait_for_coordinator(running.pid(), coordinator);
                        held.release();
                    }
                }
                let (status, printed) = running.finish();
                assert!(status.success(), "{what}: {status}\n{printed}");
                assert!(results(&tiny.output()) == results(&undisturbed.output()), "{what}\n{printed}");
                assert!(printed.contains("features have moved by"), "{what}\n{printed}");
                assert_eq!(moved(&tiny.output()), drift, "{what}\n{printed}");
            }
        }
    }
}

#[test]
fn both_workers_killed_at_once_find_their_generation_in_checkpoint_and_store() {
    for flags in [&PERIODIC[..], &KEPT] {
        for (phase, step) in [("backward", 3), ("forward", 5), ("cachebuild", 6), ("backward", 7)] {
            let what = format!("both killed in {phase} of step {step}");
            let tiny = tiny();
            let held = tiny.hold(1, phase, step);
            let mut running = tiny.start(flags);
            held.wait(&mut running);
            for rank in [0, 1] {
                signal(worker_of(running.pid(), rank).expect("it lives"), Signal::SIGKILL);
            }
            assert_as_undisturbed(&tiny, running, flags, &what);
        }
    }
}

#[test]
fn a_coordinator_killed_at_a_cache_phase_decides_as_before() {
    for flags in [&PERIODIC[..], &KEPT] {
        for (phase, step) in [("cachebuild", 2), ("cachebuild", 6)] {
            let tiny = tiny();
            let held = tiny.hold(1, phase, step);
            let mut running = tiny.start(flags);
            held.wait(&mut running);
            let coordinator = coordinator_of(running.pid()).expect("it lives");
            signal(coordinator, Signal::SIGKILL);
            wait_for_coordinator(running.pid(), coordinator);
            held.release();
            let what = format!("kill -9 of the coordinator in {phase} of step {step}");
            assert_as_undisturbed(&tiny, running, flags, &what);
        }
    }
}

#[test]
fn a_worker_killed_while_it_computes_features_leaves_nothing_half_written_behind() {
    let tiny = tiny();
    let store = tiny.output().join("store");
    let flag = format!("cache.dir={}", store.display());
    let flags = ["cache.mode=exact", &flag];
    let held = tiny.hold(1, "cachebuild", 1);
    let mut running = tiny.start(&flags);
    held.wait(&mut running);
    signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
    tiny.assert_undisturbed(running, "kill -9 while features are computed");
    let again = self::tiny();
    again.assert_undisturbed(again.start(&flags), "a launch on the store that was left behind");
    let cache = cache(&again.output());
    // Of the part that the worker had begun nothing is left: the two samples of its first step, and no
    // others, are computed again.
    assert_eq!((&cache["hits"], &cache["misses"]), (&30.into(), &2.into()), "{cache:#}");
}

/// What `cox` answers about a run that goes on.
fn ask(tiny: &Tiny, arguments: &[&str]) -> Value {
    let answer =
        crate::support::cox(arguments).arg("--run").arg(tiny.output()).output().expect("cox was built");
    assert!(answer.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&answer.stderr));
    serde_json::from_slice(&answer.stdout).expect("one JSON object")
}

#[test]
fn a_generation_is_seen_to_grow_while_it_is_filled() {
    let tiny = tiny();
    // Two steps of four samples are done, and no part is published before the epoch ends.
    let held = tiny.hold(1, "communication", 2);
    let mut running = tiny.start(&["cache.mode=exact"]);
    held.wait(&mut running);
    let deadline = Instant::now() + Duration::from_secs(30);
    let generation = loop {
        let generation = ask(&tiny, &["status", "--json"])["cache"]["generations"][0].clone();
        if generation["stored"].as_u64() > Some(0) || Instant::now() > deadline {
            break generation;
        }
    };
    assert_eq!(
        (&generation["state"], &generation["total"]),
        (&"building".into(), &192.into()),
        "{generation:#}"
    );
    assert!((1..=8).contains(&generation["stored"].as_u64().unwrap_or(0)), "{generation:#}");
    held.release();
    tiny.assert_undisturbed(running, "a run that was asked for its status");
}

#[test]
fn a_rebuild_that_is_asked_for_begins_where_the_leases_end_and_is_in_the_journal() {
    let tiny = tiny();
    // Rank 1 stands still in the live phase; what follows it waits for a drift, so nobody holds a lease of
    // it.
    let held = tiny.hold(1, "backward", 4);
    let mut running = tiny.start(&KEPT);
    held.wait(&mut running);
    let ask = |arguments: &[&str]| ask(&tiny, arguments);
    let asked = ask(&["rebuild-cache", "--json"]);
    assert_eq!((&asked["generation"], &asked["from_step"]), (&2.into(), &6.into()), "{asked}");
    assert_eq!(ask(&["rebuild-cache", "--json"]), asked, "asking twice is asking once");
    let status = ask(&["status", "--json"])["cache"].clone();
    assert_eq!(status["generations"].as_array().map(Vec::len), Some(2), "{status:#}");
    held.release();
    let (ended, printed) = running.finish();
    assert!(ended.success(), "{printed}");
    let told = "from step 6 on, steps use version 2 of the cached features: a rebuild was requested";
    assert!(printed.contains(told), "{printed}");
    let ranges = audit(&tiny.output())["cache"].clone();
    let cache_phases: Vec<_> =
        ranges.as_array().expect("an array").iter().map(|range| range["generation"].clone()).collect();
    assert_eq!(cache_phases, [0, 1, 0, 2], "{ranges:#}");
}
