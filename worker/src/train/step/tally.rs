//! What a step has come to on this rank.

use coxswain_nn::{kernels::Tape, params::Group};
use coxswain_proto::{
    cache_plan::CacheUse,
    ids::{Rank, Step},
    report::{Merge, Metric, Skip, SkipCause},
};
use coxswain_task::{Figures, StageTimes};

use super::vote::Verdict;
use crate::train::{Learner, TrainError};
use crate::{link::StepTimes, zero::GroupNorm};

/// Sums over this rank's micro-batches.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::train) struct Share {
    pub loss_sum: f64,
    pub valid_count: f64,
    pub tokens: u64,
    pub cache: CacheUse,
}

/// Where the time of a step went.
#[derive(Debug, Default)]
pub(in crate::train) struct TimeBreakdown {
    pub times: StepTimes,
    pub stages: StageTimes,
    /// Figures of the newest attempt.
    pub figures: Figures,
}

impl TimeBreakdown {
    /// What there is to tell of a step that only names itself: every sink shows whatever stands here. Rank 0
    /// speaks for all where all know the same.
    pub fn metrics<B: Tape<Base = B>>(
        &self,
        step: Step,
        rank: Rank,
        learner: &Learner<B>,
        norms: &[GroupNorm],
    ) -> Vec<Metric> {
        let mut metrics: Vec<_> =
            self.stages.iter().map(|(stage, time)| Metric::stage_time(stage, time)).collect();
        let speaks = |figure: &&Metric| figure.merge != Merge::FromRankZero || rank.0 == 0;
        metrics.extend(self.figures.iter().filter(speaks).cloned());
        if rank.0 == 0 {
            let rates = learner.rates.rates(step.0);
            let rate = |group: Group| Metric::learning_rate(&group.to_string(), rates.of(group));
            let norm = |of: &GroupNorm| Metric::same(format!("grad_norm/{}", of.group), of.norm);
            metrics.extend(norms.iter().map(norm));
            metrics.extend(learner.trainables.layout().groups().into_iter().map(rate));
            metrics.extend(learner.loss_scale_metric(rank));
        }
        metrics
    }
}

/// Numbers of an attempt that were not finite.
#[derive(Clone, Copy, Debug)]
pub(super) struct NonFiniteNumbers {
    /// Which.
    pub cause: SkipCause,
    /// The first rank that had them; means nothing where only the norm over all ranks was not finite.
    pub rank: Rank,
}

/// Norms of the global gradient, before clipping.
#[derive(Debug, Default)]
pub(super) struct Norms {
    pub all: f64,
    pub groups: Vec<GroupNorm>,
}

/// What a step has come to, on all ranks.
pub(super) struct StepEnding {
    pub verdict: Verdict,
    /// Norms of the global gradient; of nothing where it was left out.
    pub norms: Norms,
    /// Why all leave it out.
    pub skipped: Option<Skip>,
    /// What broke after this rank had taken it.
    pub broken: Option<TrainError>,
}
