//! The coordinator dies, and another one goes on from its records.

use super::{
    mortal::{Mortal, wants},
    *,
};
use crate::core::reason::Reason;

#[test]
fn training_goes_on_as_if_nothing_had_happened() {
    let mut mortal = Mortal::at_step_ten();
    mortal.kill_coordinator();
    assert!(matches!(
        mortal.run.machine.run.voice.reason,
        Reason::Recalled { generation: Generation(1), .. }
    ));
    let reopened = mortal.reopen(0);
    let directives: Vec<_> = reopened
        .iter()
        .filter_map(|action| match action {
            Action::Tell(_, directive) => Some(directive),
            _ => None,
        })
        .collect();
    let [Directive::Assignment(assignment, Rank(0)), Directive::Lease(lease), Directive::Resume] =
        directives[..]
    else {
        panic!("{directives:?}")
    };
    assert_eq!((assignment.generation, lease.first, lease.end), (Generation(1), Step(10), Step(42)));
    mortal.reopen(1);
    // What was in flight is reported again, from the first step that is not committed.
    mortal.keep(|run| run.steps(0, 10..15));
    mortal.keep(|run| run.steps(1, 10..15));
    assert_eq!((mortal.run.committed(), mortal.run.machine.run.faults.spent.restarts), (15, 0));
    assert_eq!(mortal.run.beat(0, WorkerPhase::Forward), vec![], "it is known");
}

#[test]
fn a_worker_that_died_meanwhile_is_missed_after_the_reunion() {
    let mut mortal = Mortal::at_step_ten();
    mortal.kill_coordinator();
    mortal.reopen(0);
    mortal.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    for _ in 0..9 {
        mortal.keep(|run| run.wait(Duration::from_secs(1)));
        mortal.keep(|run| run.beat(0, WorkerPhase::Communication));
    }
    assert_eq!(mortal.run.phase(), RunPhase::Training);
    let lost = mortal.keep(|run| run.wait(Duration::from_secs(2)));
    assert_eq!(respawns(&lost), [(1, 1)]);
    assert_eq!(mortal.run.phase(), RunPhase::WaitingForWorkers);
}

#[test]
fn a_launcher_may_tell_of_a_death_at_once() {
    let mut mortal = Mortal::at_step_ten();
    mortal.kill_coordinator();
    mortal.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    assert_eq!(respawns(&mortal.keep(|run| run.kill(1))), [(1, 1)]);
}

#[test]
fn a_recovery_goes_on_after_the_coordinator_died_in_it() {
    let mut mortal = Mortal::at_step_ten();
    mortal.keep(|run| run.steps(0, 10..11));
    mortal.keep(|run| run.kill(1));
    mortal.keep(|run| run.get_ready(0, 1, ""));
    mortal.kill_coordinator();
    let (_, actions) = mortal.run.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    assert_eq!(respawns(&actions), [(1, 1)], "it is asked for again, under the same number");
    mortal.reopen(0);
    mortal.keep(|run| run.get_ready(0, 1, ""));
    mortal.keep(|run| run.replace(1, 1));
    mortal.kill_coordinator();
    for rank in 0..2 {
        mortal.reopen(rank);
    }
    // The survivor's reports of the old generation are said again, too.
    mortal.keep(|run| run.steps(0, 10..11));
    mortal.keep(|run| run.start_all(2, 11, StateSource::Replica));
    assert_eq!((mortal.run.committed(), mortal.run.machine.run.faults.spent.restarts), (11, 1));
    assert_eq!(mortal.run.machine.run.generation, Generation(2));
}

#[test]
fn orders_to_launchers_are_numbered_on() {
    let mut mortal = Mortal::at_step_ten();
    assert_eq!(respawns(&mortal.keep(|run| run.kill(1))), [(1, 1)]);
    mortal.keep(|run| run.get_ready(0, 1, ""));
    mortal.keep(|run| run.replace(1, 1));
    mortal.kill_coordinator();
    mortal.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    // Under the old number it would be taken for a repeat.
    assert_eq!(respawns(&mortal.keep(|run| run.kill(1))), [(1, 2)]);
}

#[test]
fn what_an_earlier_version_wrote_of_the_budgets_is_read() {
    let written = r#"{"restarts":2,"rescales":1,"barren":1,"barren_seats":[1]}"#;
    let spent: crate::core::failure::SpentBudgets = serde_json::from_str(written).unwrap();
    assert_eq!((spent.restarts, spent.stalled, spent.closing), (2, 1, None));
}

#[test]
fn what_people_asked_for_is_remembered() {
    let mut mortal = Mortal::at_step_ten();
    mortal.ask(Ask::CheckpointNow);
    mortal.ask(Ask::Pause);
    mortal.kill_coordinator();
    let told = mortal.reopen(0);
    assert!(told.iter().any(|action| matches!(action, Action::Tell(_, Directive::Pause))));
    assert!(told.iter().any(|action| matches!(action, Action::Tell(_, Directive::Checkpoint(1)))));
}

#[test]
fn a_run_that_is_over_is_not_called_back() {
    let mut mortal = Mortal::at_step_ten();
    for rank in 0..2 {
        let worker = mortal.run.worker(rank);
        mortal.ask(Ask::Stop { reason: "enough".into() });
        mortal.ask(Ask::Leave { worker, exit_code: 0, reason: "stopped".into() });
    }
    assert!(mortal.past.end.is_some());
    let outcome = mortal.run.machine.outcome();
    mortal.kill_coordinator();
    assert_eq!(mortal.run.machine.outcome(), outcome, "a coordinator that dies last does not change the end");
    let settled = mortal.past.clone().settled();
    let mut config = config(2);
    config.past = settled;
    let machine = Machine::new(Timestamp::default(), config);
    assert_eq!((machine.run_phase(), machine.committed()), (RunPhase::WaitingForWorkers, Step(10)));
    assert_eq!(machine.run.generation, Generation(1), "its number is not used again");
    assert!(mortal.past.slots[&Slot(0)].left == Some(0) && mortal.past.dataset.is_some());
    let forgotten = mortal.past.forgotten();
    assert_eq!((forgotten.committed, forgotten.dataset), (None, None));
}

#[test]
fn a_coordinator_of_another_version_knows_no_worker_and_no_launcher_of_the_one_before() {
    let mut mortal = Mortal::at_step_ten();
    mortal.run.machine.run.config.version = "9.9.9".into();
    mortal.begin_life(false);
    assert_eq!((mortal.run.phase(), mortal.run.committed()), (RunPhase::WaitingForWorkers, 10));
    let (reply, _) = mortal.run.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    assert_eq!(reply, Err(Refusal::UnknownNode(NODE.into())));
    let (reply, _) = mortal.run.follow(0, 77);
    assert!(matches!(reply, Err(Refusal::UnknownWorker(_))), "{reply:?}");
    let (reply, _) = mortal.run.ask(wants(NODE, "node-a", None, 2));
    assert_eq!(reply, Err(Refusal::Version { theirs: VERSION.into(), ours: "9.9.9".into() }));
    // Of its own version they are what they were.
    mortal.run.machine.run.config.version = VERSION.into();
    mortal.begin_life(true);
    assert_eq!(mortal.run.phase(), RunPhase::Training);
}

#[test]
fn a_report_that_overtakes_those_that_were_forgotten_is_reported_again() {
    let mut mortal = Mortal::at_step_ten();
    mortal.keep(|run| run.steps(0, 10..12));
    mortal.kill_coordinator();
    // A call that was under way when the coordinator died comes before the line is open again.
    mortal.keep(|run| run.steps(0, 12..13));
    assert_eq!((mortal.run.committed(), mortal.run.phase()), (10, RunPhase::Training));
    mortal.reopen(0);
    mortal.keep(|run| run.steps(0, 10..13));
    mortal.keep(|run| run.steps(1, 10..13));
    assert_eq!(mortal.run.committed(), 13);
}

#[test]
fn what_ends_a_generation_while_nobody_coordinates_is_not_blamed_on_an_older_fault() {
    let mut mortal = Mortal::at_step_ten();
    mortal.keep(|run| run.kill(1));
    mortal.keep(|run| run.get_ready(0, 1, ""));
    mortal.keep(|run| run.replace(1, 1));
    mortal.keep(|run| run.start_all(2, 10, StateSource::Replica));
    mortal.keep(|run| run.get_ready(0, 2, "rank 1 is gone"));
    mortal.kill_coordinator();
    let incident = mortal.run.machine.run.faults.incident.as_ref().expect("the generation is broken");
    assert_eq!(incident.cause, None, "that fault was of generation 1");
}

#[test]
fn a_checkpoint_that_was_removed_is_not_offered_again() {
    use crate::core::event::{CheckpointReport, CheckpointState};
    let mut mortal = Mortal::at_step_ten();
    let (state, path) = (CheckpointState::Complete, "checkpoints/step-8".to_owned());
    let report = CheckpointReport { step: Step(8), state, path, bytes: Bytes(9) };
    mortal.ask(Ask::Checkpoint(id(0), report));
    // Its successor finds nothing in the output directory.
    mortal.kill_coordinator();
    let status = mortal.run.status();
    assert_eq!(status.checkpoints, []);
}

/// A launcher is cut off until it is given up with its workers, while a successor of rank 1 is asked of it.
fn given_up_with_a_respawn_pending() -> Mortal {
    let mut mortal = Mortal::at_step_ten();
    mortal.keep(|run| run.event(Event::NodeLineClosed(NODE.into(), NODE_LINE)));
    assert_eq!(respawns(&mortal.keep(|run| run.kill(1))), [], "nobody can be told");
    mortal.keep(|run| run.get_ready(0, 1, ""));
    mortal.keep(|run| run.wait(Duration::from_secs(4)));
    assert!(mortal.past.nodes.is_empty(), "it is gone");
    mortal
}

#[test]
fn a_launcher_that_was_given_up_comes_back_to_what_it_was_to_do() {
    let mut mortal = given_up_with_a_respawn_pending();
    mortal.kill_coordinator();
    let follow = || Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE };
    assert_eq!(mortal.run.ask(follow()).0, Err(Refusal::UnknownNode(NODE.into())));
    mortal.ask(Ask::JoinNode(NodeClaim {
        origin: origin(),
        node_id: NODE.into(),
        host: "node-a".into(),
        local_world: 2,
        node_rank: Some(0),
        returns: true,
    }));
    let asked = respawns(&mortal.ask(follow()));
    assert_eq!(asked, [(0, 1), (1, 1)], "its workers are not started by itself");
}

#[test]
fn a_launcher_that_comes_back_by_itself_is_remembered() {
    let mut mortal = given_up_with_a_respawn_pending();
    let follow = || Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE };
    assert_eq!(respawns(&mortal.ask(follow())), [(0, 1), (1, 1)]);
    mortal.kill_coordinator();
    let (reply, actions) = mortal.run.ask(follow());
    assert_eq!((reply, respawns(&actions)), (Ok(Reply::Done), vec![(0, 1), (1, 1)]));
}

#[test]
fn a_line_for_people_is_reported_once_and_after_a_restart_rather_twice_than_not_at_all() {
    let mut mortal = Mortal::at_step_ten();
    let worker = mortal.run.worker(0);
    let message = |mortal: &mut Mortal, sequence| {
        let note = Ask::Note { worker, sequence, text: "the checkpoint is late".into(), hardware: false };
        let actions = mortal.ask(note);
        let told = news(&actions);
        matches!(told[..], [News::Note(Slot(0), _)])
    };
    assert_eq!([1, 1, 2, 1].map(|sequence| message(&mut mortal, sequence)), [true, false, true, false]);
    mortal.kill_coordinator();
    // The answer was lost with the one before, and perhaps the line, too.
    assert_eq!([2, 2, 3].map(|sequence| message(&mut mortal, sequence)), [true, false, true]);
}
