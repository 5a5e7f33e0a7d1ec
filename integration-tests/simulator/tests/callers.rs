//! Callers that must not get in the way of a run: those of another version, and those who only read.

use coxswain_coordinator::Outcome;
use coxswain_simulator::{
    play,
    script::{Fault, Kind, Script},
    seeds,
};

/// Seeds that failed once, and must not again.
///
/// ```text
/// 10530557671442717247   readers were read faster than the coordinator reads them
/// 12018457415793916701   two ranks hang alike, one after the other, after the first was announced as lost
/// ```
const FAILED_ONCE: [u64; 2] = [10_530_557_671_442_717_247, 12_018_457_415_793_916_701];

/// A run of two machines without any fault.
fn quiet() -> Script {
    let script = Script::drawn(0);
    Script {
        min_nodes: None,
        nodes: 2,
        workers_per_node: 2,
        steps: 100,
        step_ms: 100.0,
        checkpoint_every: 10,
        max_restarts: 3,
        cache: None,
        faults: Vec::new(),
        ..script
    }
}

fn fault(at_s: f64, what: Kind, node: u32) -> Fault {
    Fault { at_s, what, rank: 0, node, for_s: 1.0, factor: 2.0, phase: None }
}

#[test]
fn no_flood_of_readers_loses_a_worker_or_keeps_one_waiting() {
    let mut script = quiet();
    script.faults = vec![Fault { for_s: 6.0, factor: 260.0, ..fault(2.0, Kind::Flood, 0) }];
    let report = play(&script);
    assert!(report.violations.is_empty(), "{report}");
    assert_eq!((report.restarts, report.recoveries.len(), report.repeated), (0, 0, 0), "{report}");
    let told = |text| report.told(text).is_some();
    assert!(told("readers go: ") && !told(": 0 answered") && !told(" 0 refused"), "{report}");
    let undisturbed = play(&Script { faults: Vec::new(), ..script });
    assert!(report.took.as_secs_f64() < undisturbed.took.as_secs_f64() * 1.1, "{report}");
}

#[test]
fn floods_of_readers_break_nothing_whatever_else_happens() {
    let all = FAILED_ONCE.into_iter().chain(seeds::derived(0..500));
    seeds::play_all(all, Script::drawn_with_floods, seeds::finishes_or_is_given_up);
}

#[test]
fn a_launcher_of_another_version_is_refused_by_name_and_the_run_waits_for_the_right_one() {
    let mut script = quiet();
    script.faults = vec![fault(6.0, Kind::UpgradeLauncher, 1)];
    let report = play(&script);
    assert!(report.violations.is_empty() && report.has_finished(), "{report}");
    let refused = "the launcher of node 1 ends: this is cox 0.2.0, but the coordinator is cox 0.1.0";
    assert!(report.told(refused).is_some(), "{report}");
}

#[test]
fn a_coordinator_of_another_version_goes_on_with_no_worker_of_the_one_before() {
    let mut script = quiet();
    script.faults = vec![fault(6.0, Kind::UpgradeLauncher, 0)];
    let report = play(&script);
    assert!(report.violations.is_empty() && report.has_finished(), "{report}");
    let refused = "the launcher of node 1 ends: this is cox 0.1.0, but the coordinator is cox 0.2.0";
    assert!(report.told(refused).is_some(), "{report}");
    assert!(report.repeated < 20, "it goes on from the newest checkpoint:\n{report}");
}

#[test]
fn no_seed_with_two_versions_has_a_world_of_both() {
    let (mut finished, mut refused) = (0, 0);
    seeds::play_all(seeds::derived(0..500), Script::drawn_with_versions, |report| {
        finished += u32::from(report.has_finished());
        refused += u32::from(report.told("the coordinator is cox").is_some());
        report.has_finished() || matches!(report.outcome, Some(Outcome::Failed(_)))
    });
    assert!(
        finished > 350 && refused > 150 || seeds::is_one(),
        "{finished} have finished, {refused} refused"
    );
}
