//! The end of a run whose state is intact: survivors write a checkpoint first.

use super::{mortal::Mortal, recovery::at_step_ten, *};
use crate::{
    core::{
        event::{CheckpointReport, CheckpointState},
        failure::Failure,
    },
    options::{CauseKind, Outcome},
};

/// A world of three at step 10, of which one worker more is lost than may be.
fn spent() -> (Run, Vec<Action>) {
    let mut run = Run::fragile(3);
    for rank in 0..3 {
        run.steps(rank, 0..10);
    }
    let actions = run.kill(1);
    (run, actions)
}

/// The two that are left are in the last generation.
fn saving() -> Run {
    let (mut run, _) = spent();
    run.get_ready(0, 1, "");
    run.get_ready(2, 1, "");
    run
}

fn saved(run: &mut Run, rank: u32, step: u64, state: CheckpointState) -> Vec<Action> {
    let path = format!("checkpoints/{}", Step(step).checkpoint_dir());
    let report = CheckpointReport { step: Step(step), state, path, bytes: Bytes(9) };
    run.tell(Ask::Checkpoint(run.worker(rank), report))
}

/// The failure that ended the run.
fn end(actions: &[Action]) -> Option<Arc<Failure>> {
    news(actions).into_iter().find_map(|news| match news {
        News::Failure(failure, _) if failure.fatal => Some(failure.clone()),
        _ => None,
    })
}

fn assigned(actions: &[Action], rank: u32) -> Option<(u32, bool)> {
    told(actions, rank.into()).into_iter().find_map(|directive| match directive {
        Directive::Assignment(assignment, _) => Some((assignment.world(), assignment.closing)),
        _ => None,
    })
}

#[test]
fn survivors_of_a_spent_budget_save_and_the_end_names_the_checkpoint() {
    let (mut run, actions) = spent();
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort { over: false, .. }]), "{actions:?}");
    assert_eq!((respawns(&actions), end(&actions)), (vec![], None));
    run.get_ready(0, 1, "");
    let formed = run.get_ready(2, 1, "");
    assert_eq!((assigned(&formed, 0), assigned(&formed, 2)), (Some((2, true)), Some((2, true))));
    run.start(0, 10, StateSource::Carried).0.unwrap();
    let started = run.start(2, 10, StateSource::Replica).1;
    assert!(!told(&started, 0).iter().any(|told| matches!(told, Directive::Lease(_))), "{started:?}");
    assert_eq!(run.phase(), RunPhase::Stopping);
    assert_eq!(end(&run.get_ready(2, 2, "")), None, "the first rank tells of the checkpoint");
    saved(&mut run, 0, 10, CheckpointState::Complete);
    let over = run.get_ready(0, 2, "");
    let failure = end(&over).expect("the run is over");
    let from = "signal 9: by hand, or by the kernel because memory ran out; restarts of this launch are used up (--max-restarts=0); start again to resume from checkpoints/step-00000010";
    assert!(failure.message.ends_with(from), "{}", failure.message);
    assert_eq!((failure.slot, failure.kind), (Some(Slot(1)), CauseKind::WorkerLost));
    assert!(matches!(told(&over, 0)[..], [Directive::Abort { over: true, .. }]));
    for rank in [0, 2] {
        run.tell(Ask::Leave { worker: run.worker(rank), exit_code: 1, reason: "over".into() });
    }
    let Some(Outcome::Failed(cause)) = run.machine.outcome() else { panic!() };
    assert_eq!(cause.slot, Some(Slot(1)));
}

#[test]
fn a_run_that_has_saved_all_it_learned_ends_at_once_and_names_the_checkpoint() {
    let mut run = Run::fragile(3);
    for rank in 0..3 {
        run.steps(rank, 0..10);
    }
    saved(&mut run, 0, 10, CheckpointState::Complete);
    let failure = end(&run.kill(1)).expect("the run is over");
    assert!(
        failure.message.ends_with("; start again to resume from checkpoints/step-00000010"),
        "{}",
        failure.message
    );
}

#[test]
fn a_state_beyond_what_was_reported_is_committed_with_its_checkpoint() {
    let mut run = saving();
    run.start(0, 11, StateSource::Carried).0.unwrap();
    run.start(2, 11, StateSource::Carried).0.unwrap();
    assert_eq!((run.committed(), run.phase()), (11, RunPhase::Stopping));
}

#[test]
fn whatever_hinders_the_last_checkpoint_the_run_has_failed_with_what_began_it() {
    type Hindrance = fn(&mut Run) -> Vec<Action>;
    let cases: [(&str, Hindrance); 6] = [
        ("rank 0 is lost", |run| run.kill(0)),
        ("its peer is gone", |run| run.get_ready(2, 2, "its peer is gone")),
        ("the log says why", |run| {
            saved(run, 0, 10, CheckpointState::Failed);
            run.get_ready(0, 2, "")
        }),
        ("have the older state of step 4", |run| run.start(0, 4, StateSource::Checkpoint).1),
        ("left before the end of the run", |run| {
            run.tell(Ask::Leave { worker: run.worker(0), exit_code: 0, reason: "why not".into() })
        }),
        ("too long", |run| {
            let mut actions = Vec::new();
            for _ in 0..70 {
                actions.extend(run.wait(Duration::from_secs(1)));
                for rank in [0, 2] {
                    if run.phase() != RunPhase::Failed {
                        let beat = run.moving_beat(rank, WorkerPhase::Checkpoint, (2, 2));
                        run.tell(Ask::Heartbeat(beat));
                    }
                }
            }
            actions
        }),
    ];
    for (because, hinder) in cases {
        let mut run = saving();
        let actions = hinder(&mut run);
        let failure = end(&actions).unwrap_or_else(|| panic!("{because}: {actions:?}"));
        let found = (failure.slot, failure.message.contains("signal 9"), failure.message.contains(because));
        assert_eq!(found, (Some(Slot(1)), true, true), "{because}: {}", failure.message);
        assert!(failure.message.ends_with("there is no checkpoint to resume from"), "{}", failure.message);
        assert_eq!((run.committed(), run.phase()), (10, RunPhase::Failed), "nothing is rolled back");
    }
}

#[test]
fn what_is_saved_already_is_not_saved_again() {
    let mut run = Run::fragile(2);
    run.steps(0, 0..10);
    run.steps(1, 0..10);
    saved(&mut run, 0, 10, CheckpointState::Complete);
    assert!(end(&run.kill(1)).is_some());
}

#[test]
fn a_second_loss_leaves_it_to_the_others_and_the_last_one_ends_it() {
    let (mut run, _) = spent();
    assert_eq!(end(&run.kill(2)), None);
    let mut other = run.machine.clone();
    let formed = run.get_ready(0, 1, "");
    assert_eq!(assigned(&formed, 0), Some((1, true)));
    std::mem::swap(&mut run.machine, &mut other);
    assert!(end(&run.kill(0)).is_some_and(|failure| failure.slot == Some(Slot(1))));
}

#[test]
fn generations_that_get_nowhere_and_successors_that_do_not_come_end_with_a_checkpoint_too() {
    let mut run = at_step_ten();
    (run.machine.run.config.budgets.restarts, run.machine.run.faults.budgets.restarts) = (100, 100);
    // The first of them had committed steps.
    for life in 1..=4 {
        run.kill(1);
        run.get_ready(0, life.into(), "");
        let formed = run.replace(1, life);
        // The last one is of the survivor alone: a successor has nothing to save.
        let expected = if life < 4 { (2, false) } else { (1, true) };
        assert_eq!(assigned(&formed, 0), Some(expected), "{formed:?}");
        if life < 4 {
            run.start_all(2, 10, StateSource::Replica);
        }
    }
    let mut run = at_step_ten();
    run.kill(1);
    run.get_ready(0, 1, "");
    let mut formed = Vec::new();
    for _ in 0..61 {
        run.beat(0, WorkerPhase::Joining);
        formed.extend(run.wait(Duration::from_secs(1)));
    }
    assert_eq!(assigned(&formed, 0), Some((1, true)), "{formed:?}");
}

fn fails(rank: u32, kind: CauseKind) -> Ask {
    let failure = Failure::of_run(kind, format!("{kind:?}"));
    Ask::Failure { run_id: RUN.into(), worker: Some(id(rank)), failure, sample: None }
}

#[test]
fn what_one_rank_cannot_use_any_more_leaves_the_others_to_save() {
    for kind in [CauseKind::BadInput, CauseKind::OutOfMemory, CauseKind::Numeric] {
        let mut run = at_step_ten();
        let actions = run.tell(fails(1, kind));
        assert_eq!((respawns(&actions), end(&actions)), (vec![], None), "{kind:?}");
        assert_eq!(assigned(&run.get_ready(0, 1, ""), 0), None, "the other may not have let go of it yet");
        let leave = Ask::Leave { worker: id(1), exit_code: 3, reason: "failed".into() };
        let formed = run.tell(leave);
        assert_eq!(assigned(&formed, 0), Some((1, true)), "{formed:?}");
        run.start(0, 10, StateSource::Replica).0.unwrap();
        saved(&mut run, 0, 10, CheckpointState::Complete);
        let over = run.get_ready(0, 2, "");
        let failure = end(&over).expect("the run is over");
        assert_eq!((failure.slot, failure.kind), (Some(Slot(1)), kind));
        assert!(failure.message.ends_with("resume from checkpoints/step-00000010"), "{}", failure.message);
        run.tell(Ask::Leave { worker: id(0), exit_code: 1, reason: "over".into() });
        assert!(matches!(run.machine.outcome(), Some(Outcome::Failed(_))));
    }
}

#[test]
fn ranks_that_fail_alike_end_the_run_when_the_last_of_them_has_left() {
    let mut run = at_step_ten();
    for rank in 0..2 {
        assert_eq!(end(&run.tell(fails(rank, CauseKind::BadInput))), None);
    }
    let leave = Ask::Leave { worker: id(0), exit_code: 3, reason: "failed".into() };
    let failure = end(&run.tell(leave)).expect("nobody is left");
    assert_eq!((failure.slot, failure.kind), (Some(Slot(0)), CauseKind::BadInput));
    assert!(
        failure.message.contains("no remaining rank has any part of the training state"),
        "{}",
        failure.message
    );
}

#[test]
fn ranks_that_disagree_save_nothing() {
    let mut run = at_step_ten();
    let failure = end(&run.tell(fails(1, CauseKind::Disagreement))).expect("the run is over");
    assert_eq!((failure.kind, &*failure.message), (CauseKind::Disagreement, "Disagreement"));
}

#[test]
fn a_coordinator_that_is_killed_meanwhile_sees_it_through() {
    let mut fragile = config(2);
    fragile.budgets.restarts = 0;
    let mut mortal = Mortal::new(fragile);
    mortal.ask(super::mortal::wants(NODE, "node-a", None, 2));
    mortal.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    mortal.train_to_ten();
    mortal.keep(|run| run.kill(1));
    mortal.kill_coordinator();
    mortal.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    mortal.reopen(0);
    let formed = mortal.keep(|run| run.get_ready(0, 1, ""));
    let closing = formed.iter().any(|action| {
        matches!(action, Action::Tell(_, Directive::Assignment(assignment, _)) if assignment.closing)
    });
    assert!(closing, "{formed:?}");
    mortal.kill_coordinator();
    mortal.reopen(0);
    mortal.keep(|run| saved(run, 0, 10, CheckpointState::Complete));
    let over = mortal.keep(|run| run.get_ready(0, 2, ""));
    assert!(end(&over).is_some_and(|failure| failure.message.contains("step-00000010")), "{over:?}");
}
