//! Requests for a new generation: where it begins, and where they have no meaning.

use super::*;

#[test]
fn a_request_begins_a_generation_where_nobody_holds_a_lease_yet() {
    let mut kept = Mortal::started(periodic(2, 60, None));
    kept.train(0..5);
    let (reply, actions) = kept.rebuild();
    let Ok(Reply::Rebuild(asked)) = reply else { panic!("{reply:?}") };
    assert_eq!((asked.first, asked.generation.number, asked.why), (Step(32), 2, Cause::Asked));
    assert_eq!(decided(&actions), [asked]);
    assert_eq!(kept.rebuild(), (Ok(Reply::Rebuild(asked)), vec![]), "asking twice is asking once");
    kept.restart_coordinator();
    assert_eq!(kept.rebuild(), (Ok(Reply::Rebuild(asked)), vec![]), "also of another coordinator");
    kept.train(5..40);
    assert_eq!(kept.cache_phases(30..34), [1, 1, 2, 2]);
    let later = kept.rebuild().0;
    assert!(matches!(later, Ok(Reply::Rebuild(next)) if next.generation.number > 2), "{later:?}");
}

/// Two workers that have committed twenty steps and are lost together, so that what comes next repeats steps
/// from the checkpoint at step 4 on; and the first step that nobody had a lease of before.
fn rolled_back() -> (Mortal, Step) {
    let mut kept = Mortal::started(periodic(2, 60, None));
    kept.train(0..20);
    let leased = kept.run.machine.run.progress.course().map(|course| course.leases.end()).expect("it trains");
    for rank in 0..2 {
        kept.keep(|run| run.kill(rank));
    }
    for rank in 0..2 {
        kept.keep(|run| run.replace(rank, 1));
    }
    kept.keep(|run| run.start_all(2, 4, StateSource::Checkpoint));
    (kept, leased)
}

fn begins_at(asked: Result<Reply, Refusal>) -> Step {
    let Ok(Reply::Rebuild(asked)) = asked else { panic!("{asked:?}") };
    asked.first
}

#[test]
fn a_request_after_a_rollback_begins_behind_every_step_that_may_have_been_run() {
    let (mut kept, leased) = rolled_back();
    assert!(begins_at(kept.rebuild().0) >= leased, "{leased}");
}

#[test]
fn a_coordinator_that_is_killed_after_a_rollback_knows_how_far_leases_had_reached() {
    let (mut kept, leased) = rolled_back();
    kept.restart_coordinator();
    assert!(begins_at(kept.rebuild().0) >= leased, "{leased}");
}

#[test]
fn a_run_that_is_begun_again_after_its_end_knows_how_far_leases_may_have_reached() {
    let mut kept = Mortal::started(periodic(2, 60, None));
    kept.train(0..20);
    let leased = kept.run.machine.run.progress.course().map(|course| course.leases.end()).expect("it trains");
    let failure = Failure::of_run(crate::options::CauseKind::BadInput, "broken".into());
    let worker = Some(kept.run.worker(0));
    kept.keep(|run| run.tell(Ask::Failure { run_id: RUN.into(), worker, failure, sample: None }));
    kept.past = std::mem::take(&mut kept.past).settled();
    kept.begin_life(false);
    assert!(begins_at(kept.rebuild().0) >= leased, "{leased}");
}

#[test]
fn a_request_ends_the_waiting_for_a_drift() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    kept.train(0..8);
    let (reply, actions) = kept.rebuild();
    let Ok(Reply::Rebuild(asked)) = reply else { panic!("{reply:?}") };
    assert_eq!((asked.first, asked.generation.number), (Step(8), 2));
    assert_eq!(leases(&actions).len(), 4, "both ranks go on");
    let late = kept.report(drift_of(1, 8, 0.01));
    assert_eq!(decided(&late), [], "a drift that comes late changes nothing");
}

#[test]
fn a_request_is_refused_where_it_has_no_meaning() {
    let exact = Cache { mode: CacheMode::Exact, ..Cache::default() };
    let refused = [Cache::default(), exact, periodic(90, 95, None)].map(|cache| {
        let mut kept = Mortal::started(cache);
        kept.train(0..70);
        kept.rebuild().0.expect_err("it is refused")
    });
    assert!(
        matches!(refused, [Refusal::NoCache, Refusal::ExactCache, Refusal::NoCachedStep { .. }]),
        "{refused:?}"
    );
    let mut over = Mortal::started(periodic(2, 6, None));
    let failure = Failure::of_run(crate::options::CauseKind::BadInput, "broken".into());
    let worker = Some(over.run.worker(0));
    over.run.tell(Ask::Failure { run_id: RUN.into(), worker, failure, sample: None });
    assert!(matches!(over.rebuild().0, Err(Refusal::Over(_))));
    let mut early = Run::new(cached(2, periodic(2, 6, None)));
    assert_eq!(early.ask(Ask::RebuildCache).0, Err(Refusal::NotPlanned), "no worker has come");
}
