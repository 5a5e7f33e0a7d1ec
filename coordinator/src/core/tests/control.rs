//! What people ask: pause, resume, checkpoint, stop, status, memory.

use super::*;
use crate::core::{
    event::{CheckpointReport, CheckpointState},
    reason::Reason,
    report::PhaseMemory,
};
use crate::options::Outcome;

#[test]
fn a_run_is_paused_when_every_rank_waits() {
    let mut run = Run::started(2);
    run.steps(0, 0..1);
    run.steps(1, 0..1);
    let (reply, actions) = run.ask(Ask::Pause);
    assert_eq!(reply, Ok(Reply::Phase(RunPhase::Training)));
    assert_eq!((told(&actions, 0), told(&actions, 1)), (vec![&Directive::Pause], vec![&Directive::Pause]));
    assert_eq!(run.ask(Ask::Pause).1, vec![]);
    assert_eq!(run.beat(0, WorkerPhase::Paused), vec![]);
    assert_eq!(phases(&run.beat(1, WorkerPhase::Paused)), [RunPhase::Paused]);

    let (reply, actions) = run.ask(Ask::Resume);
    assert_eq!(reply, Ok(Reply::Phase(RunPhase::Training)));
    assert_eq!(told(&actions, 1), [&Directive::Resume]);
    assert_eq!(
        told(&run.ask(Ask::Resume).1, 0),
        [&Directive::Resume],
        "again, for a rank that has missed it"
    );
}

#[test]
fn a_rank_whose_line_was_broken_when_the_run_was_resumed_goes_on() {
    let mut run = Run::started(2);
    run.tell(Ask::Pause);
    run.event(Event::LineClosed(id(1), StreamId(1)));
    assert_eq!(told(&run.ask(Ask::Resume).1, 1), Vec::<&Directive>::new());
    let actions = run.follow(1, 11).1;
    assert!(told(&actions, 11).contains(&&Directive::Resume), "{actions:?}");
}

#[test]
fn a_rank_that_was_told_too_late_waits_in_the_next_collective() {
    let mut run = Run::started(2);
    run.tell(Ask::Pause);
    assert_eq!(run.beat(0, WorkerPhase::Communication), vec![]);
    assert_eq!(run.beat(1, WorkerPhase::Forward), vec![]);
    assert_eq!(run.beat(0, WorkerPhase::Paused), vec![]);
    assert_eq!(phases(&run.beat(1, WorkerPhase::Communication)), [RunPhase::Paused]);
}

#[test]
fn a_checkpoint_that_is_asked_for_twice_is_one_until_it_is_written() {
    let mut run = Run::started(1);
    run.steps(0, 0..3);
    for _ in 0..2 {
        let asked = run.ask(Ask::CheckpointNow).1;
        assert_eq!(told(&asked, 0), [&Directive::Checkpoint(1)]);
    }
    let (state, path) = (CheckpointState::Complete, "checkpoints/step-4".to_owned());
    run.tell(Ask::Checkpoint(id(0), CheckpointReport { step: Step(4), state, path, bytes: Bytes(9) }));
    assert_eq!(told(&run.ask(Ask::CheckpointNow).1, 0), [&Directive::Checkpoint(2)]);
    run.kill(0);
    run.replace(0, 1);
    run.start_all(1, 4, StateSource::Checkpoint);
    let asked = run.ask(Ask::CheckpointNow).1;
    assert_eq!(told(&asked, 100), [&Directive::Checkpoint(3)], "the ranks that were asked are gone");
}

#[test]
fn a_stopped_run_ends_when_every_rank_has_left() {
    let mut run = Run::started(1);
    run.steps(0, 0..3);
    let (reply, actions) = run.ask(Ask::Stop { reason: "enough".into() });
    assert_eq!(reply, Ok(Reply::Phase(RunPhase::Stopping)));
    assert_eq!(told(&actions, 0), [&Directive::Stop("enough".into())]);
    assert_eq!(run.ask(Ask::Stop { reason: "again".into() }).1, vec![]);
    run.steps(0, 3..4);
    run.tell(Ask::Leave { worker: id(0), exit_code: 0, reason: "stopped".into() });
    let outcome = Outcome::Stopped { steps: Step(4), reason: "enough".into() };
    assert_eq!(run.machine.outcome(), Some(outcome));
}

#[test]
fn a_run_can_be_stopped_while_it_waits_for_workers() {
    let mut run = Run::new(config(2));
    run.tell(Ask::Register(claim(0)));
    drop(run.follow(0, 0));
    let (reply, actions) = run.ask(Ask::Stop { reason: "never mind".into() });
    assert_eq!(reply, Ok(Reply::Phase(RunPhase::Finished)));
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort { over: true, .. }]));
    assert_eq!(
        run.ask(Ask::Register(claim(1))).0,
        Err(Refusal::Over(Reason::StopAsked("never mind".into())))
    );
    run.tell(Ask::Leave { worker: id(0), exit_code: 4, reason: "stopped".into() });
    assert!(matches!(run.machine.outcome(), Some(Outcome::Stopped { .. })));
}

#[test]
fn a_pause_before_the_start_is_kept_for_it() {
    let mut run = Run::new(config(1));
    run.tell(Ask::Pause);
    run.gather(1);
    run.get_ready(0, 0, "");
    assert_eq!(run.phase(), RunPhase::Starting);
    let (_, actions) = run.follow(0, 9);
    assert_eq!(told(&actions, 9).last(), Some(&&Directive::Pause));
    run.start_all(1, 0, StateSource::Fresh);
    assert_eq!(phases(&run.beat(0, WorkerPhase::Paused)), [RunPhase::Paused]);
}

#[test]
fn nothing_can_be_asked_of_a_run_that_is_over() {
    let mut run = Run::new(config(1));
    run.tell(Ask::Stop { reason: String::new() });
    for ask in [Ask::Pause, Ask::Resume, Ask::CheckpointNow, Ask::Stop { reason: String::new() }] {
        assert!(matches!(run.ask(ask).0, Err(Refusal::Over(_))));
    }
}

#[test]
fn status_says_where_the_run_is_and_when_it_will_end() {
    let mut run = Run::started(2);
    for rank in 0..2 {
        run.steps(rank, 0..20);
    }
    run.beat(1, WorkerPhase::Backward);
    run.wait(Duration::from_millis(700));
    let status = run.status();
    assert_eq!((status.committed, status.plan, status.epoch()), (Step(20), Some(run.plan), 5));
    assert_eq!(status.eta, Some(Duration::from_secs(8)));
    assert_eq!(status.ranks[1].worker().map(|worker| worker.phase), Some(WorkerPhase::Backward));
    assert_eq!(status.ranks[1].silent, Duration::from_millis(700));
    assert_eq!(status.reason.to_string(), "steps are being committed");
}

#[test]
fn a_memory_refresh_is_answered_when_every_rank_has_reported() {
    let mut run = Run::started(2);
    let ticket = Ticket(500);
    let asked = run.event(Event::Asked(ticket, Ask::RefreshMemory { reset: false }));
    assert_eq!(told(&asked, 1), [&Directive::MemoryReport { request: 1, reset: 0 }]);
    let peak =
        PhaseMemory { phase: WorkerPhase::Forward, in_use: Bytes(1), reserved: Bytes(2), driver: Bytes(3) };
    let first = run.ask(Ask::Memory(id(0), peaks(vec![peak]))).1;
    assert_eq!(first, vec![]);
    let second = run.ask(Ask::Memory(id(1), peaks(vec![peak]))).1;
    assert!(matches!(second[..], [Action::Publish(News::Memory(_)), Action::Reply(to, _)] if to == ticket));
}

#[test]
fn a_reset_of_peaks_is_ordered_with_the_report_before_it_and_once() {
    let mut run = Run::started(2);
    let reset = |reset| Ask::RefreshMemory { reset };
    let asked = run.event(Event::Asked(Ticket(500), reset(true)));
    assert_eq!(told(&asked, 1), [&Directive::MemoryReport { request: 1, reset: 1 }]);
    // The first reports are of the time before it; and it is no second reset.
    let asked = run.event(Event::Asked(Ticket(501), reset(false)));
    assert_eq!(told(&asked, 1), [&Directive::MemoryReport { request: 2, reset: 1 }]);
    assert_eq!(run.event(Event::Asked(Ticket(502), reset(false))), vec![], "it waits for the same reports");
    run.wait(coxswain_proto::limits::MEMORY_REFRESH_PAUSE);
    let asked = run.event(Event::Asked(Ticket(503), reset(false)));
    assert_eq!(told(&asked, 1), [&Directive::MemoryReport { request: 3, reset: 1 }]);
    // Where no generation runs the answer is what is known, and the order stands.
    let mut run = Run::new(config(2));
    let asked = run.event(Event::Asked(Ticket(502), reset(true)));
    assert!(matches!(asked[..], [.., Action::Reply(Ticket(502), Ok(Reply::Memory(_)))]), "{asked:?}");
    assert_eq!((run.machine.run.orders.memory_reports, run.machine.run.orders.memory_reset), (1, 1));
}

#[test]
fn a_memory_refresh_does_not_wait_for_ever() {
    let mut run = Run::started(1);
    let ticket = Ticket(500);
    run.event(Event::Asked(ticket, Ask::RefreshMemory { reset: false }));
    run.wait(Duration::from_secs(9));
    let actions = run.wait(Duration::from_secs(2));
    assert!(actions.iter().any(|action| matches!(action, Action::Reply(to, Ok(_)) if *to == ticket)));
}
