//! Samples that cannot be used.

use super::*;
use crate::{
    core::{failure::Failure, quarantine::EpochPositions},
    options::CauseKind,
};

fn bad(begin: u64) -> EpochPositions {
    EpochPositions { epoch: 0, begin, end: begin + 1 }
}

impl Run {
    /// A seat's worker cannot use a sample, and leaves the generation; the others leave it, too.
    fn fail_sample(&mut self, rank: u32, at: EpochPositions) -> Vec<Action> {
        let failure = Failure::of_run(CauseKind::BadInput, "not a PNG".into());
        let ask =
            Ask::Failure { run_id: RUN.into(), worker: Some(self.worker(rank)), failure, sample: Some(at) };
        let mut actions = self.tell(ask);
        let (generation, world) = (self.machine.generation.0, self.machine.config.world.size());
        for other in 0..world {
            actions.extend(self.get_ready(other, generation, "not a PNG"));
        }
        actions
    }

    fn assignment(&self) -> std::sync::Arc<crate::core::action::Assignment> {
        match &self.machine.phase {
            crate::core::phase::Phase::Running(running) => running.assignment.clone(),
            other => panic!("no generation: {other:?}"),
        }
    }
}

#[test]
fn a_sample_that_fails_goes_to_another_worker_and_then_to_nobody() {
    let mut run = Run::started(2);
    // Step 0 has positions 0..8: rank 1 has 4..8.
    run.fail_sample(1, bad(5));
    let assignment = run.assignment();
    assert_eq!(assignment.members[1].seat, Seat(0), "ranks have moved on, and with them their slices");
    assert!(assignment.left_out.is_empty());
    run.start_all(2, 0, StateSource::Carried);
    run.fail_sample(0, bad(5));
    assert_eq!(run.assignment().left_out, [bad(5)]);
    run.start_all(2, 0, StateSource::Carried);

    let mut reports = [run.report(0, 0), run.report(1, 0)];
    let with = reports.iter().position(|report| report.positions[0].contains(&5)).expect("someone has it");
    let refused = run.clone_and_report(with as u32, reports[with].clone());
    assert_eq!(refused, RunPhase::Failed, "nobody may consume what is left out");
    reports[with].positions = vec![4..5, 6..8];
    for (rank, report) in reports.into_iter().enumerate() {
        run.tell(Ask::Steps(run.worker(rank as u32), vec![report]));
    }
    assert_eq!(run.machine.committed(), Step(1));
    let last = run.machine.progress.last.clone().expect("a committed step");
    assert_eq!((last.samples(), last.left_out.clone()), (7, vec![5..6]));
    assert_eq!(run.machine.spent.restarts, 0, "bad samples have a budget of their own");
}

impl Run {
    /// Where the run would be if a worker reported this.
    fn clone_and_report(&self, rank: u32, report: StepReport) -> RunPhase {
        let mut machine = self.machine.clone();
        let ask = Ask::Steps(self.worker(rank), vec![report]);
        machine.handle(self.at(), Event::Asked(Ticket(9999), ask));
        machine.run_phase()
    }
}

#[test]
fn a_failed_sample_is_remembered_over_a_restart() {
    let mut run = Run::started(1);
    let actions = run.fail_sample(0, bad(3));
    let mut past = Past::default();
    for action in &actions {
        if let Action::Record(record) = action {
            past.take(record);
        }
    }
    assert_eq!(past.quarantine.by_epoch(), std::collections::BTreeMap::from([(0, vec![3..4])]));
}
