//! Transcripts: what happens, when, and what is done about it.

use super::*;

const SIGINT: i32 = nix::libc::SIGINT;
const SIGTERM: i32 = nix::libc::SIGTERM;
const SIGXCPU: i32 = nix::libc::SIGXCPU;
const SIGHUP: i32 = nix::libc::SIGHUP;
const STOP: Duration = Duration::from_secs(30);
const DONE: ProcessExit = ProcessExit::Code(0);
const KILLED: ProcessExit = ProcessExit::Signal(9);

/// Runs a transcript of (seconds, event, expected actions).
fn transcript(workers: u32, steps: &[(u64, Event, &[Action])]) -> Machine {
    let mut machine = Machine::new(workers, STOP);
    let start = Instant::now();
    for (seconds, event, expected) in steps {
        let actions = machine.handle(start + Duration::from_secs(*seconds), *event);
        assert_eq!(actions, *expected, "after {event:?} at {seconds} s");
    }
    machine
}

fn respawn(worker: u32, attempt: u32) -> Event {
    Event::Respawn { worker, attempt }
}

#[test]
fn a_run_that_ends_well_asks_for_nothing() {
    let machine = transcript(
        2,
        &[
            (0, Event::WorkerEnded(1, DONE), &[Action::ReportExit(1, DONE)]),
            (1, Event::WorkerEnded(0, DONE), &[Action::ReportExit(0, DONE)]),
        ],
    );
    assert!(machine.finished());
    assert_eq!(machine.first_failure(), None);
    assert_eq!(machine.next_deadline(), None);
}

#[test]
fn a_worker_that_died_waits_for_the_coordinators_order_and_the_others_work_on() {
    let machine = transcript(
        2,
        &[
            (0, Event::WorkerEnded(1, KILLED), &[Action::ReportExit(1, KILLED)]),
            (3600, Event::Tick, &[]),
            (3600, respawn(1, 1), &[Action::Start(1, 1)]),
            (3601, Event::WorkerEnded(1, DONE), &[Action::ReportExit(1, DONE)]),
            (3601, Event::WorkerEnded(0, DONE), &[Action::ReportExit(0, DONE)]),
        ],
    );
    assert_eq!(machine.first_failure(), None, "a worker that was replaced did not fail the launch");
    assert!(machine.finished());
}

#[test]
fn a_frozen_worker_is_killed_before_its_place_is_filled_and_its_end_is_not_reported() {
    transcript(
        1,
        &[
            (0, respawn(0, 1), &[Action::Kill(0)]),
            (1, respawn(0, 2), &[]),
            (2, Event::WorkerEnded(0, KILLED), &[Action::Start(0, 2)]),
            (3, Event::WorkerEnded(0, KILLED), &[Action::ReportExit(0, KILLED)]),
        ],
    );
}

#[test]
fn repeated_orders_and_orders_for_strangers_are_dropped() {
    transcript(
        1,
        &[
            (0, Event::WorkerEnded(0, KILLED), &[Action::ReportExit(0, KILLED)]),
            (1, respawn(0, 1), &[Action::Start(0, 1)]),
            (2, respawn(0, 1), &[]),
            (3, respawn(7, 1), &[]),
            (4, Event::WorkerEnded(0, KILLED), &[Action::ReportExit(0, KILLED)]),
            (5, respawn(0, 1), &[]),
            (6, respawn(0, 2), &[Action::Start(0, 2)]),
        ],
    );
}

#[test]
fn all_workers_dead_is_not_the_end_until_the_run_is_over() {
    let mut machine = transcript(
        2,
        &[
            (0, Event::WorkerEnded(0, KILLED), &[Action::ReportExit(0, KILLED)]),
            (0, Event::WorkerEnded(1, KILLED), &[Action::ReportExit(1, KILLED)]),
        ],
    );
    assert!(!machine.finished());
    machine.handle(Instant::now(), Event::RunOver);
    assert!(machine.finished());
    assert_eq!(machine.first_failure(), Some((0, KILLED)));
    assert_eq!(machine.handle(Instant::now(), respawn(1, 1)), [], "nobody is started after the end");
}

#[test]
fn when_the_run_is_over_the_others_get_time_to_leave() {
    let machine = transcript(
        3,
        &[
            (0, Event::WorkerEnded(1, KILLED), &[Action::ReportExit(1, KILLED)]),
            (0, Event::RunOver, &[]),
            (1, Event::WorkerEnded(0, ProcessExit::Code(4)), &[Action::ReportExit(0, ProcessExit::Code(4))]),
            (5, Event::RunOver, &[]),
            (9, Event::Tick, &[]),
            (10, Event::Tick, &[Action::KillAll(KillReason::RunOver)]),
            (99, Event::RunOver, &[]),
            (199, Event::Tick, &[]),
            (199, Event::WorkerEnded(2, KILLED), &[Action::ReportExit(2, KILLED)]),
        ],
    );
    assert_eq!(machine.first_failure(), Some((1, KILLED)));
    assert!(machine.finished());
}

#[test]
fn a_run_that_is_over_does_not_wait_as_long_as_a_signal_allows() {
    transcript(
        1,
        &[
            (0, Event::Signal(SIGTERM), &[Action::AskStop(SIGTERM)]),
            (1, Event::RunOver, &[]),
            (10, Event::Tick, &[]),
            (11, Event::Tick, &[Action::KillAll(KillReason::RunOver)]),
        ],
    );
}

#[test]
fn workers_that_outlive_our_coordinator_are_not_waited_for() {
    let machine = transcript(
        2,
        &[
            (0, Event::RunOver, &[]),
            (1, Event::CoordinatorEnded, &[]),
            (1, Event::WorkerEnded(0, ProcessExit::Code(3)), &[Action::ReportExit(0, ProcessExit::Code(3))]),
            (2, Event::Tick, &[Action::KillAll(KillReason::RunOver)]),
            (2, Event::WorkerEnded(1, KILLED), &[Action::ReportExit(1, KILLED)]),
        ],
    );
    assert_eq!(machine.first_failure(), Some((0, ProcessExit::Code(3))));
    assert!(machine.finished());
}

#[test]
fn the_first_signal_stops_gracefully_and_the_second_kills() {
    let machine = transcript(
        1,
        &[
            (0, Event::Signal(SIGINT), &[Action::AskStop(SIGINT)]),
            (5, Event::Tick, &[]),
            (6, Event::Signal(SIGINT), &[Action::KillAll(KillReason::Insisted)]),
            (6, Event::WorkerEnded(0, KILLED), &[Action::ReportExit(0, KILLED)]),
        ],
    );
    assert_eq!(machine.interrupted(), Some(SIGINT));
    assert_eq!(machine.first_failure(), None, "what we killed did not fail");
    assert!(machine.finished());
}

#[test]
fn a_stop_that_takes_too_long_is_enforced() {
    transcript(
        1,
        &[
            (0, Event::Signal(SIGTERM), &[Action::AskStop(SIGTERM)]),
            (29, Event::Tick, &[]),
            (30, Event::Tick, &[Action::KillAll(KillReason::StopTookTooLong)]),
            (99, Event::Tick, &[]),
        ],
    );
}

#[test]
fn a_worker_lost_during_a_stop_may_be_replaced_so_that_the_checkpoint_is_written() {
    let machine = transcript(
        2,
        &[
            (0, Event::Signal(SIGTERM), &[Action::AskStop(SIGTERM)]),
            (5, Event::WorkerEnded(0, KILLED), &[Action::ReportExit(0, KILLED)]),
            (6, respawn(0, 1), &[Action::Start(0, 1)]),
            (16, Event::Tick, &[]),
            (30, Event::Tick, &[Action::KillAll(KillReason::StopTookTooLong)]),
            (31, respawn(0, 2), &[]),
        ],
    );
    assert_eq!(machine.first_failure(), None);
}

#[test]
fn a_stop_with_nobody_left_ends_when_its_patience_does() {
    let machine = transcript(
        1,
        &[
            (0, Event::Signal(SIGTERM), &[Action::AskStop(SIGTERM)]),
            (5, Event::WorkerEnded(0, KILLED), &[Action::ReportExit(0, KILLED)]),
            (30, Event::Tick, &[Action::KillAll(KillReason::StopTookTooLong)]),
        ],
    );
    assert!(machine.finished());
}

#[test]
fn workers_whose_run_cannot_be_asked_to_stop_are_ended() {
    transcript(
        1,
        &[
            (0, Event::Signal(SIGINT), &[Action::AskStop(SIGINT)]),
            (0, Event::StopRefused, &[Action::KillAll(KillReason::StopRefused)]),
            (1, Event::StopRefused, &[]),
            (30, Event::Tick, &[]),
        ],
    );
}

#[test]
fn a_hangup_drains_like_any_other_signal_but_never_insists() {
    transcript(
        1,
        &[
            (0, Event::Signal(SIGHUP), &[Action::AskStop(SIGHUP)]),
            (0, Event::Signal(SIGHUP), &[]),
            (29, Event::Tick, &[]),
            (29, Event::Signal(SIGTERM), &[Action::KillAll(KillReason::Insisted)]),
        ],
    );
}

#[test]
fn an_end_that_was_announced_comes_without_insisting() {
    let machine = transcript(
        1,
        &[
            (0, Event::Signal(SIGXCPU), &[Action::AskStop(SIGXCPU)]),
            (1, Event::Signal(SIGXCPU), &[]),
            (20, Event::Signal(SIGTERM), &[]),
            (29, Event::Signal(SIGTERM), &[Action::KillAll(KillReason::Insisted)]),
        ],
    );
    assert_eq!(machine.interrupted(), Some(SIGTERM));
}

#[test]
fn workers_whose_coordinator_is_lost_for_good_are_ended() {
    let machine = transcript(
        1,
        &[
            (0, Event::CoordinatorLost, &[Action::KillAll(KillReason::CoordinatorLost)]),
            (1, respawn(0, 1), &[]),
            (5, Event::Tick, &[]),
        ],
    );
    assert!(machine.coordinator_lost());
    assert_eq!(machine.living().collect::<Vec<_>>(), [0]);
}
