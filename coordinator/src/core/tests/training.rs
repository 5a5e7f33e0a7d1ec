//! Steps are reported, committed and leased.

use super::*;
use crate::core::{
    action::Record,
    event::{CheckpointReport, CheckpointState},
    report::{MemoryPeak, PhaseMemory},
};
use crate::options::CauseKind;
use coxswain_proto::memory::Comparison;

fn committed(actions: &[Action]) -> Vec<u64> {
    let steps = actions.iter().filter_map(|action| match action {
        Action::Record(Record::Step(step)) => Some(step.step.0),
        _ => None,
    });
    steps.collect()
}

fn failure_of(actions: &[Action]) -> (CauseKind, Option<Slot>, String) {
    let failure = news(actions).into_iter().find_map(|news| match news {
        News::Failure(failure, _) => Some(failure.clone()),
        _ => None,
    });
    let failure = failure.unwrap_or_else(|| panic!("no failure in {actions:?}"));
    (failure.kind, failure.slot, failure.message.clone())
}

#[test]
fn a_step_commits_when_the_last_rank_has_reported_it() {
    let mut run = Run::started(2);
    assert_eq!(committed(&run.steps(0, 0..3)), [0u64; 0]);
    let actions = run.steps(1, 0..2);
    assert_eq!(committed(&actions), [0, 1]);
    assert_eq!(phases(&actions), [RunPhase::Training]);
    let Some(News::Step(step)) = news(&actions).into_iter().find(|news| matches!(news, News::Step(_))) else {
        panic!()
    };
    assert_eq!((step.tokens, step.consumed.positions.clone()), (20, 0..8));
    assert_eq!(step.memory_peak, MemoryPeak { bytes: Bytes(1 << 20), slot: Slot(1) });
    assert_eq!((step.totals.loss(), step.samples_per_second()), (0.5, 80.0));
}

#[test]
fn records_come_before_the_reply_that_depends_on_them() {
    let mut run = Run::started(1);
    let event = Event::Asked(Ticket(99), Ask::Steps(id(0), vec![run.report(0, 0)]));
    let actions = run.event(event);
    let record = actions.iter().position(|action| matches!(action, Action::Record(_)));
    let reply = actions.iter().position(|action| matches!(action, Action::Reply(..)));
    assert!(record < reply, "{actions:?}");
}

#[test]
fn a_repeated_report_has_no_effect() {
    let mut run = Run::started(2);
    run.steps(0, 0..2);
    run.steps(0, 0..2);
    assert_eq!(committed(&run.steps(1, 0..2)), [0, 1]);
    assert_eq!(committed(&run.steps(1, 0..2)), [0u64; 0]);
}

#[test]
fn reports_of_another_generation_are_ignored() {
    let mut run = Run::started(1);
    let mut stale = run.report(0, 0);
    stale.generation = Generation(7);
    let (reply, actions) = run.ask(Ask::Steps(id(0), vec![stale]));
    assert_eq!((reply, committed(&actions)), (Ok(Reply::Committed(Step(0))), vec![]));
}

#[test]
fn the_lease_is_prolonged_when_half_of_it_is_committed() {
    let mut run = Run::started(1);
    assert_eq!(told(&run.steps(0, 0..15), 0), [] as [&Directive; 0]);
    let actions = run.steps(0, 15..16);
    let [Directive::Lease(lease)] = told(&actions, 0)[..] else { panic!("{actions:?}") };
    assert_eq!((lease.first, lease.end), (Step(32), Step(48)));
}

#[test]
fn the_last_lease_ends_with_the_run() {
    let mut run = Run::started(1);
    for step in 0..100 {
        run.steps(0, step..step + 1);
    }
    assert_eq!(run.phase(), RunPhase::Stopping);
    let status = run.status();
    let lease_end = status.ranks[0].worker().map(|worker| worker.lease_end);
    assert_eq!((lease_end, status.plan), (Some(Step(100)), Some(run.plan)));
}

#[test]
fn ranks_that_disagree_on_a_total_end_the_run() {
    let mut run = Run::started(2);
    run.steps(0, 0..1);
    let mut other = run.report(1, 0);
    other.totals.loss_sum = f64::from_bits(other.totals.loss_sum.to_bits() + 1);
    let (_, actions) = run.ask(Ask::Steps(id(1), vec![other]));
    let (kind, rank, message) = failure_of(&actions);
    assert_eq!((kind, rank), (CauseKind::Disagreement, Some(Slot(1))));
    assert!(message.contains("loss_sum") && message.contains("rank 0 reported 4.0"), "{message}");
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort { over: true, .. }]));
}

#[test]
fn a_rank_that_consumed_other_samples_ends_the_run() {
    let mut run = Run::started(2);
    let mut other = run.report(1, 0);
    other.positions[0] = 0..4;
    let (kind, _, message) = failure_of(&run.ask(Ask::Steps(id(1), vec![other])).1);
    assert_eq!(kind, CauseKind::Disagreement);
    assert!(message.contains("was assigned 4..8"), "{message}");
}

#[test]
fn positions_may_be_reported_in_pieces() {
    let mut run = Run::started(1);
    let mut report = run.report(0, 0);
    report.positions = vec![0..2, 2..2, 2..8];
    let (_, actions) = run.ask(Ask::Steps(id(0), vec![report]));
    assert_eq!(committed(&actions), [0]);
}

#[test]
fn a_loss_that_is_not_a_number_ends_the_run() {
    let mut run = Run::started(1);
    let mut report = run.report(0, 0);
    report.totals.loss_sum = f64::NAN;
    let (kind, ..) = failure_of(&run.ask(Ask::Steps(id(0), vec![report])).1);
    assert_eq!(kind, CauseKind::Numeric);
}

#[test]
fn steps_out_of_order_or_beyond_the_lease_end_the_run() {
    let mut run = Run::started(1);
    let report = run.report(0, 1);
    let (kind, _, message) = failure_of(&run.ask(Ask::Steps(id(0), vec![report])).1);
    assert_eq!((kind, message.contains("step 0 is next")), (CauseKind::Disagreement, true));

    let mut run = Run::started(2);
    run.steps(0, 0..32);
    let report = run.report(0, 32);
    let (_, _, message) = failure_of(&run.ask(Ask::Steps(id(0), vec![report])).1);
    assert!(message.contains("its lease ends before step 32"), "{message}");
}

#[test]
fn the_run_is_finished_when_every_rank_has_left_after_the_last_step() {
    let mut run = Run::started(2);
    for step in 0..100 {
        run.steps(0, step..step + 1);
        run.steps(1, step..step + 1);
    }
    for rank in 0..2 {
        run.tell(Ask::Leave { worker: id(rank), exit_code: 0, reason: "done".into() });
    }
    assert_eq!(run.phase(), RunPhase::Finished);
    assert_eq!(run.machine.outcome(), Some(crate::options::Outcome::Finished { steps: Step(100) }));
}

#[test]
fn a_complete_checkpoint_is_published_once() {
    let mut run = Run::started(1);
    let report = |state| CheckpointReport {
        step: Step(40),
        state,
        path: "checkpoints/step-00000040".into(),
        bytes: Bytes(10),
    };
    let (_, complete) = run.ask(Ask::Checkpoint(id(0), report(CheckpointState::Complete)));
    assert!(matches!(complete[..], [Action::Publish(News::Checkpoint(_))]));
    let (_, again) = run.ask(Ask::Checkpoint(id(0), report(CheckpointState::Complete)));
    assert_eq!(again, vec![]);
    let status = run.status();
    assert_eq!(status.checkpoints.len(), 1);
}

#[test]
fn the_last_memory_report_of_a_phase_counts() {
    let mut run = Run::started(1);
    let peak = |phase, bytes| PhaseMemory {
        phase,
        in_use: Bytes(bytes),
        reserved: Bytes(bytes),
        driver: Bytes(bytes),
    };
    run.tell(Ask::Memory(id(0), peaks(vec![peak(WorkerPhase::Forward, 5), peak(WorkerPhase::Backward, 9)])));
    let comparison = Some(Comparison { predicted: 11, measured: 10, ..Comparison::default() });
    let newer = MemoryReport { peaks: vec![peak(WorkerPhase::Forward, 7)], comparison: comparison.clone() };
    run.tell(Ask::Memory(id(0), newer));
    run.tell(Ask::Memory(id(0), MemoryReport::default()));
    let table = run.machine.memory();
    assert_eq!(table[0].phases, [peak(WorkerPhase::Forward, 7), peak(WorkerPhase::Backward, 9)]);
    assert_eq!(table[0].comparison, comparison);
    run.tell(Ask::Memory(id(0), peaks(vec![peak(WorkerPhase::Forward, 0)])));
    let table = run.machine.memory();
    assert_eq!(table[0].phases, [peak(WorkerPhase::Backward, 9)], "not entered since the peaks were reset");
}

#[test]
fn a_note_is_written_once() {
    let mut run = Run::started(1);
    let note = |sequence| Ask::Note { worker: id(0), sequence, text: "warm".into(), hardware: false };
    assert_eq!(news(&run.ask(note(1)).1), [&News::Note(Slot(0), "warm".into())]);
    assert_eq!(run.ask(note(1)).1, vec![]);
    assert_eq!(run.ask(note(2)).1.len(), 1);
}

#[test]
fn a_worker_nobody_knows_is_told_so() {
    let mut run = Run::started(1);
    let stranger = WorkerId(5);
    assert_eq!(run.ask(Ask::Steps(stranger, vec![])).0, Err(Refusal::UnknownWorker(stranger)));
}
