//! Workers that are lost when everything is done, and processes that end before they are anybody.

use super::{recovery::survived, *};
use crate::{core::event::ProcessExit, options::Outcome};

/// Two workers that have done every step; rank 1 could not report the last one.
fn done_but_for_a_report() -> Run {
    let mut run = Run::started(2);
    for step in 0..100 {
        run.steps(0, step..step + 1);
        if step < 99 {
            run.steps(1, step..step + 1);
        }
    }
    assert_eq!(run.committed(), 99);
    run
}

fn leave(run: &mut Run, rank: u32) -> Vec<Action> {
    run.tell(Ask::Leave { worker: run.worker(rank), exit_code: 0, reason: "done".into() })
}

const FINISHED: Option<Outcome> = Some(Outcome::Finished { steps: Step(100) });

#[test]
fn a_rank_that_leaves_in_order_proves_the_last_steps() {
    let mut run = done_but_for_a_report();
    leave(&mut run, 0);
    assert_eq!((run.committed(), run.machine.outcome()), (100, None));
    run.event(Event::LineClosed(id(1), StreamId(1)));
    let actions = run.wait(Duration::from_secs(1));
    assert_eq!(respawns(&actions), [], "there is nothing left to do");
    assert_eq!(run.machine.outcome(), FINISHED);
}

#[test]
fn a_run_whose_results_are_written_is_over_even_if_a_rank_is_lost() {
    let mut run = done_but_for_a_report();
    run.kill(1);
    leave(&mut run, 0);
    run.kill(1);
    run.wait(Duration::from_secs(21));
    assert_eq!(run.machine.outcome(), FINISHED);
}

#[test]
fn a_rank_that_has_left_in_order_proves_that_the_results_are_there() {
    // Rank 0 is killed, or loses its neighbour, between the last barrier and its own good-bye.
    for killed in [true, false] {
        let mut run = done_but_for_a_report();
        run.steps(1, 99..100);
        leave(&mut run, 1);
        let actions = if killed { run.kill(0) } else { run.get_ready(0, 1, "rank 1 is gone") };
        assert_eq!((respawns(&actions), survived(&actions)), (vec![], None));
        run.wait(Duration::from_secs(21));
        assert_eq!(run.machine.outcome(), FINISHED);
    }
}

#[test]
fn a_loss_after_a_stop_does_not_bring_the_run_back() {
    for fragile in [false, true] {
        let mut run = if fragile { Run::fragile(2) } else { Run::started(2) };
        run.steps(0, 0..5);
        run.steps(1, 0..5);
        run.tell(Ask::Stop { reason: "enough".into() });
        leave(&mut run, 0);
        let actions = run.kill(1);
        assert_eq!((respawns(&actions), survived(&actions)), (vec![], None));
        run.wait(Duration::from_secs(21));
        assert!(matches!(run.machine.outcome(), Some(Outcome::Stopped { steps: Step(5), .. })));
    }
}

#[test]
fn a_run_that_was_stopped_says_that_it_is_over() {
    let mut run = Run::started(2);
    run.steps(0, 0..5);
    run.steps(1, 0..5);
    assert_eq!(phases(&run.tell(Ask::Stop { reason: "enough".into() })), [RunPhase::Stopping]);
    assert_eq!(phases(&leave(&mut run, 0)), []);
    assert_eq!(phases(&leave(&mut run, 1)), [RunPhase::Finished]);
}

#[test]
fn a_good_bye_before_the_others_have_started_proves_the_results_and_is_not_forgotten() {
    // Every step is done, and a fault has made both gather once more.
    let mut run = done_but_for_a_report();
    run.steps(1, 99..100);
    run.get_ready(0, 1, "its peer is gone");
    run.get_ready(1, 1, "its peer is gone");
    leave(&mut run, 1);
    run.start(0, 100, StateSource::Carried).0.unwrap();
    let (reply, _) = run.ask(Ask::Register(successor(1, 1)));
    assert!(matches!(reply, Ok(Reply::Registered(_))), "{reply:?}");
    let actions = run.kill(0);
    assert_eq!((respawns(&actions), survived(&actions)), (vec![], None));
    assert_eq!(phases(&actions), [RunPhase::Finished], "the other one that is there is no member");
    run.wait(Duration::from_secs(21));
    assert_eq!(run.machine.outcome(), FINISHED);
}

#[test]
fn a_process_that_dies_before_it_registers_is_replaced() {
    let mut run = Run::started(2);
    run.wait(Duration::from_millis(2900));
    run.beat(0, WorkerPhase::Communication);
    let actions = run.wait(Duration::from_millis(200));
    assert_eq!(respawns(&actions), [(1, 1)], "rank 1 is frozen");
    let ended = Ask::Exit {
        node_id: NODE.into(),
        slot: Slot(1),
        pid: Some(4711),
        ended: ProcessExit::Signal(9),
        sample: None,
    };
    assert_eq!(respawns(&run.tell(ended)), [(1, 2)]);
}

#[test]
fn a_process_that_comes_by_itself_is_not_replaced() {
    let mut run = Run::started(2);
    run.event(Event::LineClosed(id(1), StreamId(1)));
    let (reply, actions) = run.ask(Ask::Register(successor(1, 1)));
    assert!(matches!(reply, Ok(Reply::Registered(_))), "{reply:?}");
    assert_eq!(respawns(&actions), []);
}
