//! Faults that are survived: who is lost, where the next generation starts, what it costs.

use super::*;
use crate::core::{
    action::Record,
    checkpoints::CheckpointEntry,
    event::{CheckpointState, ProcessExit},
    invariants,
    reason::Reason,
    report::{Skip, SkipCause},
    roster::Respawn,
};
use crate::options::{CauseKind, Outcome};

pub(super) fn survived(actions: &[Action]) -> Option<String> {
    news(actions).into_iter().find_map(|news| match news {
        News::Failure(failure, _) if !failure.fatal => Some(failure.to_string()),
        _ => None,
    })
}

fn recovery(actions: &[Action]) -> Option<String> {
    news(actions).into_iter().find_map(|news| match news {
        News::Recovered(recovery) => Some(recovery.to_string()),
        _ => None,
    })
}

/// Two workers that have committed steps 0..10; rank 1 has the slot of the victim-to-be.
pub(super) fn at_step_ten() -> Run {
    let mut run = Run::started(2);
    run.steps(0, 0..10);
    run.steps(1, 0..10);
    run
}

#[test]
fn a_killed_worker_is_called_back_and_training_goes_on_where_it_was() {
    let mut run = at_step_ten();
    let lost = run.kill(1);
    let line = "rank 1 on node-a, joining: its process was killed by signal 9";
    assert!(survived(&lost).is_some_and(|text| text.starts_with(line)), "{lost:?}");
    assert!(matches!(told(&lost, 0)[..], [Directive::Abort { generation: Generation(1), over: false, .. }]));
    assert_eq!(respawns(&lost), [(1, 1)]);
    assert!(lost.contains(&Action::Record(Record::Broken { generation: Generation(1) })));

    run.wait(Duration::from_millis(620));
    run.get_ready(0, 1, "");
    let formed = run.replace(1, 1);
    let [Directive::Assignment(assignment, Rank(0))] = told(&formed, 0)[..] else { panic!("{formed:?}") };
    assert_eq!(assignment.generation, Generation(2));
    let started = run.start_all(2, 10, StateSource::Replica);
    assert_eq!(
        recovery(&started).unwrap(),
        "generation 2: 2 of 2 workers, from step 10 (state: replica), 0.62 s after rank 1 was lost; restarts 1 of 3"
    );
    run.steps(0, 10..11);
    run.steps(1, 10..11);
    assert_eq!((run.committed(), run.phase()), (11, RunPhase::Training));
}

#[test]
fn steps_that_a_lost_rank_could_not_report_are_committed_by_the_start() {
    let mut run = at_step_ten();
    run.steps(0, 10..12);
    assert_eq!(run.committed(), 10);
    run.kill(1);
    run.get_ready(0, 1, "");
    run.replace(1, 1);
    let started = run.start_all(2, 12, StateSource::Replica);
    let records: Vec<_> = started
        .iter()
        .filter_map(|action| match action {
            Action::Record(Record::Step(step)) => Some((step.step.0, step.generation.0, step.reports)),
            _ => None,
        })
        .collect();
    assert_eq!(records, [(10, 1, 1), (11, 1, 1)]);
    assert_eq!(run.committed(), 12);
}

#[test]
fn a_survivor_may_report_its_last_steps_after_the_successor_has_started() {
    let mut run = at_step_ten();
    run.kill(1);
    run.get_ready(0, 1, "");
    run.replace(1, 1);
    // The new worker knows that rank 0 has done step 10; its report is still on the way.
    let (reply, early) = run.start(1, 11, StateSource::Replica);
    assert_eq!((reply, recovery(&early)), (Ok(Reply::Done), None));
    assert!(recovery(&run.steps(0, 10..11)).is_some());
    assert_eq!(run.committed(), 11);
    assert_eq!(run.start(0, 11, StateSource::Replica).0, Ok(Reply::Done));
}

#[test]
fn a_step_that_nobody_could_report_is_committed_when_all_ranks_say_that_it_was_done() {
    let mut run = at_step_ten();
    run.kill(1);
    run.get_ready(0, 1, "");
    run.replace(1, 1);
    // Rank 1 died in the last collective of step 10: both parts are of the version after it, and rank 0 could
    // not finish it.
    assert_eq!(recovery(&run.start(0, 11, StateSource::Replica).1), None);
    let started = run.start(1, 11, StateSource::Replica).1;
    assert!(recovery(&started).is_some(), "{started:?}");
    assert!(started.iter().any(|action| {
        matches!(action, Action::Record(Record::Step(step)) if (step.step, step.reports) == (Step(10), 0))
    }));
    assert_eq!(run.committed(), 11);
}

#[test]
fn a_start_beyond_what_was_leased_ends_the_run() {
    let mut run = at_step_ten();
    run.kill(1);
    run.get_ready(0, 1, "");
    run.replace(1, 1);
    run.start_all(2, 60, StateSource::Replica);
    assert_eq!(run.phase(), RunPhase::Failed);
}

#[test]
fn ranks_that_disagree_where_to_start_end_the_run() {
    let mut run = at_step_ten();
    run.kill(1);
    run.get_ready(0, 1, "");
    run.replace(1, 1);
    drop(run.start(0, 10, StateSource::Carried));
    let (_, actions) = run.start(1, 9, StateSource::Carried);
    let [News::Failure(failure, _), ..] = news(&actions)[..] else { panic!("{actions:?}") };
    assert_eq!((failure.kind, failure.slot), (CauseKind::Disagreement, Some(Slot(1))));
}

#[test]
fn several_losses_at_once_are_one_fault_and_roll_back_to_the_checkpoint() {
    let mut run = at_step_ten();
    run.kill(1);
    run.kill(0);
    run.replace(0, 1);
    run.replace(1, 1);
    let started = run.start_all(2, 4, StateSource::Checkpoint);
    assert!(news(&started).contains(&&News::RolledBack { from: Step(10), to: Step(4) }));
    let text = recovery(&started).unwrap();
    assert!(text.contains("ranks 0, 1 were lost; restarts 1 of 3"), "{text}");
    assert_eq!(run.committed(), 4);
    run.steps(0, 4..5);
    run.steps(1, 4..5);
    assert_eq!(run.committed(), 5);
}

#[test]
fn a_complete_checkpoint_proves_steps_whose_reports_are_gone() {
    use crate::core::event::CheckpointReport;
    let mut run = at_step_ten();
    let report = CheckpointReport {
        step: Step(12),
        state: CheckpointState::Complete,
        path: "c".into(),
        bytes: Bytes(1),
    };
    run.tell(Ask::Checkpoint(id(0), report));
    run.kill(1);
    run.kill(0);
    run.replace(0, 1);
    run.replace(1, 1);
    let actions = run.start_all(2, 12, StateSource::Checkpoint);
    assert_eq!((run.committed(), run.phase()), (12, RunPhase::Starting));
    let proven = |action: &Action| match action {
        Action::Record(Record::Step(step)) => Some((step.step.0, step.generation.0, step.world)),
        _ => None,
    };
    // An earlier generation than the last may have taken them, which nobody has heard of.
    assert_eq!(actions.iter().filter_map(proven).collect::<Vec<_>>(), [(10, 2, 0), (11, 2, 0)]);
}

#[test]
fn a_step_that_a_checkpoint_alone_proves_is_left_out_if_it_says_so() {
    let skipped = Skip { cause: SkipCause::Loss, samples: vec![4] };
    let mut config = config(1);
    config.checkpoints = vec![CheckpointEntry {
        step: Step(12),
        path: String::new(),
        bytes: Bytes(0),
        state: CheckpointState::Complete,
    }];
    config.skipped = [(Step(3), skipped.clone()), (Step(11), skipped.clone())].into();
    config.past.committed = Some(Step(10));
    let mut run = Run::new(config);
    run.gather(1);
    run.get_ready(0, 0, "");
    let actions = run.start_all(1, 12, StateSource::Checkpoint);
    let proven: Vec<_> = actions
        .iter()
        .filter_map(|action| match action {
            Action::Record(Record::Step(step)) => Some((step.step.0, step.skipped.clone())),
            _ => None,
        })
        .collect();
    assert_eq!(proven, [(10, None), (11, Some(skipped))]);
    assert!(run.machine.run.progress.skipped.contains(&Step(11)));
}

#[test]
fn ranks_that_lose_each_other_form_a_new_generation_without_a_loss() {
    let mut run = at_step_ten();
    let broken = run.get_ready(0, 1, "rank 1 is gone (collective 12, all_reduce)");
    assert!(matches!(told(&broken, 1)[..], [Directive::Abort { over: false, .. }]));
    assert_eq!(told(&broken, 0), [] as [&Directive; 0], "it has left by itself");
    let formed = run.get_ready(1, 1, "aborted");
    assert!(survived(&formed).is_some_and(|text| text.contains("rank 1 is gone (collective 12")));
    assert!(matches!(told(&formed, 1)[..], [Directive::Assignment(..)]));
    let started = run.start_all(2, 10, StateSource::Carried);
    assert!(recovery(&started).unwrap().contains("lost their connections to each other; restarts 1 of 3"));
}

#[test]
fn a_victim_that_speaks_first_does_not_take_the_blame() {
    let mut run = at_step_ten();
    run.get_ready(0, 1, "rank 1 is gone");
    let lost = run.kill(1);
    assert!(survived(&lost).is_some_and(|text| text.starts_with("rank 1 on node-a")));
    run.replace(1, 1);
    run.start_all(2, 10, StateSource::Replica);
    let status = run.status();
    let failure = status.failure.unwrap();
    assert_eq!((failure.slot, failure.fatal), (Some(Slot(1)), false));
    assert_eq!(failure.victims.iter().copied().collect::<Vec<_>>(), [Slot(0)]);
    assert_eq!(status.spent.restarts, 1);
}

#[test]
fn a_repeated_or_stale_ready_changes_nothing() {
    let mut run = at_step_ten();
    assert_eq!(run.get_ready(0, 0, ""), vec![]);
    run.kill(1);
    run.get_ready(0, 1, "");
    run.get_ready(0, 1, "");
    run.replace(1, 1);
    // The answer to its Ready was lost, and it said it once more.
    assert_eq!(run.get_ready(0, 1, ""), vec![]);
    assert_eq!(run.phase(), RunPhase::Starting);
}

#[test]
fn the_budget_is_kept_and_the_last_fault_named() {
    let mut run = at_step_ten();
    for life in 1..=3 {
        run.kill(1);
        run.get_ready(0, u64::from(life), "");
        run.replace(1, life);
        run.start_all(2, 9 + u64::from(life), StateSource::Replica);
        for rank in 0..2 {
            run.steps(rank, 9 + u64::from(life)..10 + u64::from(life));
        }
    }
    run.kill(1);
    run.get_ready(0, 4, "");
    let last = run.get_ready(0, 5, "");
    assert!(matches!(told(&last, 0)[..], [Directive::Abort { over: true, .. }]));
    let [News::Failure(failure, _), ..] = news(&last)[..] else { panic!("{last:?}") };
    assert!(failure.fatal && failure.message.contains("signal 9"));
    run.tell(Ask::Leave { worker: id(0), exit_code: 4, reason: "over".into() });
    assert!(matches!(run.machine.outcome(), Some(Outcome::Failed(_))));
}

#[test]
fn a_worker_that_dies_again_before_it_is_ready_counts_again() {
    let mut run = at_step_ten();
    run.kill(1);
    for pid in [1101, 2101] {
        let ended = ProcessExit::Code(1);
        let actions =
            run.tell(Ask::Exit { node_id: NODE.into(), slot: Slot(1), pid: Some(pid), ended, sample: None });
        assert_eq!(respawns(&actions).len(), 1, "{actions:?}");
        let exit = Ask::Exit { node_id: NODE.into(), slot: Slot(1), pid: Some(pid), ended, sample: None };
        assert_eq!(run.tell(exit), vec![], "a repeated report is no news");
    }
    let ended = ProcessExit::Code(1);
    run.tell(Ask::Exit { node_id: NODE.into(), slot: Slot(1), pid: Some(3101), ended, sample: None });
    assert!(run.machine.run.faults.closing().is_some());
}

#[test]
fn three_generations_without_a_step_end_the_run() {
    let mut config = config(1);
    config.budgets.restarts = 100;
    let mut run = Run::started_with(config);
    for life in 1..3 {
        run.kill(0);
        run.replace(0, life);
        run.start_all(1, 0, StateSource::Fresh);
    }
    run.kill(0);
    let last = run.replace(0, 3);
    let cause = news(&last).into_iter().find_map(|news| match news {
        News::Failure(failure, _) if failure.fatal => Some(failure.kind),
        _ => None,
    });
    assert_eq!(cause, Some(CauseKind::NoProgress));
}

#[test]
fn generations_without_a_step_are_counted_on_by_a_coordinator_that_was_started_again() {
    let mut config = config(1);
    config.budgets.restarts = 100;
    let mut mortal = super::mortal::Mortal::new(config);
    mortal.ask(super::mortal::wants(NODE, "node-a", None, 1));
    mortal.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    for life in 0..3 {
        mortal.keep(|run| run.replace(0, life));
        mortal.keep(|run| run.start_all(1, 0, StateSource::Fresh));
        assert_eq!(mortal.run.machine.run.faults.spent.stalled, life, "one for each that was lost");
        mortal.kill_coordinator();
        mortal.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
        mortal.reopen(0);
        mortal.keep(|run| run.kill(0));
    }
    mortal.keep(|run| run.replace(0, 3));
    assert_eq!(mortal.run.phase(), RunPhase::Failed);
}

#[test]
fn faults_that_have_nothing_to_do_with_each_other_are_no_loop() {
    let mut config = config(2);
    config.budgets.restarts = 20;
    let mut run = Run::started_with(config);
    for life in 1..10 {
        let (lost, stays) = (life % 2, (life + 1) % 2);
        run.kill(lost);
        run.get_ready(stays, life.into(), "");
        run.replace(lost, life);
        run.start_all(2, 0, StateSource::Replica);
        assert_eq!(run.phase(), RunPhase::Starting);
    }
}

#[test]
fn a_member_that_does_not_leave_its_generation_is_lost() {
    let mut run = at_step_ten();
    run.kill(1);
    run.replace(1, 1);
    let mut actions = Vec::new();
    for _ in 0..12 {
        actions.extend(run.wait(Duration::from_secs(1)));
        for (rank, phase) in [(0, WorkerPhase::Backward), (1, WorkerPhase::Joining)] {
            if run.machine.run.fleet.roster.living_at(Slot(rank)).is_some() {
                run.beat(rank, phase);
            }
        }
    }
    assert!(survived(&actions).is_some_and(|text| text.contains("no progress: backward")), "{actions:?}");
    assert_eq!(respawns(&actions), [(0, 1)]);
}

#[test]
fn a_loss_after_the_results_are_written_changes_nothing() {
    let mut run = Run::started(2);
    for step in 0..100 {
        run.steps(0, step..step + 1);
        run.steps(1, step..step + 1);
    }
    run.tell(Ask::Leave { worker: id(0), exit_code: 0, reason: "done".into() });
    run.kill(1);
    assert_eq!(run.machine.outcome(), Some(Outcome::Finished { steps: Step(100) }));
}

#[test]
fn a_stop_during_a_recovery_waits_for_it() {
    let mut run = at_step_ten();
    run.kill(1);
    let (_, actions) = run.ask(Ask::Stop { reason: "enough".into() });
    assert_eq!(told(&actions, 0), [&Directive::Stop("enough".into())]);
    run.get_ready(0, 1, "");
    run.replace(1, 1);
    run.start_all(2, 10, StateSource::Replica);
    assert_eq!(run.phase(), RunPhase::Stopping);
    for rank in 0..2 {
        let worker = run.worker(rank);
        run.tell(Ask::Leave { worker, exit_code: 0, reason: "stopped".into() });
    }
    assert!(matches!(run.machine.outcome(), Some(Outcome::Stopped { steps: Step(10), .. })));
}

#[test]
fn a_checkpoint_that_was_asked_for_earlier_is_not_the_successors_affair() {
    let mut run = at_step_ten();
    run.tell(Ask::CheckpointNow);
    run.kill(1);
    run.get_ready(0, 1, "");
    let actions = run.replace(1, 1);
    assert!(!told(&actions, 101).contains(&&Directive::Checkpoint(1)));
    assert!(told(&run.follow(0, 9).1, 9).contains(&&Directive::Checkpoint(1)));
}

#[test]
fn status_says_what_was_survived() {
    let mut run = at_step_ten();
    run.kill(1);
    let status = run.status();
    assert!(matches!(status.reason, Reason::Regathering { generation: Generation(1), .. }));
    assert_eq!((status.spent.restarts, status.max_restarts), (1, 3));
    assert_eq!(status.plan.map(|plan| (plan.samples(), plan.global_batch())), Some((30, 8)));
    assert!(status.failure.is_some_and(|failure| !failure.fatal));
    assert_eq!(invariants::violated(&run.machine), None);
    let slot = Slot(1);
    let respawn = Respawn {
        slot,
        attempt: 1,
        reason: run.machine.run.fleet.roster.respawn(slot).unwrap().reason.clone(),
    };
    assert_eq!(run.machine.run.fleet.roster.respawn(slot), Some(&respawn));
}
