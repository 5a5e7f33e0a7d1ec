//! What ranks report of a generation, and what the records say of it.

use super::*;

#[test]
fn a_generation_is_complete_once_and_retired_by_the_next() {
    let mut kept = Mortal::started(periodic(2, 6, None));
    let told = |actions: &[Action]| {
        let news = news(actions).into_iter();
        news.filter(|news| matches!(news, News::Cache(CacheNews::Reported(..)))).count()
    };
    let stored = |stored| CacheReport { stored, ..report_of(1) };
    assert_eq!(told(&kept.report(stored(29))), 0);
    assert_eq!(told(&kept.report(stored(30))), 1);
    assert_eq!(told(&kept.report(stored(30))), 0);
    assert_eq!(kept.report(report_of(99)), [], "nobody knows it");
    kept.restart_coordinator();
    let state = |kept: &Mortal, number: u64| {
        let status = kept.run.machine.run.progress.cache_status().expect("there is a cache");
        status.generations.iter().find(|(entry, _)| entry.number == number).map(|(_, state)| *state)
    };
    assert_eq!(state(&kept, 1), Some(GenerationState::Complete));
    kept.train(0..8);
    assert_eq!(
        (state(&kept, 1), state(&kept, 2)),
        (Some(GenerationState::Retired), Some(GenerationState::Building))
    );
}

#[test]
fn what_the_cache_did_is_in_the_records() {
    let mut kept = Mortal::started(periodic(2, 6, None));
    kept.train(0..2);
    let mut all = Vec::new();
    for rank in 0..2 {
        let mut report = kept.run.report(rank, 2);
        report.cache = CacheUse { hits: 1, misses: 3, ..CacheUse::default() };
        let worker = kept.run.worker(rank);
        all.extend(kept.keep(|run| run.tell(Ask::Steps(worker, vec![report]))));
    }
    let step = all.iter().find_map(|action| match action {
        Action::Record(Record::Step(step)) => Some(step.clone()),
        _ => None,
    });
    let step = step.expect("it is committed");
    assert_eq!((step.cache_generation, step.cache.hits, step.cache.misses), (1, 2, 6));
    let entry = kept.run.machine.run.progress.cache.book.entry(1).expect("it serves");
    assert_eq!((entry.used.hits, entry.used.misses), (2, 6));
}
