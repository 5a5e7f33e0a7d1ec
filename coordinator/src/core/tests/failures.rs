//! Failures: which one is the first cause, and how a run ends.

use super::*;
use crate::core::{event::Ended, failure::Failure, reason::Reason};
use crate::options::{CauseKind, FirstCause, Outcome};

fn failure(rank: u32, kind: CauseKind) -> Ask {
    let mut failure = Failure::of_run(kind, format!("{kind:?} on {rank}"));
    failure.phase = WorkerPhase::Forward;
    failure.step = Step(3);
    Ask::Failure { run_id: RUN.into(), worker: Some(id(rank)), failure }
}

fn cause(actions: &[Action]) -> Option<String> {
    news(actions).into_iter().find_map(|news| match news {
        News::Failure(failure) => Some(failure.to_string()),
        _ => None,
    })
}

#[test]
fn a_failure_aborts_everyone_and_is_the_outcome() {
    let mut run = Run::started(2);
    let (_, actions) = run.ask(failure(1, CauseKind::Numeric));
    for stream in 0..2 {
        assert!(matches!(told(&actions, stream)[..], [Directive::Abort(Generation(1), _)]));
    }
    let line = "rank 1 on node-a, forward of step 3: Numeric on 1";
    assert_eq!(cause(&actions).as_deref(), Some(line));
    assert_eq!(run.machine.outcome(), None);
    for rank in 0..2 {
        run.tell(Ask::Leave { worker: id(rank), exit_code: 4, reason: "aborted".into() });
    }
    let cause = FirstCause { rank: Some(Rank(1)), kind: CauseKind::Numeric, message: "Numeric on 1".into() };
    assert_eq!(run.machine.outcome(), Some(Outcome::Failed(cause)));
}

#[test]
fn a_victim_that_speaks_first_does_not_take_the_blame() {
    let mut run = Run::started(3);
    let (_, first) = run.ask(failure(0, CauseKind::PeerLost));
    assert_eq!((cause(&first), phases(&first)), (None, vec![RunPhase::Failed]));
    let (_, second) = run.ask(failure(2, CauseKind::Io));
    assert!(cause(&second).is_some_and(|cause| cause.contains("Io on 2")));
    let (_, third) = run.ask(failure(1, CauseKind::PeerLost));
    assert!(matches!(news(&third)[..], [News::Consequence(_)]));
}

#[test]
fn with_victims_alone_the_silent_rank_is_to_blame() {
    let mut run = Run::started(2);
    run.event(Event::LineClosed(id(1), StreamId(1)));
    run.tell(failure(0, CauseKind::PeerLost));
    run.tell(Ask::Leave { worker: id(0), exit_code: 4, reason: "aborted".into() });
    let actions = run.wait(Duration::from_secs(4));
    let cause = cause(&actions).unwrap();
    assert!(cause.starts_with("rank 1 on node-a") && cause.contains("closed without a word"), "{cause}");
    assert!(matches!(run.machine.outcome(), Some(Outcome::Failed(_))));
}

#[test]
fn with_nobody_to_blame_the_first_victim_is_named_in_time() {
    let mut run = Run::started(2);
    run.tell(failure(0, CauseKind::PeerLost));
    run.wait(Duration::from_secs(2));
    run.beat(1, WorkerPhase::Communication);
    run.beat(0, WorkerPhase::Done);
    let actions = run.wait(Duration::from_secs(5));
    assert!(cause(&actions).is_some_and(|cause| cause.contains("PeerLost on 0")));
}

#[test]
fn a_worker_whose_line_is_closed_is_lost_after_three_silent_seconds() {
    let mut run = Run::started(2);
    run.wait(Duration::from_secs(1));
    run.beat(0, WorkerPhase::Forward);
    let closed = run.event(Event::LineClosed(id(1), StreamId(1)));
    assert!(matches!(news(&closed)[..], [News::Member { .. }]));
    assert_eq!(cause(&run.wait(Duration::from_millis(1900))), None);
    let actions = run.wait(Duration::from_millis(200));
    assert!(cause(&actions).is_some_and(|cause| cause.starts_with("rank 1")), "{actions:?}");
}

#[test]
fn a_worker_that_comes_back_in_time_is_not_lost() {
    let mut run = Run::started(1);
    run.event(Event::LineClosed(id(0), StreamId(0)));
    run.wait(Duration::from_secs(2));
    drop(run.follow(0, 5));
    run.wait(Duration::from_secs(10));
    assert_eq!(run.phase(), RunPhase::Starting);
}

#[test]
fn a_worker_that_hangs_with_an_open_line_is_lost_later() {
    let mut run = Run::started(1);
    assert_eq!(cause(&run.wait(Duration::from_secs(14))), None);
    let actions = run.wait(Duration::from_secs(2));
    assert!(cause(&actions).is_some_and(|cause| cause.contains("it hangs")));
    assert!(run.machine.outcome().is_some(), "nobody is left to wait for");
}

#[test]
fn heartbeats_keep_a_worker_alive() {
    let mut run = Run::started(1);
    for _ in 0..60 {
        assert_eq!(run.wait(Duration::from_secs(1)), vec![]);
        run.beat(0, WorkerPhase::Forward);
    }
}

#[test]
fn a_lost_worker_must_not_go_on() {
    let mut run = Run::started(2);
    run.event(Event::LineClosed(id(1), StreamId(1)));
    run.wait(Duration::from_secs(2));
    run.beat(0, WorkerPhase::Forward);
    run.wait(Duration::from_secs(2));
    let beat = Beat {
        worker: id(1),
        incarnation: claim(1).incarnation,
        generation: Generation(1),
        phase: WorkerPhase::Forward,
        step: Step(0),
        collective: (0, 0),
        memory_in_use: Bytes(0),
    };
    assert_eq!(run.ask(Ask::Heartbeat(beat)).0, Ok(Reply::Known(false)));
    assert_eq!(run.follow(1, 8).0, Err(Refusal::UnknownWorker(id(1))));
}

#[test]
fn a_killed_process_is_named_at_once_by_its_launcher() {
    let mut run = Run::started(2);
    let exit = Ask::Exit { node_id: NODE.into(), rank: Rank(1), ended: Ended::Signal(9) };
    let (_, actions) = run.ask(exit.clone());
    assert!(cause(&actions).is_some_and(|cause| cause.contains("killed by signal 9")));
    assert_eq!(run.ask(exit), (Ok(Reply::Done), vec![]));
}

#[test]
fn the_end_of_a_process_that_has_left_is_no_news() {
    let mut run = Run::started(1);
    run.tell(failure(0, CauseKind::Io));
    run.tell(Ask::Leave { worker: id(0), exit_code: 1, reason: "failed".into() });
    let exit = Ask::Exit { node_id: NODE.into(), rank: Rank(0), ended: Ended::Code(1) };
    assert_eq!(run.ask(exit), (Ok(Reply::Done), vec![]));
    let stranger = Ask::Exit { node_id: "y".into(), rank: Rank(0), ended: Ended::Code(1) };
    assert_eq!(run.ask(stranger).0, Err(Refusal::UnknownNode("y".into())));
}

#[test]
fn a_failure_before_registration_ends_the_run_with_its_cause() {
    let mut run = Run::new(config(2));
    run.tell(Ask::Register(claim(0)));
    let mut failure = Failure::of_run(CauseKind::BadInput, "no camera named front".into());
    failure.rank = Some(Rank(1));
    let ask = Ask::Failure { run_id: RUN.into(), worker: None, failure };
    let (_, actions) = run.ask(ask);
    assert_eq!(cause(&actions).as_deref(), Some("rank 1, joining: no camera named front"));
}

#[test]
fn a_worker_that_leaves_early_ends_the_run() {
    let mut run = Run::started(2);
    let leave = Ask::Leave { worker: id(1), exit_code: 0, reason: "bored".into() };
    let (_, actions) = run.ask(leave);
    assert!(cause(&actions).is_some_and(|cause| cause.contains("before the run was over: bored")));
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort(..)]));
}

#[test]
fn the_coordinator_waits_for_farewells_but_not_for_ever() {
    let mut run = Run::started(2);
    run.tell(failure(1, CauseKind::Numeric));
    for _ in 0..19 {
        run.wait(Duration::from_secs(1));
        run.beat(0, WorkerPhase::Done);
        run.beat(1, WorkerPhase::Done);
    }
    assert_eq!(run.machine.outcome(), None);
    run.wait(Duration::from_secs(2));
    assert!(matches!(run.machine.outcome(), Some(Outcome::Failed(_))));
}

#[test]
fn a_late_worker_is_told_that_the_run_is_over() {
    let mut run = Run::new(config(2));
    run.tell(Ask::Register(claim(0)));
    run.tell(failure(0, CauseKind::Io));
    assert!(matches!(run.ask(Ask::GetRun(origin())).0, Err(Refusal::Over(Reason::Failed(_)))));
    assert!(matches!(run.ask(Ask::Register(claim(1))).0, Err(Refusal::Over(_))));
    let (_, actions) = run.follow(0, 3);
    assert!(matches!(told(&actions, 3)[..], [Directive::Abort(..)]));
}
