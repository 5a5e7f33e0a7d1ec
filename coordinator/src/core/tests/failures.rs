//! Failures that end a run: which one is the first cause, and how the run ends.

use super::*;
use crate::core::{event::ProcessExit, failure::Failure, reason::Reason};
use crate::options::{CauseKind, FirstCause, Outcome};

fn failure(rank: u32, kind: CauseKind) -> Ask {
    let mut failure = Failure::of_run(kind, format!("{kind:?} on {rank}"));
    failure.phase = WorkerPhase::Forward;
    failure.step = Step(3);
    Ask::Failure { run_id: RUN.into(), worker: Some(id(rank)), failure, sample: None }
}

fn cause(actions: &[Action]) -> Option<String> {
    news(actions).into_iter().find_map(|news| match news {
        News::Failure(failure, _) => Some(failure.to_string()),
        _ => None,
    })
}

#[test]
fn a_failure_aborts_everyone_and_is_the_outcome() {
    let mut run = Run::started(2);
    let (_, actions) = run.ask(failure(1, CauseKind::Numeric));
    for stream in 0..2 {
        assert!(matches!(
            told(&actions, stream)[..],
            [Directive::Abort { generation: Generation(1), over: true, .. }]
        ));
    }
    let line = "rank 1 on node-a, forward of step 3: Numeric on 1";
    assert_eq!(cause(&actions).as_deref(), Some(line));
    assert_eq!(run.machine.outcome(), None);
    for rank in 0..2 {
        run.tell(Ask::Leave { worker: id(rank), exit_code: 4, reason: "aborted".into() });
    }
    let cause = FirstCause { slot: Some(Slot(1)), kind: CauseKind::Numeric, message: "Numeric on 1".into() };
    assert_eq!(run.machine.outcome(), Some(Outcome::Failed(cause)));
}

#[test]
fn failures_that_would_come_again_end_the_run_whatever_the_budget() {
    for kind in [CauseKind::BadInput, CauseKind::Numeric, CauseKind::OutOfMemory] {
        let mut run = Run::started(2);
        let (_, actions) = run.ask(failure(1, kind));
        assert!(cause(&actions).is_some(), "{kind:?}");
        assert_eq!(run.phase(), RunPhase::Failed);
    }
}

#[test]
fn exit_codes_for_configuration_data_and_memory_end_the_run() {
    for (code, kind) in [(2, CauseKind::BadInput), (3, CauseKind::BadInput), (5, CauseKind::OutOfMemory)] {
        let mut run = Run::started(2);
        let ended = ProcessExit::Code(code);
        run.tell(Ask::Exit { node_id: NODE.into(), slot: Slot(1), pid: Some(101), ended, sample: None });
        run.wait(Duration::from_secs(30));
        let Some(Outcome::Failed(cause)) = run.machine.outcome() else { panic!() };
        assert_eq!(cause.kind, kind);
    }
}

#[test]
fn input_that_a_successor_cannot_use_is_its_machines_fault_once_steps_are_committed() {
    let mut run = super::recovery::at_step_ten();
    run.kill(1);
    let mut exit = |pid| {
        let ended = ProcessExit::Code(2);
        run.tell(Ask::Exit { node_id: NODE.into(), slot: Slot(1), pid: Some(pid), ended, sample: None });
        (run.phase(), run.machine.run.faults.spent.restarts)
    };
    assert_eq!(exit(1101), (RunPhase::WaitingForWorkers, 2), "the GPU may come back");
    assert_eq!(exit(2101), (RunPhase::WaitingForWorkers, 3));
    assert_eq!(exit(3101), (RunPhase::WaitingForWorkers, 3), "it does not, and rank 0 is to save");
    run.wait(Duration::from_secs(30));
    let Some(Outcome::Failed(cause)) = run.machine.outcome() else { panic!("it goes on") };
    assert_eq!(cause.kind, CauseKind::BadInput);
}

#[test]
fn input_that_a_member_cannot_use_any_more_ends_the_run_all_the_same() {
    let ends = |mut run: Run, rank| {
        let (_, actions) = run.ask(failure(rank, CauseKind::BadInput));
        assert_eq!((respawns(&actions), run.phase()), (vec![], RunPhase::WaitingForWorkers), "{actions:?}");
        assert!(run.machine.run.faults.closing().is_some(), "what was learned is saved first");
    };
    ends(super::recovery::at_step_ten(), 1);

    // Members of a new generation refuse each other, say because one has lost its GPU.
    let mut run = super::recovery::at_step_ten();
    run.kill(1);
    run.get_ready(0, 1, "");
    run.replace(1, 1);
    ends(run, 0);
}

#[test]
fn a_worker_whose_line_stays_closed_is_lost_in_less_than_a_second() {
    let mut run = Run::fragile(2);
    run.wait(Duration::from_secs(1));
    run.beat(0, WorkerPhase::Forward);
    let closed = run.event(Event::LineClosed(id(1), StreamId(1)));
    assert!(matches!(news(&closed)[..], [News::Member { .. }]));
    assert_eq!(cause(&run.wait(Duration::from_millis(600))), None);
    let actions = run.wait(Duration::from_millis(200));
    assert!(cause(&actions).is_some_and(|cause| cause.starts_with("rank 1")), "{actions:?}");
}

#[test]
fn a_worker_that_comes_back_in_time_is_not_lost() {
    let mut run = Run::started(1);
    run.event(Event::LineClosed(id(0), StreamId(0)));
    run.wait(Duration::from_millis(500));
    drop(run.follow(0, 5));
    run.wait(Duration::from_secs(2));
    assert_eq!(run.phase(), RunPhase::Starting);
}

#[test]
fn a_frozen_worker_is_lost_within_three_seconds() {
    let mut run = Run::fragile(1);
    assert_eq!(cause(&run.wait(Duration::from_millis(2900))), None);
    let actions = run.wait(Duration::from_millis(200));
    assert!(cause(&actions).is_some_and(|cause| cause.contains("its process is frozen")));
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
    run.wait(Duration::from_secs(1));
    let beat = Beat {
        worker: id(1),
        incarnation: claim(1).incarnation.into(),
        ..run.moving_beat(1, WorkerPhase::Forward, (0, 0))
    };
    assert_eq!(run.ask(Ask::Heartbeat(beat)).0, Ok(Reply::Known(false)));
    assert_eq!(run.follow(1, 8).0, Err(Refusal::UnknownWorker(id(1))));
    assert_eq!(run.ask(Ask::Steps(id(1), vec![])).0, Err(Refusal::UnknownWorker(id(1))));
    let again = run.ask(Ask::Register(claim(1))).0;
    assert_eq!(again, Err(Refusal::Fenced { slot: Slot(1) }));
}

#[test]
fn a_killed_process_is_named_at_once_by_its_launcher() {
    let mut run = Run::fragile(2);
    let exit = Ask::Exit {
        node_id: NODE.into(),
        slot: Slot(1),
        pid: Some(101),
        ended: ProcessExit::Signal(9),
        sample: None,
    };
    let (_, actions) = run.ask(exit.clone());
    assert!(cause(&actions).is_some_and(|cause| cause.contains("killed by signal 9")));
    assert_eq!(run.ask(exit), (Ok(Reply::Done), vec![]));
}

#[test]
fn a_process_that_the_kernel_killed_for_memory_is_replaced_and_told_as_such() {
    let killed = |run: &mut Run| {
        let ended = ProcessExit::OutOfMemory;
        run.tell(Ask::Exit { node_id: NODE.into(), slot: Slot(1), pid: Some(101), ended, sample: None })
    };
    let mut run = Run::started(2);
    let actions = killed(&mut run);
    assert_eq!((respawns(&actions).len(), run.phase()), (1, RunPhase::WaitingForWorkers), "{actions:?}");
    assert_eq!(run.machine.run.faults.spent.restarts, 1);
    let mut run = Run::fragile(2);
    let actions = killed(&mut run);
    assert!(
        cause(&actions).is_some_and(|cause| cause.contains("killed by the kernel because its cgroup or")),
        "{actions:?}"
    );
    run.wait(Duration::from_secs(30));
    let Some(Outcome::Failed(cause)) = run.machine.outcome() else { panic!("it goes on") };
    assert_eq!(cause.kind, CauseKind::KilledForMemory);
}

#[test]
fn the_end_of_a_process_that_has_left_is_no_news() {
    let mut run = Run::fragile(1);
    run.tell(failure(0, CauseKind::Io));
    run.tell(Ask::Leave { worker: id(0), exit_code: 1, reason: "failed".into() });
    let exit = Ask::Exit {
        node_id: NODE.into(),
        slot: Slot(0),
        pid: Some(100),
        ended: ProcessExit::Code(1),
        sample: None,
    };
    assert_eq!(run.ask(exit), (Ok(Reply::Done), vec![]));
    let stranger = Ask::Exit {
        node_id: "y".into(),
        slot: Slot(0),
        pid: Some(100),
        ended: ProcessExit::Code(1),
        sample: None,
    };
    assert_eq!(run.ask(stranger).0, Err(Refusal::UnknownNode("y".into())));
}

#[test]
fn a_failure_before_registration_ends_the_run_with_its_cause() {
    let mut run = Run::new(config(2));
    run.tell(Ask::Register(claim(0)));
    let mut failure = Failure::of_run(CauseKind::BadInput, "no camera named front".into());
    failure.slot = Some(Slot(1));
    let ask = Ask::Failure { run_id: RUN.into(), worker: None, failure, sample: None };
    let (_, actions) = run.ask(ask);
    assert_eq!(cause(&actions).as_deref(), Some("rank 1, joining: no camera named front"));
}

#[test]
fn a_worker_that_leaves_early_is_a_lost_one() {
    let mut run = Run::fragile(2);
    let leave = Ask::Leave { worker: id(1), exit_code: 0, reason: "bored".into() };
    let (_, actions) = run.ask(leave);
    assert!(cause(&actions).is_some_and(|cause| cause.contains("before the end of the run: bored")));
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort { over: true, .. }]));
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
    run.tell(failure(0, CauseKind::Numeric));
    assert!(matches!(run.ask(Ask::GetRun(origin())).0, Err(Refusal::Over(Reason::Failed(_)))));
    assert!(matches!(run.ask(Ask::Register(claim(1))).0, Err(Refusal::Over(_))));
    let (_, actions) = run.follow(0, 3);
    assert!(matches!(told(&actions, 3)[..], [Directive::Abort { over: true, .. }]));
}
