//! What a step has come to so far on this rank, and what is told of it in the end.

use std::sync::Arc;

use coxswain_nn::{kernels::Tape, params::Group};
use coxswain_proto::{
    cache_plan::CacheUse,
    ids::{Bytes, Rank, Step},
    plan::Batch,
    report::{Merge, Metric, SkipCause, Totals},
};
use coxswain_task::{Figures, StageTimes};

use super::{learner::Learner, suspicions::Suspicions, training::Training};
use crate::{
    link::{StepReport, StepTimes},
    zero::GroupNorm,
};

/// Sums over this rank's micro-batches.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    pub loss_sum: f64,
    pub valid_count: f64,
    pub tokens: u64,
    pub cache: CacheUse,
}

/// Where the time of a step went.
#[derive(Debug, Default)]
pub(super) struct Spent {
    pub times: StepTimes,
    pub stages: StageTimes,
    /// Of the newest attempt.
    pub figures: Figures,
}

impl Spent {
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
pub(super) struct Doubted {
    /// Which.
    pub cause: SkipCause,
    /// The first rank that had them; means nothing where only the norm over all ranks was not finite.
    pub rank: Rank,
}

/// What all attempts of a step have come to so far.
#[derive(Debug, Default)]
pub(super) struct Tried {
    pub spent: Spent,
    /// Attempts that were voted down.
    pub retries: u32,
    /// An attempt had numbers that were not finite: which.
    pub doubt: Option<Doubted>,
    /// Whose gradients were wrong, where the step was run by others, too.
    pub suspicions: Suspicions,
}

/// Norms of the global gradient, before clipping.
#[derive(Debug)]
pub(super) struct Norms {
    pub all: f64,
    pub groups: Vec<GroupNorm>,
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// The report of a step that all ranks have taken, or left out; what this rank had claimed for it is
    /// consumed.
    pub(super) fn done(
        &mut self,
        step: Step,
        batch: &Batch,
        share: Share,
        totals: Totals,
        times: StepTimes,
    ) -> StepReport {
        let claim = self.feed.claimed.pop_front();
        let cache = match &mut self.features {
            Some(features) => features.book(share.cache, &times),
            None => share.cache,
        };
        StepReport {
            generation: self.members.assignment.generation,
            step,
            epoch: batch.epoch,
            cache_generation: claim.as_ref().map_or(0, |claim| claim.cache_phase.number()),
            cache,
            positions: claim.map_or(Vec::new(), |claim| claim.positions),
            totals,
            times,
            metrics: Arc::default(),
            tokens: share.tokens,
            retries: 0,
            memory_peak: Bytes(0),
            skipped: None,
        }
    }
}
