//! What does not change while a rank trains: the run, its plan, its task, and where results go.

use std::path::PathBuf;

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    cache_plan::CacheSchedule,
    ids::Step,
    plan::Plan,
    run_spec::{Recompute, RunSpec, ScheduleOver},
};
use coxswain_task::{Objective, TaskOn};

use super::advice;
use super::checkpoint::Store;
use crate::zero::{LearningRateSchedule, Rates};

/// What does not change while a rank trains.
pub(super) struct Facts<'a, B: Tape<Base = B>> {
    pub spec: &'a RunSpec,
    pub spec_digest: String,
    pub plan: Plan,
    pub task: &'static dyn TaskOn<B>,
    /// As this rank does it: the run's own, unless that is `auto`.
    pub recompute: Recompute,
    pub output_dir: PathBuf,
    pub store: Store,
    /// What its first values come from, where that is not chance; a line for each group. Nothing where the
    /// run goes on from a state of its own: what it once started from need not be there any more.
    pub starts: Vec<String>,
    /// Where this machine's memory records are; none: nothing is learned from them, and nothing added.
    pub records: Option<PathBuf>,
}

impl<B: Tape<Base = B>> Facts<'_, B> {
    /// Whether an epoch ends with this step.
    pub fn ends_epoch(&self, step: Step) -> bool {
        (step.0 + 1).is_multiple_of(self.plan.steps_per_epoch())
    }

    /// Whether the run file names this step to be left out.
    pub fn leaves_out(&self, step: Step) -> bool {
        self.spec.train.skip_steps.contains(&step.0)
    }

    /// When kept features serve and are compared; none if they serve always or never.
    pub fn cache_schedule(&self) -> Option<CacheSchedule> {
        CacheSchedule::new(&self.spec.cache, &self.plan)
    }

    /// The rates of this run if it has `total` steps.
    pub fn rates(&self, objective: &dyn Objective<B>, peak: Rates, total: u64) -> LearningRateSchedule {
        let rates = LearningRateSchedule::new(&self.spec.optimizer, peak, total);
        let resting = objective.extractor().map(|extractor| extractor.resting());
        let over_live = self.spec.optimizer.schedule_over == ScheduleOver::Live;
        match resting.zip(self.cache_schedule()).filter(|_| over_live) {
            Some((resting, schedule)) => rates.over_live(resting, schedule),
            None => rates,
        }
    }

    /// Samples of the largest slice of a step, with so many ranks.
    pub fn share(&self, world: u32) -> usize {
        self.spec.train.global_batch.div_ceil(world.max(1) as usize)
    }

    /// What to change where one sample alone does not fit.
    pub fn advice(&self) -> String {
        advice(self.task, &self.computed())
    }

    /// The run as this rank computes it: in its mode of recompute.
    pub fn computed(&self) -> RunSpec {
        let mut spec = self.spec.clone();
        spec.train.recompute = self.recompute;
        spec
    }
}
