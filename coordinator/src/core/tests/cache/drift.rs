//! Decisions that wait for a measurement of drift.

use super::*;

#[test]
fn what_depends_on_drift_is_not_leased_before_it_is_known() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    assert_eq!(kept.run.machine.run.progress.waits_for_drift(), Some(Step(8)));
    let actions = kept.train(0..8);
    assert_eq!(leases(&actions), [], "nothing beyond step 8");
    let actions = kept.report(drift_of(1, 8, 0.04));
    let why = Cause::Stayed { drift: 0.04, threshold: 0.05 };
    let generation = CacheGeneration { number: 1, since: Step(2) };
    assert_eq!(decided(&actions), [CacheDecision { first: Step(8), generation, why }]);
    assert_eq!(leases(&actions), [(0, 8..12, 1), (0, 12..14, 0), (1, 8..12, 1), (1, 12..14, 0)]);
    kept.train(8..14);
    let actions = kept.report(drift_of(1, 14, 0.06));
    assert_eq!(decided(&actions)[0].generation, CacheGeneration { number: 2, since: Step(14) });
    assert_eq!(kept.cache_phases(2..18), [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2]);
    // The same report again, as after a lost answer.
    assert_eq!(kept.report(drift_of(1, 14, 0.06)), []);
}

#[test]
fn the_old_generation_is_leased_on_while_its_drift_is_measured() {
    let mut kept = Mortal::started(periodic(4, 28, Some(0.05)));
    // Three steps of the second cached phase measure, and the sixth decides.
    let actions = kept.train(0..29);
    let own: Vec<_> = leases(&actions).into_iter().filter(|(rank, ..)| *rank == 0).collect();
    let furthest = own.last().map(|(_, steps, generation)| (steps.end, *generation));
    assert_eq!(furthest, Some((37, 1)), "{own:?}");
    assert_eq!(kept.run.machine.run.progress.waits_for_drift(), Some(Step(37)));
    let actions = kept.train(29..36);
    assert_eq!((decided(&actions), leases(&actions)), (vec![], vec![]));
    let actions = kept.report(drift_of(1, 37, 0.5));
    assert_eq!(decided(&actions)[0].generation, CacheGeneration { number: 2, since: Step(37) });
    kept.train(36..56);
    assert_eq!(kept.cache_phases(30..40), [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]);
    kept.restart_coordinator();
    assert_eq!(kept.cache_phases(30..40), [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]);
}

#[test]
fn a_drift_that_comes_before_the_last_step_is_reported_decides_at_once() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    kept.train(0..7);
    kept.keep(|run| run.steps(0, 7..8));
    let actions = kept.report(drift_of(1, 8, 0.01));
    assert_eq!(decided(&actions).len(), 1);
    let all = [actions, kept.keep(|run| run.steps(1, 7..8))].concat();
    assert_eq!(leases(&all).iter().filter(|(_, steps, _)| *steps == (8..12)).count(), 2);
}

#[test]
fn a_drift_that_does_not_come_is_not_waited_for_for_ever() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    kept.train(0..8);
    let mut all = kept.live(60, WorkerPhase::CacheBuild);
    assert_eq!(decided(&all), [], "somebody is measuring");
    all.extend(kept.live(41, WorkerPhase::Data));
    let [CacheDecision { first, generation, why: Cause::Unmeasured }] = decided(&all)[..] else {
        panic!("{all:?}")
    };
    assert_eq!((first, generation.number), (Step(8), 2));
    assert_eq!(kept.run.machine.run.faults.spent.restarts, 0, "nobody stood still");
    kept.train(8..12);
    assert_eq!(kept.run.committed(), 12);
}

#[test]
fn a_restarted_coordinator_knows_the_same_cache_phases_and_waits_for_the_same_drift() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    kept.report(CacheReport { namespace: "5f".into(), ..report_of(1) });
    kept.train(0..8);
    kept.report(drift_of(1, 8, 0.01));
    kept.train(8..11);
    let before = kept.run.machine.run.progress.cache.book.cache_phases().clone();
    kept.restart_coordinator();
    assert_eq!(*kept.run.machine.run.progress.cache.book.cache_phases(), before);
    let (cache_phase, _) =
        kept.run.machine.run.progress.cache.book.lease_cache_phase(Step(9)).expect("decided");
    let generation = CacheGeneration { number: 1, since: Step(2) };
    assert_eq!(cache_phase, LeaseCachePhase::Cached(CacheKey { generation, namespace: Some("5f".into()) }));
    kept.train(11..14);
    kept.restart_coordinator();
    assert_eq!(kept.run.machine.run.progress.waits_for_drift(), Some(Step(14)));
    let actions = kept.report(drift_of(1, 14, 0.5));
    assert_eq!(decided(&actions)[0].generation.number, 2);
    kept.train(14..18);
    assert_eq!(kept.run.committed(), 18);
}

#[test]
fn a_drift_that_nobody_repeats_to_a_restarted_coordinator_is_given_up_after_the_reunion() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    kept.train(0..8);
    kept.restart_coordinator();
    kept.keep(|run| run.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE }));
    let all = kept.live(31, WorkerPhase::Data);
    assert_eq!(decided(&all).len(), 1);
    assert_eq!(leases(&all).len(), 4);
}

#[test]
fn a_coordinator_that_comes_back_in_sight_of_a_boundary_does_not_give_up_the_drift_before_it() {
    let mut kept = Mortal::started(periodic(20, 30, Some(0.05)));
    kept.train(0..40);
    kept.restart_coordinator();
    kept.keep(|run| run.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE }));
    assert_eq!(kept.run.machine.run.progress.waits_for_drift(), Some(Step(53)));
    let all = kept.live(50, WorkerPhase::Forward);
    assert_eq!(decided(&all), []);
    assert_eq!(decided(&kept.train(40..53)), [], "nothing but the steps before it is waited for");
    let actions = kept.report(drift_of(1, 53, 0.01));
    assert_eq!(decided(&actions).len(), 1);
}

#[test]
fn a_generation_whose_adapter_is_lost_is_not_kept() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    kept.train(0..8);
    let lost = CacheReport { lost: true, ..report_of(1) };
    let actions = kept.report(lost);
    assert_eq!(decided(&actions).iter().map(|decided| decided.why).collect::<Vec<_>>(), [Cause::Lost]);
    assert_eq!(leases(&actions).len(), 4, "nobody waits for a drift that cannot be measured");
}
