//! Samples that cannot be used.

use coxswain_proto::order::{DamagedRow, Order};

use super::*;
use crate::{
    core::{
        event::{KillingSample, ProcessExit},
        failure::Failure,
        quarantine::{BadSample, SampleVerdict},
    },
    options::CauseKind,
};

fn order() -> Order {
    let config = config(1);
    Order::new(config.seed, dataset().order_key, dataset().training_samples)
}

/// The sample at this position of the first epoch, whose own row is damaged.
pub(super) fn bad(position: u64) -> BadSample {
    let number = order().at(0, position).expect("within the epoch");
    BadSample { epoch: 0, position, row: DamagedRow { row: number, begin: number, end: number + 1 } }
}

impl Run {
    /// A slot's worker cannot use a sample, and leaves the generation; the others leave it, too.
    fn fail_sample(&mut self, rank: u32, at: BadSample) -> Vec<Action> {
        let mut failure = Failure::of_run(CauseKind::BadInput, "not a PNG".into());
        failure.generation = self.machine.run.generation;
        let ask =
            Ask::Failure { run_id: RUN.into(), worker: Some(self.worker(rank)), failure, sample: Some(at) };
        let mut actions = self.tell(ask.clone());
        assert_eq!(self.tell(ask), vec![], "what is said again has no effect");
        let (generation, world) = (self.machine.run.generation.0, self.machine.run.config.world.size());
        for other in 0..world {
            actions.extend(self.get_ready(other, generation, "not a PNG"));
        }
        actions
    }

    fn assignment(&self) -> std::sync::Arc<crate::core::action::Assignment> {
        match &self.machine.run.phase {
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
    assert_eq!(assignment.members[1].slot, Slot(0), "ranks have moved on, and with them their slices");
    assert!(assignment.left_out.is_empty());
    run.start_all(2, 0, StateSource::Carried);
    run.fail_sample(0, bad(5));
    assert_eq!(run.assignment().left_out, [bad(5).row]);
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
    let last = run.machine.run.progress.last.clone().expect("a committed step");
    assert_eq!((last.samples(), last.consumed.left_out.clone()), (7, vec![5..6]));
    assert_eq!(run.machine.run.faults.spent.restarts, 0, "bad samples have a budget of their own");
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
    let mut past = Past::default();
    for action in run.fail_sample(0, bad(3)) {
        if let Action::Record(record) = action {
            past.add_record(&record);
        }
    }
    assert_eq!(past.quarantine.left_out().collect::<Vec<_>>(), [&bad(3).row]);
}

#[test]
fn a_damaged_row_is_left_out_of_every_epoch_and_counts_once() {
    let mut run = Run::started(1);
    // One row of actions, which three samples need.
    let row = DamagedRow { row: 12, begin: 10, end: 13 };
    let position = order().positions(0, 11)[0];
    run.fail_sample(0, BadSample { epoch: 0, position, row });
    run.start_all(1, 0, StateSource::Carried);
    for epoch in 0..3 {
        let mut left_out = Vec::new();
        for step in 4 * epoch..4 * (epoch + 1) {
            let mut report = run.report(0, step);
            let holes = order().damaged(epoch, &[row]);
            report.positions = coxswain_proto::plan::without(report.positions[0].clone(), &holes);
            run.tell(Ask::Steps(run.worker(0), vec![report]));
            left_out.extend(
                run.machine.run.progress.last.clone().expect("a step").consumed.left_out.iter().cloned(),
            );
        }
        let mut numbers: Vec<_> =
            left_out.into_iter().flatten().filter_map(|at| order().at(epoch, at)).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [10, 11, 12], "epoch {epoch}");
    }
    assert_eq!(run.committed(), 12);
}

impl Run {
    /// A slot's process ends by a signal while it reads a sample, and another one comes.
    fn kill_by(&mut self, rank: u32, life: u32, at: BadSample) -> Vec<Action> {
        let pid = self.machine.run.fleet.roster.at(Slot(rank)).map(|worker| worker.claim.pid);
        let sample = Some(KillingSample { sample: at, generation: self.machine.run.generation });
        let ended = ProcessExit::Signal(11);
        let exit = Ask::Exit { node_id: NODE.into(), slot: Slot(rank), pid, ended, sample };
        let mut actions = self.tell(exit.clone());
        assert_eq!(self.tell(exit), vec![], "what is said again has no effect");
        let (generation, world) = (self.machine.run.generation.0, self.machine.run.config.world.size());
        for other in (0..world).filter(|other| *other != rank) {
            actions.extend(self.get_ready(other, generation, "a neighbour is gone"));
        }
        actions.extend(self.replace(rank, life));
        actions
    }
}

fn verdicts(actions: &[Action]) -> Vec<SampleVerdict> {
    let verdicts = news(actions).into_iter().filter_map(|news| match news {
        News::Sample(_, verdict, _) => Some(*verdict),
        _ => None,
    });
    verdicts.collect()
}

#[test]
fn a_sample_that_ends_a_process_goes_to_another_worker_and_then_to_nobody() {
    let mut config = config(2);
    config.budgets.restarts = 0;
    let mut run = Run::started_with(config);
    let actions = run.kill_by(1, 1, bad(5));
    assert_eq!(verdicts(&actions), [SampleVerdict::TryAnother]);
    assert_eq!(run.assignment().members[1].slot, Slot(0), "ranks have moved on, and with them their slices");
    run.start_all(2, 0, StateSource::Replica);
    let actions = run.kill_by(0, 2, bad(5));
    assert_eq!(verdicts(&actions), [SampleVerdict::LeftOut]);
    assert_eq!(run.assignment().left_out, [bad(5).row]);
    assert_eq!(run.machine.run.faults.spent.restarts, 0, "bad samples have a budget of their own");
}

#[test]
fn a_worker_alone_tries_a_sample_that_ended_its_process_once_more() {
    let mut run = Run::started(1);
    assert_eq!(verdicts(&run.kill_by(0, 1, bad(3))), [SampleVerdict::TryAnother]);
    run.start_all(1, 0, StateSource::Fresh);
    assert_eq!(verdicts(&run.kill_by(0, 2, bad(3))), [SampleVerdict::LeftOut]);
    assert_eq!(run.assignment().left_out, [bad(3).row]);
}

#[test]
fn a_note_of_another_generation_and_a_kill_by_hand_blame_no_sample() {
    for (generation, signal) in [(Generation(7), 11), (Generation(1), 9)] {
        let mut run = Run::started(2);
        let pid = run.machine.run.fleet.roster.at(Slot(1)).map(|worker| worker.claim.pid);
        let sample = Some(KillingSample { sample: bad(5), generation });
        let ended = ProcessExit::Signal(signal);
        let actions = run.tell(Ask::Exit { node_id: NODE.into(), slot: Slot(1), pid, ended, sample });
        assert_eq!(verdicts(&actions), [], "signal {signal}");
        assert_eq!(run.machine.run.faults.spent.restarts, 1, "signal {signal}");
    }
}

#[test]
fn two_ranks_with_a_bad_sample_each_say_so_twice_and_the_run_goes_on() {
    let mut run = Run::started(2);
    let ask = |run: &Run, rank: u32, position| {
        let mut failure = Failure::of_run(CauseKind::BadInput, "not a PNG".into());
        failure.generation = Generation(1);
        Ask::Failure {
            run_id: RUN.into(),
            worker: Some(run.worker(rank)),
            failure,
            sample: Some(bad(position)),
        }
    };
    let (first, second) = (ask(&run, 0, 1), ask(&run, 1, 5));
    for message in [&first, &second, &first, &second] {
        run.tell(message.clone());
    }
    for rank in 0..2 {
        run.get_ready(rank, 1, "not a PNG");
    }
    assert_eq!(run.phase(), RunPhase::Starting, "nobody is at fault");
    let slots: Vec<_> = run.assignment().members.iter().map(|member| member.slot).collect();
    assert_eq!(slots, [Slot(1), Slot(0)], "each is tried by the other");
}

#[test]
fn a_sample_that_is_reported_again_to_a_restarted_coordinator_is_no_second_failure() {
    let mut run = Run::new(config(2));
    let mut past = Past::default();
    let mut failure = Failure::of_run(CauseKind::BadInput, "not a PNG".into());
    failure.generation = Generation(1);
    let mut keep = |actions: Vec<Action>| {
        actions.iter().for_each(|action| {
            if let Action::Record(record) = action {
                past.add_record(record);
            }
        });
        past.clone()
    };
    keep(run.tell(Ask::Register(claim(0))));
    keep(run.tell(Ask::Register(claim(1))));
    for rank in 0..2 {
        keep(run.follow(rank, u64::from(rank)).1);
        keep(run.get_ready(rank, 0, ""));
    }
    keep(run.start_all(2, 0, StateSource::Fresh));
    let message = Ask::Failure { run_id: RUN.into(), worker: Some(id(1)), failure, sample: Some(bad(5)) };
    let past = keep(run.tell(message.clone()));
    let mut config = config(2);
    (config.life, config.restarted, config.past) = (2, true, past);
    run.machine = Machine::new(run.at(), config);
    let (opened, _) = run.follow(1, 11);
    assert_eq!(opened, Ok(Reply::Done));
    run.tell(message);
    assert_ne!(run.phase(), RunPhase::Failed);
}

#[test]
fn a_launcher_speaks_for_its_own_workers() {
    let mut config = config(2);
    config.world = World::fixed(2, 1);
    let mut run = Run::new(config);
    for (node, place) in [("a", 0), ("b", 1)] {
        let claim = NodeClaim {
            origin: origin(),
            node_id: node.into(),
            host: node.into(),
            local_world: 1,
            node_rank: Some(place),
            returns: false,
        };
        run.tell(Ask::JoinNode(claim));
    }
    run.tell(Ask::Register(claim(1)));
    let exit = |node: &str| Ask::Exit {
        node_id: node.into(),
        slot: Slot(1),
        pid: None,
        ended: ProcessExit::Signal(9),
        sample: None,
    };
    assert_eq!(run.ask(exit("a")).0, Err(Refusal::RankElsewhere { slot: Slot(1), place: 0 }));
    assert_eq!(run.ask(exit("b")).0, Ok(Reply::Done));
}
