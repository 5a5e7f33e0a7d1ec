//! The loop of one rank, from its first step to its last.

use std::{path::PathBuf, sync::Arc};

use coxswain_proto::{
    ids::{Rank, Step},
    plan::Plan,
    run_spec::RunSpec,
};

use super::{TrainError, checkpoint::Store, export::Summary};
use crate::{
    collective::Collective,
    data::{Dataset, Prefetcher, StepRequest},
    kernels::Tape,
    link::{Assignment, Commands, Link, Phase, Report},
    memory::Meter,
    model::policy::{GradientWatch, Policy},
    params::{FlatGrads, Trainables},
    zero::{LearningRateSchedule, ShardedAdamW},
};

/// Steps whose samples are requested ahead of the one that runs, so that data threads never wait for a lease.
const REQUESTS_AHEAD: u64 = 4;

/// Everything one rank trains with. Built by [`PolicyTrainer`](super::PolicyTrainer); lives on the trainer thread.
pub(super) struct Training<'a, B: Tape<Base = B>> {
    pub(super) spec: &'a RunSpec,
    pub(super) spec_digest: String,
    pub(super) output_dir: PathBuf,
    pub(super) assignment: Assignment,
    pub(super) plan: Plan,
    pub(super) link: Box<dyn Link + Send>,
    pub(super) comm: Box<dyn Collective>,
    pub(super) dataset: Arc<Dataset>,
    pub(super) prefetch: Prefetcher,
    pub(super) policy: Policy<B>,
    pub(super) trainables: Trainables<B>,
    pub(super) optimizer: ShardedAdamW,
    pub(super) rates: LearningRateSchedule,
    pub(super) grads: FlatGrads,
    pub(super) meter: Meter,
    pub(super) store: Store,
    /// Samples per forward pass now in force; an out-of-memory lowers it.
    pub(super) micro_batch: usize,
    /// The next step to run.
    pub(super) next: Step,
    /// Requests obeyed so far, to tell a new one from an old one.
    pub(super) obeyed: Commands,
    /// Steps whose samples have been requested.
    pub(super) requested: Step,
    /// The step of the newest checkpoint of this run.
    pub(super) saved: Option<Step>,
    /// Watches in the first steps that everything that should train does.
    pub(super) gradients: GradientWatch,
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Trains to the end, or until everyone has agreed to stop; then saves, evaluates and exports.
    pub(super) fn run(&mut self) -> Result<(), TrainError> {
        let mut summary = Summary::begin(self.next, self.world());
        summary.error_before = self.evaluate()?;
        let total = Step(self.plan.total_steps());
        let mut stopped = false;
        while self.next < total && !stopped {
            self.request_ahead(total)?;
            let step = self.next;
            let (done, verdict) = self.transaction(step)?;
            self.next = Step(step.0 + 1);
            self.gradients.verdict(self.trainables.layout())?;
            summary.book(&done);
            self.link.report(Report::Step(done))?;
            stopped = self.obey(verdict.commands)?;
        }
        if self.saved != Some(self.next) {
            self.save()?;
        }
        summary.error_after = self.evaluate()?;
        self.export(summary, stopped)?;
        let peaks = self.meter.report();
        self.link.report(Report::Memory(peaks))?;
        self.link.at(Phase::Done, self.next);
        Ok(())
    }

    /// This worker's position in its generation.
    pub(super) fn rank(&self) -> Rank {
        self.assignment.rank
    }

    /// Ranks in its generation.
    pub(super) fn world(&self) -> u32 {
        self.assignment.peers.len() as u32
    }

    /// Begins a phase: for heartbeats, and for memory peaks.
    pub(super) fn enter(&mut self, phase: Phase, step: Step) -> Result<(), TrainError> {
        self.link.at(phase, step);
        self.meter.enter(phase).map_err(|source| TrainError::DoesNotFit { step, source })
    }

    /// Leases the next steps' samples and puts the data threads to work on them.
    fn request_ahead(&mut self, total: Step) -> Result<(), TrainError> {
        let until = Step((self.next.0 + 1 + REQUESTS_AHEAD).min(total.0));
        while self.requested < until {
            let step = self.requested;
            let batch = self.plan.batch(step);
            let slice = self.link.lease(step, batch.len())?;
            let begin = batch.positions.start;
            self.prefetch.request(StepRequest {
                step,
                epoch: batch.epoch,
                positions: std::iter::once(begin + slice.start..begin + slice.end).collect(),
                micro_batch: self.micro_batch,
            })?;
            self.requested = Step(step.0 + 1);
        }
        Ok(())
    }

    /// Does what all ranks have agreed was asked for, at this boundary. True: stop.
    fn obey(&mut self, agreed: Commands) -> Result<bool, TrainError> {
        if agreed.memory_reports > self.obeyed.memory_reports {
            let peaks = self.meter.report();
            self.link.report(Report::Memory(peaks))?;
        }
        let every = self.spec.train.checkpoint_every;
        let due = every > 0 && self.next.0.is_multiple_of(every);
        if due || agreed.checkpoints > self.obeyed.checkpoints {
            self.save()?;
        }
        self.obeyed = agreed;
        if agreed.pause && !agreed.stop {
            self.link.at(Phase::Paused, self.next);
            self.link.wait_while_paused()?;
        }
        Ok(agreed.stop)
    }
}
