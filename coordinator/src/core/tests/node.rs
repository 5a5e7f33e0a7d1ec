//! Launchers that speak for their workers: what several say in one event is what each would have said.

use proptest::prelude::*;

use super::*;
use crate::core::event::NodeNews;

/// Without answers, which go to the launcher and not to its workers.
fn followed(actions: Vec<Action>) -> Vec<Action> {
    actions.into_iter().filter(|action| !matches!(action, Action::Reply(..))).collect()
}

#[test]
fn a_node_speaks_for_its_workers_and_hears_whom_the_coordinator_does_not_know() {
    let mut run = Run::started(2);
    run.event(Event::LineClosed(id(1), StreamId(1)));
    run.wait(Duration::from_secs(1));
    let beats = vec![
        run.moving_beat(0, WorkerPhase::Forward, (2, 2)),
        Beat { incarnation: claim(1).incarnation.into(), ..run.moving_beat(1, WorkerPhase::Forward, (2, 2)) },
    ];
    let steps = vec![(id(0), vec![]), (id(1), vec![]), (WorkerId(7), vec![])];
    let (reply, _) = run.ask(Ask::Node(NodeNews { beats, steps }));
    let unknown = vec![id(1), id(1), WorkerId(7)];
    assert_eq!(reply, Ok(Reply::NodeHeard { committed: Step(0), unknown }));
}

#[test]
fn a_heartbeat_counts_from_when_the_worker_gave_it() {
    let mut run = Run::started(2);
    run.wait(Duration::from_secs(2));
    run.beat(0, WorkerPhase::Forward);
    let late = Beat { age: Duration::from_millis(900), ..run.moving_beat(1, WorkerPhase::Forward, (2, 2)) };
    run.tell(Ask::Node(NodeNews { beats: vec![late], steps: Vec::new() }));
    // Three seconds without a sign of life, of which the launcher held back nine tenths of one.
    run.wait(Duration::from_millis(2_050));
    assert_eq!(run.phase(), RunPhase::Starting);
    run.beat(0, WorkerPhase::Forward);
    let actions = run.wait(Duration::from_millis(100));
    assert_eq!(respawns(&actions), [(1, 1)]);
    // An old one takes nothing back of a newer sign.
    let mut run = Run::started(2);
    run.wait(Duration::from_secs(2));
    let now = [0, 1].map(|rank| run.moving_beat(rank, WorkerPhase::Forward, (2, 2)));
    let late = Beat { age: Duration::from_secs(2), ..now[1].clone() };
    run.tell(Ask::Node(NodeNews { beats: [&now[..], &[late]].concat(), steps: Vec::new() }));
    assert_eq!(respawns(&run.wait(Duration::from_millis(2_900))), []);
}

proptest! {
    #[test]
    fn what_a_node_says_counts_as_what_each_of_its_workers_says(
        beats in prop::collection::vec((0u32..4, any::<bool>(), 0u64..3000), 0..6),
        steps in prop::collection::vec((0u32..4, 0u64..4, 0u64..5), 0..8),
    ) {
        let mut apart = Run::started(4);
        apart.wait(Duration::from_secs(1));
        if beats.len() % 2 == 0 {
            apart.tell(Ask::Pause);
        }
        let beats: Vec<_> = beats.into_iter().map(|(rank, paused, age)| {
            let phase = if paused { WorkerPhase::Paused } else { WorkerPhase::Communication };
            Beat { age: Duration::from_millis(age), ..apart.moving_beat(rank, phase, (0, 0)) }
        }).collect();
        let steps: Vec<_> = steps.into_iter().map(|(rank, first, count)| {
            let reports = (first..first + count).map(|step| apart.report(rank, step)).collect::<Vec<_>>();
            (id(rank), reports)
        }).collect();
        let mut together = Run { machine: apart.machine.clone(), shown: BTreeMap::new(), ..apart };
        let mut alone = Vec::new();
        for beat in &beats {
            alone.extend(followed(apart.tell(Ask::Heartbeat(beat.clone()))));
        }
        for (worker, reports) in &steps {
            alone.extend(followed(apart.tell(Ask::Steps(*worker, reports.clone()))));
        }
        let at_once = followed(together.tell(Ask::Node(NodeNews { beats, steps })));
        prop_assert_eq!(alone, at_once);
        prop_assert_eq!(apart.committed(), together.committed());
        prop_assert_eq!(apart.machine.next_deadline(), together.machine.next_deadline());
    }
}
