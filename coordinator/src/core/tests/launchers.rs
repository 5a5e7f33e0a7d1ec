//! Launchers and their processes: ends that are told, lines that break, and who is asked for another process.

use super::{
    mortal::wants,
    recovery::{at_step_ten, survived},
    *,
};
use crate::{
    core::{event::ProcessExit, failure::Failure, news::MemberChange},
    options::CauseKind,
};

#[test]
fn a_late_report_of_an_exit_does_not_hit_the_successor() {
    let mut run = at_step_ten();
    run.event(Event::LineClosed(id(1), StreamId(1)));
    run.wait(Duration::from_millis(800));
    run.get_ready(0, 1, "");
    run.replace(1, 1);
    let exit = Ask::Exit {
        node_id: NODE.into(),
        slot: Slot(1),
        pid: Some(101),
        ended: ProcessExit::Signal(9),
        sample: None,
    };
    assert_eq!(run.tell(exit), vec![]);
    assert_eq!(run.phase(), RunPhase::Starting);
}

#[test]
fn a_successor_may_come_before_the_old_process_is_missed() {
    let mut run = at_step_ten();
    run.event(Event::LineClosed(id(1), StreamId(1)));
    let (reply, actions) = run.ask(Ask::Register(successor(1, 1)));
    assert!(matches!(reply, Ok(Reply::Registered(_))));
    assert!(survived(&actions).is_some_and(|text| text.contains("another process took its place")));
    let stale = run.ask(Ask::Steps(id(1), vec![run.report(1, 10)])).0;
    assert_eq!(stale, Err(Refusal::UnknownWorker(id(1))));
}

#[test]
fn a_launcher_that_opens_its_line_again_is_asked_again() {
    let mut run = at_step_ten();
    run.event(Event::NodeLineClosed(NODE.into(), NODE_LINE));
    assert_eq!(respawns(&run.kill(1)), []);
    let (_, actions) = run.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    assert_eq!(respawns(&actions), [(1, 1)]);
    run.replace(1, 1);
    let (_, actions) = run.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    assert_eq!(respawns(&actions), [], "somebody has come");
}

/// The launcher's line is closed, while these ranks heartbeat.
fn cut_off(run: &mut Run, ranks: std::ops::Range<u32>, seconds: u32) -> Vec<Action> {
    run.event(Event::NodeLineClosed(NODE.into(), NODE_LINE));
    let second = |_| {
        let actions = run.wait(Duration::from_secs(1));
        ranks.clone().for_each(|rank| drop(run.beat(rank, WorkerPhase::Forward)));
        actions
    };
    (0..seconds).flat_map(second).collect()
}

#[test]
fn a_launcher_that_is_stopped_keeps_its_workers_and_its_place() {
    let mut run = at_step_ten();
    let actions = cut_off(&mut run, 0..2, 18);
    assert_eq!((news(&actions), run.machine.run.faults.spent.restarts), (vec![], 0));
    let kept = Refusal::PlaceKept { node_rank: 0, host: "node-a".into() };
    for host in ["node-a", "node-b"] {
        assert_eq!(run.ask(wants("other", host, None, 2)).0, Err(kept.clone()));
    }
    // A worker that is lost meanwhile is started by it once it goes on.
    run.event(Event::LineClosed(id(1), StreamId(1)));
    assert_eq!(respawns(&cut_off(&mut run, 0..1, 6)), []);
    assert_eq!(run.machine.run.faults.spent.restarts, 1);
    let actions = run.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    assert_eq!(respawns(&actions), [(1, 1)]);
}

#[test]
fn what_a_stopped_launcher_was_to_start_is_late_only_from_when_it_goes_on() {
    let mut run = at_step_ten();
    assert_eq!(respawns(&run.kill(1)), [(1, 1)], "its line is still open");
    run.get_ready(0, 1, "");
    cut_off(&mut run, 0..1, 40);
    let mut actions = run.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    for _ in 0..3 {
        actions.extend(run.wait(Duration::from_secs(1)));
        run.beat(0, WorkerPhase::Joining);
    }
    let late = |news: &&News| matches!(news, News::Standstill(..) | News::Failure(..));
    assert_eq!(news(&actions).into_iter().find(late), None);
}

#[test]
fn a_launcher_that_was_given_up_is_asked_for_everybody_once_it_is_back() {
    let mut run = at_step_ten();
    run.event(Event::NodeLineClosed(NODE.into(), NODE_LINE));
    run.event(Event::LineClosed(id(1), StreamId(1)));
    run.wait(Duration::from_secs(4));
    assert!(run.machine.run.fleet.nodes.at(0).is_some_and(|node| node.gone));
    // A process that it had started before comes late, and is lost while nobody can be told.
    run.tell(Ask::Register(successor(0, 1)));
    run.wait(Duration::from_secs(4));
    assert_eq!(run.machine.run.fleet.roster.present(), 0);
    let actions = run.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    assert_eq!(respawns(&actions), [(0, 2), (1, 1)]);
    assert_eq!(run.machine.run.faults.spent.restarts, 2, "rank 0 was lost twice");
}

#[test]
fn a_node_whose_line_stays_closed_is_gone_once_its_workers_are() {
    let mut run = at_step_ten();
    cut_off(&mut run, 0..2, 4);
    let actions = run.wait(Duration::from_secs(4));
    assert!(survived(&actions).is_some_and(|text| text.contains("no sign of life for 3.0 s")), "{actions:?}");
    let gone = |news: &&News| matches!(news, News::Member { change: MemberChange::NodeGone { .. }, .. });
    assert_eq!(news(&actions).into_iter().filter(gone).count(), 1);
    assert_eq!((run.phase(), run.machine.run.faults.spent.restarts), (RunPhase::WaitingForWorkers, 1));
    // Another launcher takes the place, and starts all workers by itself.
    let other = wants("other", "node-b", None, 2);
    assert_eq!(run.ask(other).0, Ok(Reply::Placed { node_rank: 0, first: Slot(0) }));
    let other = Ask::FollowNode { node_id: "other".into(), stream: NODE_LINE };
    assert_eq!(respawns(&run.tell(other)), []);
    run.replace(0, 1);
    run.replace(1, 1);
    run.start_all(2, 10, StateSource::Checkpoint);
    assert_eq!(run.phase(), RunPhase::Starting);
}

#[test]
fn a_process_that_a_new_launcher_has_started_is_not_started_again() {
    let mut run = at_step_ten();
    run.event(Event::NodeLineClosed(NODE.into(), NODE_LINE));
    for rank in 0..2 {
        run.event(Event::LineClosed(id(rank), StreamId(u64::from(rank))));
    }
    run.wait(Duration::from_millis(100));
    let join = wants("other", "node-a", None, 2);
    assert!(run.ask(join).0.is_ok());
    run.machine.run.config.restarted = true;
    run.tell(Ask::FollowNode { node_id: "other".into(), stream: NODE_LINE });
    assert_eq!(respawns(&run.wait(Duration::from_secs(1))), []);
    // Unless it has ended, too.
    let ended = ProcessExit::Code(1);
    let exit = Ask::Exit { node_id: "other".into(), slot: Slot(1), pid: Some(900), ended, sample: None };
    assert_eq!(respawns(&run.tell(exit)), [(1, 1)]);
}

#[test]
fn a_failure_before_registration_is_told_with_the_exit() {
    let mut run = Run::new(config(2));
    run.gather(1);
    let mut failure = Failure::of_run(CauseKind::Io, "the disk is on fire".into());
    failure.slot = Some(Slot(1));
    run.tell(Ask::Failure { run_id: RUN.into(), worker: None, failure, sample: None });
    assert_eq!(run.phase(), RunPhase::WaitingForWorkers);
    let exit = Ask::Exit {
        node_id: NODE.into(),
        slot: Slot(1),
        pid: Some(7),
        ended: ProcessExit::Code(4),
        sample: None,
    };
    let actions = run.tell(exit);
    assert!(survived(&actions).is_some_and(|text| text.contains("the disk is on fire")));
    assert_eq!(respawns(&actions), [(1, 1)]);
}
