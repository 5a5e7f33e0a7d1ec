//! Cache phases in leases: which steps take their features from where, also when they are repeated, and what
//! is told of it.

use super::*;

#[test]
fn exact_features_come_from_one_generation_throughout() {
    let exact = Cache { mode: CacheMode::Exact, ..Cache::default() };
    let (mut kept, actions) = Mortal::started_with(cached(2, exact));
    assert_eq!(leases(&actions), [(0, 0..32, 1), (1, 0..32, 1)]);
    kept.train(0..40);
    assert_eq!((decided(&kept.train(40..50)), kept.run.committed()), (vec![], 50));
    let status = kept.run.machine.run.progress.cache_status().expect("there is a cache");
    let states: Vec<_> = status.generations.iter().map(|(entry, state)| (entry.number, *state)).collect();
    assert_eq!((status.serving, states), (1, vec![(1, GenerationState::Building)]));
}

#[test]
fn a_lease_ends_where_the_cache_phase_does() {
    let (mut kept, actions) = Mortal::started_with(cached(2, periodic(4, 10, None)));
    let own: Vec<_> = leases(&actions).into_iter().filter(|(rank, ..)| *rank == 0).collect();
    let cache_phases = [
        (0, 0..4, 0),
        (0, 4..10, 1),
        (0, 10..14, 0),
        (0, 14..20, 2),
        (0, 20..24, 0),
        (0, 24..30, 3),
        (0, 30..32, 0),
    ];
    assert_eq!(own, cache_phases);
    let whys: Vec<_> = decided(&actions).iter().map(|decided| decided.why).collect();
    assert_eq!(whys, [Cause::First, Cause::Schedule, Cause::Schedule]);
    kept.train(0..60);
    assert_eq!(kept.run.committed(), 60);
}

#[test]
fn a_step_with_features_of_another_generation_ends_the_run() {
    let mut kept = Mortal::started(periodic(4, 10, None));
    kept.train(0..4);
    let mut wrong = kept.run.report(0, 4);
    wrong.cache_generation = 0;
    let worker = kept.run.worker(0);
    let actions = kept.run.tell(Ask::Steps(worker, vec![wrong]));
    let told = news(&actions).into_iter().find_map(|news| match news {
        News::Failure(failure, _) => Some(failure.message.clone()),
        _ => None,
    });
    let expected =
        "used no cached features for step 4, but its lease assigns version 1 of the cached features";
    assert_eq!(told.as_deref(), Some(expected));
    assert_eq!(kept.run.phase(), RunPhase::Failed);
}

#[test]
fn steps_that_are_repeated_take_the_same_cache_phases() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    kept.train(0..8);
    kept.report(drift_of(1, 8, 0.5));
    kept.train(8..10);
    let asked = kept.rebuild().0;
    let Ok(Reply::Rebuild(asked)) = asked else { panic!("{asked:?}") };
    let before = kept.cache_phases(0..14);
    // Both workers are lost at once, and the newest checkpoint is at step 4.
    for rank in 0..2 {
        kept.keep(|run| run.kill(rank));
    }
    for rank in 0..2 {
        kept.keep(|run| run.replace(rank, 1));
    }
    let actions = kept.keep(|run| run.start_all(2, 4, StateSource::Checkpoint));
    assert_eq!((kept.run.committed(), decided(&actions)), (4, vec![]));
    assert_eq!(kept.cache_phases(0..14), before);
    assert_eq!(kept.rebuild().0, Ok(Reply::Rebuild(asked)), "it has not begun yet");
    kept.train(4..14);
    assert_eq!(kept.run.committed(), 14);
}

#[test]
fn the_beginning_of_a_live_phase_is_told() {
    let mut kept = Mortal::started(periodic(2, 6, None));
    let told: Vec<_> = kept
        .train(0..14)
        .iter()
        .filter_map(|action| match action {
            Action::Publish(News::Cache(CacheNews::Live(step, generation))) => Some((step.0, *generation)),
            _ => None,
        })
        .collect();
    assert_eq!(told, [(6, Some(1)), (12, Some(2))]);
}
