//! Any sequence of events keeps the invariants, answers every call, and never loses or repeats a step.

use coxswain_proto::{
    cache_plan::{CacheDrift, CacheReport, Drift},
    run_spec::CacheMode,
};
use proptest::prelude::*;

use super::*;
use crate::core::{
    action::{Lease, Record},
    event::{KillingSample, ProcessExit},
    failure::Failure,
    invariants,
    phase::Phase,
};
use crate::options::CauseKind;

/// What a careless world may do.
#[derive(Clone, Debug)]
enum Move {
    Register(u32, u32),
    Follow(u32),
    Ready {
        rank: u32,
        left: u64,
        complains: bool,
    },
    Start {
        rank: u32,
        back: u64,
    },
    JoinNode,
    NodeLine(bool),
    Restart,
    CloseLine(u32),
    Steps {
        rank: u32,
        back: u64,
        count: u64,
    },
    Beat(u32, bool),
    Wait(u64),
    /// Something that people ask.
    Asked(Box<Ask>),
    Drift {
        rank: u32,
        relative_l2: f64,
    },
    Fail {
        rank: u32,
        kind: CauseKind,
    },
    /// A worker tells of a fault of its machine.
    Slips(u32, u64),
    Leave(u32),
    /// A process ends: by itself, or by a signal while it read this position.
    Exit(u32, Option<u64>),
}

fn moves(world: u32) -> impl Strategy<Value = Move> {
    let rank = 0..world;
    prop_oneof![
        5 => (rank.clone(), 0u32..3).prop_map(|(rank, life)| Move::Register(rank, life)),
        6 => rank.clone().prop_map(Move::Follow),
        8 => (rank.clone(), 0u64..3, prop::bool::weighted(0.2))
            .prop_map(|(rank, left, complains)| Move::Ready { rank, left, complains }),
        8 => (rank.clone(), 0u64..10).prop_map(|(rank, back)| Move::Start { rank, back: back.saturating_sub(7) }),
        1 => Just(Move::JoinNode),
        1 => prop::bool::weighted(0.7).prop_map(Move::NodeLine),
        1 => Just(Move::Restart),
        1 => rank.clone().prop_map(Move::CloseLine),
        12 => (rank.clone(), 0u64..3, 1u64..12)
            .prop_map(|(rank, back, count)| Move::Steps { rank, back, count }),
        6 => (rank.clone(), any::<bool>()).prop_map(|(rank, paused)| Move::Beat(rank, paused)),
        3 => (0u64..2500).prop_map(Move::Wait),
        1 => Just(Move::Asked(Ask::Pause.into())),
        1 => Just(Move::Asked(Ask::Resume.into())),
        1 => Just(Move::Asked(Ask::CheckpointNow.into())),
        1 => Just(Move::Asked(Ask::RefreshMemory { reset: true }.into())),
        1 => Just(Move::Asked(Ask::RebuildCache.into())),
        4 => (rank.clone(), 0.0f64..0.2).prop_map(|(rank, relative_l2)| Move::Drift { rank, relative_l2 }),
        1 => rank.clone().prop_map(Move::Leave),
        1 => prop_oneof![
            Just(Move::Asked(Ask::Stop { reason: "enough".into() }.into())),
            (rank.clone(), prop::sample::select(vec![CauseKind::PeerLost, CauseKind::Io, CauseKind::Hardware]))
                .prop_map(|(rank, kind)| Move::Fail { rank, kind }),
            (rank.clone(), 1u64..4).prop_map(|(rank, sequence)| Move::Slips(rank, sequence)),
            (rank, prop::option::of(0u64..3)).prop_map(|(rank, read)| Move::Exit(rank, read)),
        ],
    ]
}

fn play(run: &mut Run, next: &Move, owed: &mut [u64]) -> Vec<Action> {
    let ids: Vec<_> =
        run.machine.run.fleet.roster.workers().map(|worker| (worker.slot().0, worker.id)).collect();
    let id = |rank: u32| ids.iter().find(|(found, _)| *found == rank).map_or(WorkerId(0), |(_, id)| *id);
    let ask = match *next {
        Move::Asked(ref ask) => (**ask).clone(),
        Move::Register(rank, 0) => Ask::Register(claim(rank)),
        Move::Register(rank, life) => Ask::Register(successor(rank, life)),
        Move::Follow(rank) => {
            run.ticket += 1;
            let stream = StreamId(1000 + run.ticket);
            Ask::Follow { worker: id(rank), incarnation: run.incarnation(rank), stream }
        }
        Move::Ready { rank, left, complains } => {
            let left = Generation(run.machine.run.generation.0.saturating_sub(left));
            let reason = if complains { "its peer is gone".into() } else { String::new() };
            Ask::Ready(Readiness { worker: id(rank), incarnation: run.incarnation(rank), left, reason })
        }
        Move::Start { rank, back } => {
            let first_step = Step(run.committed().saturating_sub(back));
            if back > 0 {
                owed.iter_mut().for_each(|owed| *owed = (*owed).min(first_step.0));
            }
            Ask::Start(StartReport {
                worker: id(rank),
                generation: run.machine.run.generation,
                first_step,
                source: StateSource::Carried,
            })
        }
        Move::JoinNode => {
            super::mortal::wants(NODE, "node-a", None, run.machine.run.config.world.nproc_per_node)
        }
        Move::NodeLine(true) => Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE },
        // Needs what was recorded: see the property.
        Move::Restart => return Vec::new(),
        Move::NodeLine(false) => return run.event(Event::NodeLineClosed(NODE.into(), NODE_LINE)),
        Move::CloseLine(rank) => {
            let Some(stream) =
                run.machine.run.fleet.roster.at(Slot(rank)).and_then(|worker| worker.line.stream)
            else {
                return Vec::new();
            };
            let worker = id(rank);
            return run.event(Event::LineClosed(worker, stream));
        }
        Move::Steps { rank, back, count } => {
            let rank = rank % run.machine.run.config.world.size();
            let Some(reports) = reports(run, rank, (back, count), owed) else { return Vec::new() };
            Ask::Steps(id(rank), reports)
        }
        Move::Beat(rank, paused) => {
            let phase = if paused { WorkerPhase::Paused } else { WorkerPhase::Forward };
            let beat = run.moving_beat(rank, phase, (0, 0));
            Ask::Heartbeat(Beat { worker: id(rank), ..beat })
        }
        Move::Wait(ms) => return run.wait(Duration::from_millis(ms)),
        Move::Drift { rank, relative_l2 } => Ask::Cache(id(rank), drift_report(run, relative_l2)),
        Move::Slips(rank, sequence) => {
            Ask::Note { worker: id(rank), sequence, text: "wrong".into(), hardware: true }
        }
        Move::Fail { rank, kind } => {
            let failure = Failure::of_run(kind, "broken".into());
            Ask::Failure { run_id: RUN.into(), worker: Some(id(rank)), failure, sample: None }
        }
        Move::Leave(rank) => Ask::Leave { worker: id(rank), exit_code: 0, reason: "done".into() },
        Move::Exit(rank, read) => {
            let pid = run.machine.run.fleet.roster.at(Slot(rank)).map(|worker| worker.claim.pid);
            let ended = if read.is_some() { ProcessExit::Signal(11) } else { ProcessExit::Code(1) };
            let generation = run.machine.run.generation;
            let sample =
                read.map(|position| KillingSample { sample: super::samples::bad(position), generation });
            Ask::Exit { node_id: NODE.into(), slot: Slot(rank), pid, ended, sample }
        }
    };
    run.ticket += 1;
    let ticket = Ticket(run.ticket);
    run.event(Event::Asked(ticket, ask))
}

/// Steps that a rank reports: the last `back` ones again, and `count` more within its lease.
fn reports(run: &mut Run, rank: u32, (back, count): (u64, u64), owed: &mut [u64]) -> Option<Vec<StepReport>> {
    let limit = lease_end(run)?;
    let due = due(run, rank).unwrap_or(owed[rank as usize]);
    let end = (due + count).min(limit);
    owed[rank as usize] = due.max(end);
    Some((due.saturating_sub(back)..end).map(|step| run.report(rank, step)).collect())
}

/// The coordinator is killed, and another one goes on with what it has recorded.
fn restart(run: &mut Run, past: &Past) -> Result<(), TestCaseError> {
    let before = run.machine.clone();
    let mut config = before.run.config.clone();
    (config.life, config.restarted, config.past) = (config.life + 1, true, past.clone());
    run.machine = Machine::new(run.at(), config);
    prop_assert_eq!(invariants::violated(&run.machine), None);
    prop_assert_eq!(run.machine.committed(), before.committed());
    prop_assert_eq!(run.machine.run.generation, before.run.generation);
    prop_assert_eq!(&run.machine.run.faults.spent, &before.run.faults.spent);
    prop_assert_eq!(&run.machine.run.orders, &before.run.orders);
    prop_assert_eq!(
        run.machine.run.progress.cache.book.cache_phases(),
        before.run.progress.cache.book.cache_phases()
    );
    let over = |machine: &Machine| matches!(machine.run.phase, Phase::Over(_));
    prop_assert_eq!(over(&run.machine), over(&before));
    let slots = |machine: &Machine| -> Vec<_> {
        machine.run.fleet.roster.living().map(|worker| (worker.slot(), worker.id)).collect()
    };
    prop_assert_eq!(slots(&run.machine), slots(&before));
    Ok(())
}

/// What is measured where everybody waits for it, or else at some boundary.
fn drift_report(run: &Run, relative_l2: f64) -> CacheReport {
    let at = run.machine.run.progress.waits_for_drift().unwrap_or(Step(8));
    let generation = run
        .machine
        .run
        .progress
        .cache
        .book
        .cache_phases()
        .before(at)
        .map_or(1, |decided| decided.generation.number);
    let drift = Drift { relative_l2, cosine: 1.0, loss_fresh: 1.0, loss_cached: 1.0 };
    let drift = Some(CacheDrift { at, drift, probes: 1 });
    CacheReport { generation, total: 1, fill_batch: 1, drift, ..CacheReport::default() }
}

fn caches() -> impl Strategy<Value = Cache> {
    prop_oneof![
        2 => Just(Cache::default()),
        1 => Just(Cache { mode: CacheMode::Exact, ..Cache::default() }),
        3 => (1u64..8, 1u64..30, prop::option::of(0.05f64..0.15))
            .prop_map(|(live, rest, above)| super::cache::periodic(live, live + rest, above)),
    ]
}

/// Every step of a lease takes the cache phase that it names.
fn lies_in_one_cache_phase(machine: &Machine, lease: &Lease) -> bool {
    let named = super::cache::number(lease);
    let cache_phase = |step| {
        machine
            .run
            .progress
            .cache
            .book
            .cache_phases()
            .cache_phase(Step(step))
            .map(|cache_phase| cache_phase.number())
    };
    lease.first < lease.end && (lease.first.0..lease.end.0).all(|step| cache_phase(step) == Some(named))
}

/// The next step that a slot's worker has to report.
fn due(run: &Run, rank: u32) -> Option<u64> {
    let ledger = &run.machine.run.progress.course()?.ledger;
    let position = ledger.rank_of(run.worker(rank))?;
    ledger.all_owed().nth(position.0 as usize).map(|step| step.0)
}

fn lease_end(run: &mut Run) -> Option<u64> {
    run.status().ranks.iter().find_map(|rank| rank.worker()).map(|worker| worker.lease_end.0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_history_keeps_the_invariants_and_commits_each_step_once(
        world in 1u32..4, spares in 0u32..3, cache in caches(),
        history in prop::collection::vec(moves(3), 1..120),
    ) {
        let mut config = Config { cache, ..config(world) };
        config.world.spares = spares.min(world - 1);
        let mut run = Run::new(config);
        run.ticket = 1;
        let mut owed = vec![0; 3];
        let mut next_commit = 0;
        let mut generation = Generation(0);
        let mut answers = std::collections::BTreeSet::new();
        let mut past = Past::default();
        let mut leased = BTreeMap::new();
        for next in &history {
            if matches!(next, Move::Restart) {
                restart(&mut run, &past)?;
            }
            let actions = play(&mut run, next, &mut owed);
            prop_assert_eq!(invariants::violated(&run.machine), None);
            for action in &actions {
                if let Action::Record(record) = action {
                    past.add_record(record);
                }
                match action {
                    Action::Record(Record::Step(step)) => {
                        prop_assert_eq!(step.step.0, next_commit, "steps commit in order, once");
                        let cache_phase = run.machine.run.progress.cache.book.cache_phases().cache_phase(step.step).map(|cache_phase| cache_phase.number());
                        prop_assert_eq!(cache_phase, Some(step.cache_generation), "a step has the cache phase it was leased");
                        next_commit += 1;
                    }
                    Action::Record(Record::Started { first_step, .. }) => {
                        prop_assert!(first_step.0 <= next_commit, "what was not committed is skipped");
                        let message = news(&actions).iter().any(|news| matches!(news, News::RolledBack { .. }));
                        prop_assert_eq!(first_step.0 < next_commit, message, "a rollback is said");
                        next_commit = first_step.0;
                    }
                    Action::Record(Record::Generation { generation: formed, .. }) => {
                        prop_assert!(*formed > generation, "generations grow");
                        generation = *formed;
                    }
                    Action::Tell(_, Directive::Lease(lease)) => {
                        prop_assert!(lies_in_one_cache_phase(&run.machine, lease), "{:?}", lease);
                        for step in lease.first.0..lease.end.0 {
                            let cache_phase = super::cache::number(lease);
                            let first = *leased.entry(step).or_insert(cache_phase);
                            prop_assert_eq!(first, cache_phase, "step {} has the cache phase it was leased first", step);
                        }
                    }
                    Action::Reply(ticket, _) => {
                        prop_assert!(answers.insert(*ticket), "{:?} was answered twice", ticket);
                    }
                    _ => {}
                }
            }
            if run.machine.outcome().is_some() {
                break;
            }
        }
        prop_assert_eq!(run.machine.committed().0, next_commit);
        if let Phase::Running(running) = &run.machine.run.phase {
            prop_assert_eq!(running.assignment.generation, generation);
        }
    }

    #[test]
    fn any_run_that_failed_comes_to_its_end(world in 1u32..4, victims in prop::collection::vec(any::<bool>(), 1..3)) {
        let mut run = Run::started(world);
        for (rank, victim) in (0..world).zip(victims) {
            let kind = if victim { CauseKind::PeerLost } else { CauseKind::Io };
            play(&mut run, &Move::Fail { rank, kind }, &mut []);
        }
        run.wait(Duration::from_secs(240));
        prop_assert!(run.machine.outcome().is_some());
        prop_assert_eq!(run.machine.next_deadline().filter(|at| *at > run.at()), None);
    }
}
