//! Tables of cache phases: by behaviour, and by any history of decisions and requests.

use proptest::prelude::*;

use super::*;
use crate::run_spec::Span;

const ALL: Step = Step(u64::MAX);

fn table(live: u64, interval: u64, above: Option<f64>) -> CachePhaseTable {
    let steps = |steps| Span { epochs: None, steps: Some(steps) };
    let cache = Cache {
        mode: CacheMode::Periodic,
        interval: steps(interval),
        live: steps(live),
        rebuild_above: above,
        rebuild_below: above.map(|above| above / 2.0),
        ..Cache::default()
    };
    CachePhaseTable { schedule: Some(CacheSchedule { interval, live }), ..CachePhaseTable::new(&cache, None) }
}

fn evidence(relative_l2: f64) -> Evidence {
    let drift = Drift { relative_l2, cosine: 1.0, loss_fresh: 1.0, loss_cached: 1.0 };
    Evidence { drift: Some(drift), ..Evidence::default() }
}

/// Decides about everything below `until`, without waiting for anything.
fn fill(table: &mut CachePhaseTable, until: u64) {
    let now = Evidence { given_up: true, ..Evidence::default() };
    while let Some(at) = table.undecided(Step(0), Step(until)) {
        table.decide(at, &now).expect("it is given up to wait");
    }
}

fn numbers(table: &CachePhaseTable, steps: std::ops::Range<u64>) -> Vec<u64> {
    steps.map(|step| table.cache_phase(Step(step)).expect("decided").number()).collect()
}

#[test]
fn without_a_cache_all_is_live_and_exact_has_one_generation() {
    let off = CachePhaseTable::new(&Cache::default(), None);
    assert_eq!(
        (off.cache_phase(Step(9)), off.end(Step(9))),
        (Some(StepCachePhase::Live { kept: None }), ALL)
    );
    let exact = CachePhaseTable::new(&Cache { mode: CacheMode::Exact, ..Cache::default() }, None);
    let generation = CacheGeneration { number: 1, since: Step(0) };
    assert_eq!(
        (exact.cache_phase(Step(9)), exact.end(Step(9))),
        (Some(StepCachePhase::Cached(generation)), ALL)
    );
    assert_eq!(exact.undecided(Step(0), ALL), None);
}

#[test]
fn a_cached_phase_is_undecided_until_it_is_decided() {
    let mut table = table(2, 5, None);
    assert_eq!(table.undecided(Step(0), Step(2)), None);
    assert_eq!(table.undecided(Step(0), Step(9)), Some(Step(2)));
    let first = table.decide(Step(2), &Evidence::default()).expect("nothing is to wait for");
    assert_eq!((first.generation.number, first.why, first.begins()), (1, Cause::First, true));
    assert_eq!(table.decide(Step(2), &Evidence::default()), None, "it is decided");
    assert_eq!(table.undecided(Step(0), Step(9)), Some(Step(7)));
    assert_eq!(table.decide(Step(7), &Evidence::default()).map(|second| second.why), Some(Cause::Schedule));
    assert_eq!(numbers(&table, 0..12), [0, 0, 1, 1, 1, 0, 0, 2, 2, 2, 0, 0]);
    let kept = Some(CacheGeneration { number: 1, since: Step(2) });
    assert_eq!(table.cache_phase(Step(6)), Some(StepCachePhase::Live { kept }));
}

#[test]
fn drift_decides_with_hysteresis_and_is_waited_for() {
    let mut table = table(1, 2, Some(0.1));
    table.decide(Step(1), &Evidence::default()).expect("the first needs no drift");
    assert_eq!(table.decide(Step(3), &Evidence::default()), None, "the drift is not known");
    assert!(table.asks_for_drift(Step(3)) && !table.asks_for_drift(Step(1)));
    let mut decide = |at, drift| table.decide(Step(at), &evidence(drift)).expect("decided");
    let kept = decide(3, 0.1);
    assert_eq!((kept.generation, kept.begins()), (CacheGeneration { number: 1, since: Step(1) }, false));
    assert!(matches!(kept.why, Cause::Stayed { .. }));
    assert_eq!(decide(5, 0.2).generation.number, 2);
    assert_eq!(decide(7, 0.08).why, Cause::Moved { drift: 0.08, threshold: 0.05 }, "restless");
    assert_eq!(decide(9, 0.04).generation.number, 3);
    assert_eq!(decide(11, 0.08).generation.number, 3, "calm again");
    assert_eq!(decide(13, f64::NAN).why, Cause::Unmeasured);
}

#[test]
fn the_old_generation_goes_on_while_drift_is_measured_after_the_cache_phase() {
    // Live for 4 steps of 36: drift is measured in the four steps after the first cached one, and decides
    // from the seventh on.
    let mut table = table(4, 36, Some(0.1));
    fill(&mut table, 36);
    assert_eq!(
        numbers(&table, 0..36),
        [[0; 4].as_slice(), &[1; 32]].concat(),
        "nothing goes on before the first"
    );
    assert_eq!(table.undecided(Step(36), Step(72)), Some(Step(46)));
    assert_eq!(numbers(&table, 36..46), [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
    assert_eq!(
        (table.end(Step(36)), table.end(Step(40)), table.end(Step(45))),
        (Step(40), Step(46), Step(46))
    );
    assert!(table.asks_for_drift(Step(46)) && !table.asks_for_drift(Step(40)));
    assert_eq!(table.decide(Step(46), &Evidence::default()), None, "the drift is not known");
    let mut kept = table.clone();
    let stays = kept.decide(Step(46), &evidence(0.01)).expect("decided");
    assert_eq!((stays.generation.number, stays.begins()), (1, false));
    assert_eq!((numbers(&kept, 46..72), kept.end(Step(46))), (vec![1; 26], Step(72)));
    let begins = table.decide(Step(46), &evidence(0.5)).expect("decided");
    assert_eq!((begins.generation, begins.begins()), (CacheGeneration { number: 2, since: Step(46) }, true));
    assert_eq!(numbers(&table, 40..50), [1, 1, 1, 1, 1, 1, 2, 2, 2, 2]);
}

#[test]
fn a_request_while_drift_is_measured_makes_the_measurement_pointless() {
    let mut table = table(4, 36, Some(0.1));
    fill(&mut table, 36);
    let (asked, new) = table.ask(Step(38), Step(42), Step(200)).expect("steps are left");
    assert_eq!((asked.first, asked.generation.number, new), (Step(42), 2, true));
    assert_eq!(numbers(&table, 40..50), [1, 1, 2, 2, 2, 2, 2, 2, 2, 2]);
    assert_eq!((table.undecided(Step(36), Step(72)), table.end(Step(42))), (None, Step(72)));
    assert_eq!(table.decide(Step(46), &evidence(0.5)), None, "it is decided");
}

#[test]
fn a_generation_whose_adapter_is_lost_is_not_kept() {
    let mut table = table(1, 2, Some(0.1));
    fill(&mut table, 2);
    let decided = table.decide(Step(3), &Evidence { lost: true, ..evidence(0.0) }).expect("decided");
    assert_eq!((decided.why, decided.generation.number), (Cause::Lost, 2));
}

#[test]
fn a_phase_that_is_entered_in_its_middle_has_its_own_generation() {
    let mut table = table(2, 8, Some(0.1));
    assert_eq!(table.undecided(Step(5), Step(9)), Some(Step(5)));
    let decided = table.decide(Step(5), &Evidence::default()).expect("nobody measures here");
    assert_eq!((decided.first, decided.why), (Step(5), Cause::First));
    assert_eq!(table.cache_phase(Step(4)), None);
}

#[test]
fn a_request_takes_effect_in_a_cached_phase_at_once_and_in_a_live_one_where_it_ends() {
    let mut table = table(2, 8, None);
    fill(&mut table, 8);
    let (asked, new) = table.ask(Step(3), Step(5), Step(100)).expect("steps are left");
    assert_eq!((asked.first, asked.generation.number, asked.why, new), (Step(5), 2, Cause::Asked, true));
    assert_eq!(numbers(&table, 2..8), [1, 1, 1, 2, 2, 2]);
    assert_eq!(table.end(Step(3)), Step(5));
    assert_eq!(table.ask(Step(5), Step(7), Step(100)), Some((asked, false)), "it has not begun");
    let (next, _) = table.ask(Step(6), Step(9), Step(100)).expect("steps are left");
    assert_eq!((next.first, next.generation.number), (Step(10), 3));
    assert_eq!(table.ask(Step(11), Step(16), Step(17)), None, "the run ends live");
}

#[test]
fn a_request_after_a_rollback_changes_no_cache_phase_that_may_have_been_run() {
    let mut table = table(2, 8, None);
    fill(&mut table, 24);
    let before = numbers(&table, 0..24);
    let (planned, new) = table.ask(Step(3), Step(5), Step(100)).expect("steps are left");
    assert_eq!((planned.first, planned.why, new), (Step(18), Cause::Schedule, false), "it begins one anyway");
    assert_eq!(numbers(&table, 0..24), before);
    let (asked, _) = table.ask(Step(19), Step(21), Step(100)).expect("steps are left");
    assert_eq!((asked.first, asked.generation.number), (Step(21), 4));
    assert_eq!(numbers(&table, 0..21), before[..21]);
}

proptest! {
    #[test]
    fn any_table_gives_each_step_one_cache_phase_and_is_rebuilt_from_its_decisions(
        live in 1u64..6, rest in 1u64..40, above in prop::option::of(0.05f64..0.2),
        moves in prop::collection::vec((0u64..60, 0u64..40, 0u8..4, 0.0f64..0.3), 1..40),
    ) {
        let mut table = table(live, live + rest, above);
        let mut copy = table.clone();
        let mut newest = 0;
        for (committed, ahead, kind, drift) in moves {
            let mut record = |decided: CacheDecision, newest: &mut u64| {
                if decided.begins() {
                    assert!(decided.generation.number > *newest, "numbers grow");
                    *newest = decided.generation.number;
                }
                copy.insert(decided);
            };
            let (from, until) = (Step(committed), Step(committed + ahead));
            if kind == 0
                && let Some((decided, true)) = table.ask(from, until, Step(1000))
            {
                prop_assert!(decided.first >= until);
                record(decided, &mut newest);
            }
            while let Some(at) = table.undecided(from, until) {
                let now = Evidence { given_up: kind == 1, lost: kind == 2, ..evidence(drift) };
                let decided = table.decide(at, &now).expect("there is a drift");
                prop_assert_eq!(decided.first, at);
                record(decided, &mut newest);
            }
            prop_assert_eq!(&copy, &table);
            for step in from.0..until.0 {
                let cache_phase = table.cache_phase(Step(step));
                prop_assert!(cache_phase.is_some());
                let live = table.schedule.is_some_and(|schedule| schedule.cache_phase(Step(step)) == CachePhaseKind::Live);
                prop_assert_eq!(cache_phase.map(|cache_phase| cache_phase.number() == 0), Some(live));
                if let Some(StepCachePhase::Cached(generation)) = cache_phase {
                    prop_assert!(generation.since.0 <= step && generation.number <= newest);
                }
                // Within a cache phase nothing changes; at its end it may.
                if Step(step + 1) < table.end(Step(step)) && step + 1 < until.0 {
                    prop_assert_eq!(table.cache_phase(Step(step + 1)), cache_phase);
                }
            }
        }
    }
}
