//! Hardware that shows faults: what is counted, which slots are not used any more, and how the run goes on.

use super::{
    elastic::{both_nodes, join, members},
    mortal::Mortal,
    recovery::at_step_ten,
    *,
};
use crate::{
    core::{event::ProcessExit, failure::Failure},
    options::{CauseKind, Outcome},
};

/// A worker tells of its machine; `sequence` counts its notes.
fn tells(run: &mut Run, rank: u32, sequence: u64) -> Vec<Action> {
    let (worker, text) = (run.worker(rank), "its gradients are wrong".to_owned());
    run.tell(Ask::Note { worker, sequence, text, hardware: true })
}

/// A process does not pass its check before it has registered, and ends.
fn fails_its_check(run: &mut Run, rank: u32, pid: u32) -> Vec<Action> {
    let failure = Failure {
        slot: Some(Slot(rank)),
        ..Failure::of_run(CauseKind::Hardware, "the device check: a wrong result".into())
    };
    let mut actions = run.tell(Ask::Failure { run_id: RUN.into(), worker: None, failure, sample: None });
    let ended = ProcessExit::Code(4);
    let node_id = match run.machine.run.config.world.node_of(Slot(rank)) {
        0 if run.machine.run.config.world.max_nodes == 1 => NODE.into(),
        node => format!("node-{node}"),
    };
    actions.extend(run.tell(Ask::Exit { node_id, slot: Slot(rank), pid: Some(pid), ended, sample: None }));
    actions
}

fn cordoned(actions: &[Action]) -> Vec<u32> {
    let cordoned = news(actions).into_iter().filter_map(|news| match news {
        News::Cordoned(slot, _) => Some(slot.0),
        _ => None,
    });
    cordoned.collect()
}

#[test]
fn a_fault_that_is_told_again_counts_once() {
    let mut run = at_step_ten();
    for _ in 0..3 {
        assert_eq!(cordoned(&tells(&mut run, 1, 1)), [0u32; 0]);
    }
    assert_eq!(run.machine.run.health.of_slot(Slot(1)).map(|health| health.faults), Some(1));
    assert_eq!(cordoned(&tells(&mut run, 1, 2)), [1]);
}

#[test]
fn a_fault_that_is_told_again_to_the_next_coordinator_counts_once() {
    let mut mortal = Mortal::at_step_ten();
    // It is killed after it has recorded this, and before it answers.
    mortal.keep(|run| tells(run, 1, 1));
    mortal.kill_coordinator();
    mortal.reopen(0);
    mortal.reopen(1);
    assert_eq!(cordoned(&mortal.keep(|run| tells(run, 1, 1))), [0u32; 0]);
    assert_eq!(mortal.run.machine.run.health.of_slot(Slot(1)).map(|health| health.faults), Some(1));
    assert_eq!(cordoned(&mortal.keep(|run| tells(run, 1, 2))), [1]);
}

#[test]
fn a_process_that_is_killed_is_no_fault_of_its_machine() {
    let mut run = at_step_ten();
    for life in 1..4 {
        run.kill(1);
        run.get_ready(0, u64::from(life), "");
        run.replace(1, life);
        run.start_all(2, 10, StateSource::Replica);
    }
    assert_eq!(run.machine.run.health.faulty().count(), 0);
}

#[test]
fn a_fixed_world_trains_on_with_a_rank_that_it_cannot_do_without() {
    let mut run = at_step_ten();
    tells(&mut run, 1, 1);
    let actions = tells(&mut run, 1, 2);
    assert_eq!((cordoned(&actions), told(&actions, 0).len()), (vec![1], 0), "{actions:?}");
    run.steps(0, 10..12);
    run.steps(1, 10..12);
    assert_eq!(run.committed(), 12);
    // Once it is gone there is none instead, and the other saves what was learned.
    let actions = run.kill(1);
    assert!(respawns(&actions).is_empty(), "{actions:?}");
    assert!(run.machine.run.faults.closing().is_some(), "{actions:?}");
    run.get_ready(0, 1, "");
    run.wait(Duration::from_secs(90));
    let Some(Outcome::Failed(cause)) = run.machine.outcome() else { panic!("it goes on") };
    assert!(cause.message.contains("its slot is cordoned (hardware faults: 2,"), "{}", cause.message);
}

#[test]
fn a_process_that_does_not_pass_its_check_is_started_again_until_its_slot_is_cordoned() {
    let mut run = Run::new(config(2));
    run.gather(1);
    run.get_ready(0, 0, "");
    let actions = fails_its_check(&mut run, 1, 101);
    assert_eq!((respawns(&actions), cordoned(&actions)), (vec![(1, 1)], vec![]), "{actions:?}");
    let actions = fails_its_check(&mut run, 1, 1101);
    assert_eq!((respawns(&actions), cordoned(&actions)), (vec![], vec![1]), "{actions:?}");
    run.wait(Duration::from_secs(30));
    let Some(Outcome::Failed(cause)) = run.machine.outcome() else { panic!("a fixed world needs it") };
    assert_eq!((cause.slot, cause.kind), (Some(Slot(1)), CauseKind::Hardware));
}

#[test]
fn an_elastic_world_goes_on_without_a_slot_that_is_cordoned() {
    let mut run = both_nodes();
    tells(&mut run, 3, 1);
    let actions = tells(&mut run, 3, 2);
    assert_eq!((cordoned(&actions), respawns(&actions)), (vec![3], vec![]), "{actions:?}");
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort { over: false, .. }]), "{actions:?}");
    for rank in 0..3 {
        run.get_ready(rank, 1, "");
    }
    assert_eq!(members(&run), [0, 1, 2], "nobody is waited for");
    run.start_all(3, 0, StateSource::Replica);
    // A process that comes there all the same is not let in, and its end is no news.
    let (reply, _) = run.ask(Ask::Register(successor(3, 1)));
    assert!(matches!(reply, Err(Refusal::Cordoned { slot: Slot(3), faults: 2, .. })), "{reply:?}");
    let restarts = run.machine.run.faults.spent.restarts;
    let ended = ProcessExit::Code(6);
    let exit = Ask::Exit { node_id: "node-1".into(), slot: Slot(3), pid: Some(1103), ended, sample: None };
    assert!(respawns(&run.tell(exit)).is_empty());
    assert_eq!((run.machine.run.faults.spent.restarts, members(&run)), (restarts, vec![0, 1, 2]));
}

#[test]
fn a_worker_that_is_only_joining_is_not_missed() {
    let mut run = both_nodes();
    tells(&mut run, 3, 1);
    tells(&mut run, 3, 2);
    for rank in 0..3 {
        run.get_ready(rank, 1, "");
    }
    run.start_all(3, 0, StateSource::Replica);
    // Slot 2 of the same node is killed, and its successor does not pass its check, twice.
    let ended = ProcessExit::Signal(9);
    run.tell(Ask::Exit { node_id: "node-1".into(), slot: Slot(2), pid: Some(102), ended, sample: None });
    run.get_ready(0, 2, "");
    run.get_ready(1, 2, "");
    fails_its_check(&mut run, 2, 1102);
    let actions = fails_its_check(&mut run, 2, 2102);
    assert_eq!(cordoned(&actions), [2], "{actions:?}");
    assert_eq!(members(&run), [0, 1], "{actions:?} {:?}", run.machine.run.phase);
}

#[test]
fn another_launcher_begins_anew_and_a_coordinator_that_was_killed_does_not() {
    let mut run = both_nodes();
    let mut past = Past::default();
    let mut take = |actions: Vec<Action>| {
        for action in actions {
            if let Action::Record(record) = action {
                past.add_record(&record);
            }
        }
    };
    take(tells(&mut run, 3, 1));
    take(tells(&mut run, 3, 2));
    assert!(past.health[&Slot(3)].cordoned, "{past:?}");
    let health = |past: &Past| {
        let mut config = config(2);
        config.past = past.clone();
        Run::new(config).machine.run.health.is_cordoned(Slot(3))
    };
    assert!(health(&past), "the next life knows it");
    // The node is launched again, as another launcher of the same machine.
    run.event(Event::NodeLineClosed("node-1".into(), StreamId(6001)));
    for slot in [2, 3] {
        let line = run.machine.run.fleet.roster.line(Slot(slot));
        if let Some(line) = line {
            let worker = run.worker(slot);
            run.event(Event::LineClosed(worker, line));
        }
    }
    run.wait(Duration::from_secs(8));
    join(&mut run, 2);
    assert!(!run.machine.run.health.is_cordoned(Slot(3)), "{:?}", run.machine.run.health);
}
