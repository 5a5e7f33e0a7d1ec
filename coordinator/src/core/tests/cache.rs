//! Where features come from: turns in leases, decisions that wait for a drift, requests, reports.

use coxswain_proto::{
    cache_plan::{CacheDrift, CacheGeneration, CacheReport, Decided, Drift, Why},
    run_spec::{Cache, CacheMode, Span},
};

use super::{mortal::Mortal, *};
use crate::core::{
    action::{CacheKey, Lease, LeaseTurn, Record},
    cache::GenerationState,
    failure::Failure,
    news::CacheNews,
};

/// A periodic cache in steps.
pub(super) fn periodic(live: u64, interval: u64, rebuild_above: Option<f64>) -> Cache {
    let steps = |steps| Span { epochs: None, steps: Some(steps) };
    let (interval, live) = (steps(interval), steps(live));
    Cache { mode: CacheMode::Periodic, interval, live, rebuild_above, ..Cache::default() }
}

fn cached(world: u32, cache: Cache) -> Config {
    Config { cache, ..config(world) }
}

impl Mortal {
    /// Two workers that train from step 0 on.
    fn started(cache: Cache) -> Self {
        Self::started_with(cached(2, cache)).0
    }

    fn started_with(config: Config) -> (Self, Vec<Action>) {
        let mut kept = Self::new(config);
        kept.run.gather(2);
        // Who came is not what these tests are about: they are recorded as a restarted coordinator would find them.
        for rank in 0..2 {
            kept.past.take(&Record::Worker(id(rank), claim(rank)));
        }
        kept.past.take(&Record::DataSet(dataset()));
        kept.past.take(&Record::Node { place: 0, node_id: NODE.into(), host: "node-a".into() });
        for rank in 0..2 {
            kept.keep(|run| run.get_ready(rank, 0, ""));
        }
        let actions = kept.keep(|run| run.start_all(2, 0, StateSource::Fresh));
        (kept, actions)
    }

    /// Both ranks do the steps of a range, one after the other.
    fn train(&mut self, steps: std::ops::Range<u64>) -> Vec<Action> {
        let mut all = Vec::new();
        for step in steps {
            all.extend(self.keep(|run| run.steps(0, step..step + 1)));
            all.extend(self.keep(|run| run.steps(1, step..step + 1)));
        }
        all
    }

    /// Seconds pass in which both ranks do nothing but this.
    fn live(&mut self, seconds: u64, phase: WorkerPhase) -> Vec<Action> {
        let mut all = Vec::new();
        for _ in 0..seconds {
            all.extend(self.keep(|run| run.beat(0, phase)));
            all.extend(self.keep(|run| run.beat(1, phase)));
            all.extend(self.keep(|run| run.wait(Duration::from_secs(1))));
        }
        all
    }

    fn report(&mut self, report: CacheReport) -> Vec<Action> {
        let worker = self.run.worker(0);
        self.keep(|run| run.tell(Ask::Cache(worker, report)))
    }

    fn rebuild(&mut self) -> (Result<Reply, Refusal>, Vec<Action>) {
        let mut reply = Ok(Reply::Done);
        let actions = self.keep(|run| {
            let (answer, actions) = run.ask(Ask::RebuildCache);
            reply = answer;
            actions
        });
        (reply, actions)
    }

    /// Another coordinator, whom both workers have found.
    fn restart_coordinator(&mut self) {
        self.kill_coordinator();
        for rank in 0..2 {
            self.reopen(rank);
        }
    }

    /// Generations that the steps of a range take their features from.
    fn turns(&self, steps: std::ops::Range<u64>) -> Vec<u64> {
        let turns = self.run.machine.cache.turns();
        steps.map(|step| turns.turn(Step(step)).expect("it is decided").number()).collect()
    }
}

fn report_of(generation: u64) -> CacheReport {
    CacheReport { generation, total: 30, fill_batch: 4, ..CacheReport::default() }
}

fn drift_of(generation: u64, at: u64, relative_l2: f64) -> CacheReport {
    let drift = Drift { relative_l2, cosine: 0.9, loss_fresh: 1.0, loss_cached: 1.1 };
    let drift = Some(CacheDrift { at: Step(at), drift, probes: 8 });
    CacheReport { drift, ..report_of(generation) }
}

/// The leases that were told to anybody: steps, and the generation that serves.
fn leases(actions: &[Action]) -> Vec<(u32, std::ops::Range<u64>, u64)> {
    let leases = actions.iter().filter_map(|action| match action {
        Action::Tell(_, Directive::Lease(lease)) => Some(lease),
        _ => None,
    });
    leases.map(|lease| (lease.slice.0, lease.first.0..lease.end.0, number(lease))).collect()
}

fn number(lease: &Lease) -> u64 {
    match &lease.turn {
        LeaseTurn::Live { .. } => 0,
        LeaseTurn::Cached(key) => key.generation.number,
    }
}

fn decided(actions: &[Action]) -> Vec<Decided> {
    let turns = actions.iter().filter_map(|action| match action {
        Action::Record(Record::CacheTurn(decided)) => Some(*decided),
        _ => None,
    });
    turns.collect()
}

#[test]
fn exact_features_come_from_one_generation_throughout() {
    let exact = Cache { mode: CacheMode::Exact, ..Cache::default() };
    let (mut kept, actions) = Mortal::started_with(cached(2, exact));
    assert_eq!(leases(&actions), [(0, 0..32, 1), (1, 0..32, 1)]);
    kept.train(0..40);
    assert_eq!((decided(&kept.train(40..50)), kept.run.committed()), (vec![], 50));
    let status = kept.run.machine.cache_status().expect("there is a cache");
    let states: Vec<_> = status.generations.iter().map(|(entry, state)| (entry.number, *state)).collect();
    assert_eq!((status.serving, states), (1, vec![(1, GenerationState::Building)]));
}

#[test]
fn a_lease_ends_where_the_turn_does() {
    let (mut kept, actions) = Mortal::started_with(cached(2, periodic(4, 10, None)));
    let own: Vec<_> = leases(&actions).into_iter().filter(|(rank, ..)| *rank == 0).collect();
    let turns = [
        (0, 0..4, 0),
        (0, 4..10, 1),
        (0, 10..14, 0),
        (0, 14..20, 2),
        (0, 20..24, 0),
        (0, 24..30, 3),
        (0, 30..32, 0),
    ];
    assert_eq!(own, turns);
    let whys: Vec<_> = decided(&actions).iter().map(|decided| decided.why).collect();
    assert_eq!(whys, [Why::First, Why::Schedule, Why::Schedule]);
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
    let expected = "took the features of step 4 from no cache, but its lease says generation 1 of the cache";
    assert_eq!(told.as_deref(), Some(expected));
    assert_eq!(kept.run.phase(), RunPhase::Failed);
}

#[test]
fn what_depends_on_drift_is_not_leased_before_it_is_known() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    assert_eq!(kept.run.machine.waits_for_drift(), Some(Step(8)));
    let actions = kept.train(0..8);
    assert_eq!(leases(&actions), [], "nothing beyond step 8");
    let actions = kept.report(drift_of(1, 8, 0.04));
    let why = Why::Stayed { drift: 0.04, threshold: 0.05 };
    let generation = CacheGeneration { number: 1, since: Step(2) };
    assert_eq!(decided(&actions), [Decided { first: Step(8), generation, why }]);
    assert_eq!(leases(&actions), [(0, 8..12, 1), (0, 12..14, 0), (1, 8..12, 1), (1, 12..14, 0)]);
    kept.train(8..14);
    let actions = kept.report(drift_of(1, 14, 0.06));
    assert_eq!(decided(&actions)[0].generation, CacheGeneration { number: 2, since: Step(14) });
    assert_eq!(kept.turns(2..18), [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2]);
    // The same report again, as after a lost answer.
    assert_eq!(kept.report(drift_of(1, 14, 0.06)), []);
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
    let [Decided { first, generation, why: Why::Unmeasured }] = decided(&all)[..] else { panic!("{all:?}") };
    assert_eq!((first, generation.number), (Step(8), 2));
    assert_eq!(kept.run.machine.spent.restarts, 0, "nobody stood still");
    kept.train(8..12);
    assert_eq!(kept.run.committed(), 12);
}

#[test]
fn a_restarted_coordinator_knows_the_same_turns_and_waits_for_the_same_drift() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    kept.report(CacheReport { space: "5f".into(), ..report_of(1) });
    kept.train(0..8);
    kept.report(drift_of(1, 8, 0.01));
    kept.train(8..11);
    let before = kept.run.machine.cache.turns().clone();
    kept.restart_coordinator();
    assert_eq!(*kept.run.machine.cache.turns(), before);
    let (turn, _) = kept.run.machine.cache.lease_turn(Step(9)).expect("decided");
    let generation = CacheGeneration { number: 1, since: Step(2) };
    assert_eq!(turn, LeaseTurn::Cached(CacheKey { generation, space: Some("5f".into()) }));
    kept.train(11..14);
    kept.restart_coordinator();
    assert_eq!(kept.run.machine.waits_for_drift(), Some(Step(14)));
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
    assert_eq!(kept.run.machine.waits_for_drift(), Some(Step(50)));
    let all = kept.live(50, WorkerPhase::Forward);
    assert_eq!(decided(&all), []);
    assert_eq!(decided(&kept.train(40..50)), [], "nothing but the steps before it is waited for");
    let actions = kept.report(drift_of(1, 50, 0.01));
    assert_eq!(decided(&actions).len(), 1);
}

#[test]
fn steps_that_are_repeated_take_the_same_turns() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    kept.train(0..8);
    kept.report(drift_of(1, 8, 0.5));
    kept.train(8..10);
    let asked = kept.rebuild().0;
    let Ok(Reply::Rebuild(asked)) = asked else { panic!("{asked:?}") };
    let before = kept.turns(0..14);
    // Both workers are lost at once, and the newest checkpoint is at step 4.
    for rank in 0..2 {
        kept.keep(|run| run.kill(rank));
    }
    for rank in 0..2 {
        kept.keep(|run| run.replace(rank, 1));
    }
    let actions = kept.keep(|run| run.start_all(2, 4, StateSource::Checkpoint));
    assert_eq!((kept.run.committed(), decided(&actions)), (4, vec![]));
    assert_eq!(kept.turns(0..14), before);
    assert_eq!(kept.rebuild().0, Ok(Reply::Rebuild(asked)), "it has not begun yet");
    kept.train(4..14);
    assert_eq!(kept.run.committed(), 14);
}

#[test]
fn a_request_begins_a_generation_where_nobody_holds_a_lease_yet() {
    let mut kept = Mortal::started(periodic(2, 60, None));
    kept.train(0..5);
    let (reply, actions) = kept.rebuild();
    let Ok(Reply::Rebuild(asked)) = reply else { panic!("{reply:?}") };
    assert_eq!((asked.first, asked.generation.number, asked.why), (Step(32), 2, Why::Asked));
    assert_eq!(decided(&actions), [asked]);
    assert_eq!(kept.rebuild(), (Ok(Reply::Rebuild(asked)), vec![]), "asking twice is asking once");
    kept.restart_coordinator();
    assert_eq!(kept.rebuild(), (Ok(Reply::Rebuild(asked)), vec![]), "also of another coordinator");
    kept.train(5..40);
    assert_eq!(kept.turns(30..34), [1, 1, 2, 2]);
    let later = kept.rebuild().0;
    assert!(matches!(later, Ok(Reply::Rebuild(next)) if next.generation.number > 2), "{later:?}");
}

#[test]
fn a_request_after_a_rollback_begins_behind_every_step_that_may_have_been_run() {
    let mut kept = Mortal::started(periodic(2, 60, None));
    kept.train(0..20);
    let leased = kept.run.machine.phase.course().map(|course| course.leases.end()).expect("it trains");
    for rank in 0..2 {
        kept.keep(|run| run.kill(rank));
    }
    for rank in 0..2 {
        kept.keep(|run| run.replace(rank, 1));
    }
    kept.keep(|run| run.start_all(2, 4, StateSource::Checkpoint));
    let asked = kept.rebuild().0;
    assert!(matches!(asked, Ok(Reply::Rebuild(asked)) if asked.first >= leased), "{asked:?}, {leased}");
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
        let status = kept.run.machine.cache_status().expect("there is a cache");
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
fn a_generation_whose_adapter_is_lost_is_not_kept() {
    let mut kept = Mortal::started(periodic(2, 6, Some(0.05)));
    kept.train(0..8);
    let lost = CacheReport { lost: true, ..report_of(1) };
    let actions = kept.report(lost);
    assert_eq!(decided(&actions).iter().map(|decided| decided.why).collect::<Vec<_>>(), [Why::Lost]);
    assert_eq!(leases(&actions).len(), 4, "nobody waits for a drift that cannot be measured");
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

#[test]
fn what_the_cache_did_is_in_the_books() {
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
    let entry = kept.run.machine.cache.entry(1).expect("it serves");
    assert_eq!((entry.used.hits, entry.used.misses), (2, 6));
}
