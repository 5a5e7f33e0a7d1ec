//! One step as a transaction.
//!
//! ```text
//!          ┌────────────── again, micro-batch halved ──────────────┐
//!          ▼                                                       │
//! accumulate: micro-batches forward and backward ─▶ vote ─▶ any out of memory
//!                                                    ├────▶ any failed ─▶ end
//!                                                    └────▶ all well: reduce, clip, AdamW, gather
//! ```
//!
//! Until the vote nothing has left this rank and nothing has changed but the gradient buffer, so a step can be dropped and tried
//! again: with the same samples and, because draws are keyed by step and sample, with the same noise. A rank that sees between two layers that
//! another one's attempt is lost drops its own at once ([`Lookout`]).
//!
//! Memory runs out in four ways, and all end in the same vote: a micro-batch went over `memory.capacity` (noticed between two layers, so
//! within a fraction of it), a device refused an allocation, a micro-batch is expected not to fit from what earlier ones took (it does not
//! run at all), or the phases after the vote of the step before went over. A rank whose system swaps it out, step after
//! step, says so in its ballot, too; that step counts, and the next one takes less.

use std::{sync::Arc, time::Instant};

use coxswain_proto::{
    cache_plan::CacheUse,
    ids::{Bytes, Step},
    plan::Batch,
    report::{Merge, Metric, Totals},
    run_spec::CacheMode,
};

use super::{
    TrainError,
    books::STEPS_SIGHTED,
    features::{Claim, Features},
    learner::Learner,
    training::Training,
    vote::{self, Ballot, Fared, Lookout, Verdict},
};
use coxswain_nn::{kernels::Tape, params::Group};
use coxswain_task::{self as task, Figures, MicroLoss, Pass, StageClock, StageTimes};

use crate::{
    feeder::Prepared,
    link::{CacheTurn, Phase, Report, StepReport, StepTimes},
    memory::{self, Attempt, Category, Held, Unfinished},
    zero::{GroupNorm, StepInput},
};

/// Sums over this rank's micro-batches.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    loss_sum: f64,
    valid_count: f64,
    tokens: u64,
    cache: CacheUse,
}

/// Where the time of a step went.
#[derive(Debug, Default)]
pub(super) struct Spent {
    times: StepTimes,
    stages: StageTimes,
    /// Of the newest attempt.
    figures: Figures,
}

/// Norms of the global gradient, before clipping.
#[derive(Debug)]
struct Norms {
    all: f64,
    groups: Vec<GroupNorm>,
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Runs `step` until all ranks have committed it. Returns what happened and the verdict with everybody's commands.
    pub(super) fn transaction(&mut self, step: Step) -> Result<(StepReport, Verdict), TrainError> {
        let started = Instant::now();
        if !self.books.meter.keeps_books_of(self.members.assignment.rank) {
            self.books.meter.begin_run(self.holdings(), &self.run.output_dir, self.members.assignment.rank);
        }
        let batch = self.run.plan.batch(step);
        let (mut spent, mut retries) = (Spent::default(), 0);
        let (share, verdict) = loop {
            let (mut share, mut last) = (Share::default(), None);
            let accumulated = self.accumulate(step, &mut share, &mut last, &mut spent);
            let (fared, own) = match accumulated {
                Ok(()) => (Fared::Ok, None),
                Err(TrainError::CalledOff) => (Fared::GaveUp, None),
                Err(own @ TrainError::DoesNotFit { .. }) => (Fared::OutOfMemory, Some(own)),
                Err(own) => (Fared::Failed, Some(own)),
            };
            let verdict = self.vote(step, fared, share, &mut spent)?;
            match (verdict.fared, own) {
                ((Fared::Ok, _), _) => break (share, verdict),
                ((Fared::OutOfMemory, _), own) => {
                    self.shrink(step, &verdict, own, last)?;
                    retries += 1;
                }
                // What does not fit may fit when it is tried again, without the rank or the sample that failed. And nobody gives up but
                // for a rank that says what has befallen it.
                ((Fared::Failed | Fared::GaveUp, rank), None | Some(TrainError::DoesNotFit { .. })) => {
                    return Err(TrainError::PeerFailed(rank));
                }
                ((Fared::Failed | Fared::GaveUp, _), Some(own)) => return Err(own),
            }
        };
        self.settle_features(step)?;
        let (norms, broken) = match self.update(step, &verdict, &mut spent) {
            Ok(norms) => (norms, None),
            Err(error @ TrainError::Device { .. }) => return Err(error),
            Err(error) => {
                match self.learner.held.as_ref().filter(|held| held.optimizer.versions().0.newest > step.0) {
                    Some(held) => {
                        (Norms { all: held.optimizer.last_norm(), groups: Vec::new() }, Some(error))
                    }
                    None => return Err(error),
                }
            }
        };
        spent.times.total = started.elapsed();
        let memory_peak = self.books.meter.end_step(step, self.feed.micro_batch, retries + 1);
        let metrics = self.metrics(step, &spent, &norms.groups);
        let done = self.done(step, &batch, (share, memory_peak), spent.times, (&verdict, norms.all));
        let done = StepReport { retries, metrics: metrics.into(), ..done };
        if let Some(error) = broken {
            // The last collective broke, but this rank has taken the step, and perhaps nobody else lives to tell: if all parts of
            // that version exist, the next generation goes on from it.
            self.books.summary.book(&done);
            self.members.link.report(Report::Step(done))?;
            return Err(error);
        }
        if let Some(rank) = verdict.pressed {
            self.relieve(Step(step.0 + 1), rank)?;
        }
        Ok((done, verdict))
    }

    /// Forward and backward over this rank's samples; gradients of the loss sum end up in `self.learner.grads`. Leaves the micro-batch that ran last,
    /// for another attempt.
    fn accumulate(
        &mut self,
        step: Step,
        share: &mut Share,
        last: &mut Option<Prepared>,
        spent: &mut Spent,
    ) -> Result<(), TrainError> {
        self.learner.grads.zero();
        spent.figures = Figures::default();
        // The optimizer and the collectives of the step before have no vote of their own.
        if let Some(source) = self.books.meter.take_overrun() {
            return Err(TrainError::DoesNotFit { step, source });
        }
        self.measure_portion(step)?;
        loop {
            self.enter(Phase::Data, step)?;
            if Lookout::of(self.members.comm.as_ref()).sees_loss() {
                return Err(TrainError::CalledOff);
            }
            let waiting = Instant::now();
            let prepared = self.feed.prefetch.next(step)?;
            spent.times.data += waiting.elapsed();
            let Some(prepared) = prepared else { break };
            // That one has fitted: its rows are not wanted while this one runs.
            *last = None;
            let prepared = self.complete(step, prepared, &mut share.cache)?;
            let micro_batch = &*last.insert(prepared).batch;
            // The optimizer makes its buffers in the first step; later ones begin with everything there.
            if self.books.summary.losses.len() < STEPS_SIGHTED {
                self.books.sightings.ready = memory::in_use();
            }
            let loss = self.pass(step, micro_batch, spent)?;
            share.loss_sum += loss.loss_sum;
            share.valid_count += loss.valid;
            share.tokens += micro_batch.tokens();
        }
        self.publish_features(step);
        // Where LoRA rests, that it has no gradient means nothing.
        if self.resting().is_none() && !self.learner.gradients.all_heard() {
            self.learner.gradients.observe(self.learner.trainables.layout(), &self.learner.grads);
        }
        Ok(())
    }

    /// One micro-batch forward and backward, as far as memory goes, and as long as no other rank's attempt is lost. Everything it held is free
    /// again when this returns.
    pub(super) fn pass(
        &mut self,
        step: Step,
        micro_batch: &dyn task::Batch,
        spent: &mut Spent,
    ) -> Result<MicroLoss, TrainError> {
        let does_not_fit = |source| TrainError::DoesNotFit { step, source };
        let attempt = Attempt {
            rank: self.members.rank(),
            step,
            samples: micro_batch.len(),
            cells: micro_batch.cells(),
            divisible: self.feed.micro_batch > 1,
            representative: micro_batch.features().is_none() || self.resting().is_none(),
        };
        self.books.meter.expect(attempt).map_err(does_not_fit)?;
        let before = self.books.meter.in_use();
        let lookout = Lookout::of(self.members.comm.as_ref());
        let Learner { objective, trainables, grads, .. } = &mut self.learner;
        let (meter, link) = (&mut self.books.meter, &mut self.members.link);
        let mut clock = StageClock::new(|pass| {
            let phase = match pass {
                Pass::Forward => Phase::Forward,
                Pass::Backward => Phase::Backward,
            };
            link.at(phase, step);
            // Fails after loading only.
            let _ = meter.enter(phase);
        });
        let outcome = memory::guarded_unless(
            move || lookout.sees_loss(),
            || {
                let loss = objective.forward_backward(trainables, micro_batch, grads, &mut clock);
                // A device says what it could not do when it comes to it, and only to who waits; gradients that it did not make look
                // like any others.
                let settled = if B::ON_HOST { Ok(()) } else { B::sync(&trainables.device()) };
                (loss, settled)
            },
        );
        let (stages, figures) = clock.into_parts();
        spent.stages.extend(&stages);
        spent.figures.extend(figures);
        self.enter(Phase::Data, step)?;
        let (loss, overrun) = match outcome {
            Ok(loss) => (Some(loss), None),
            Err(Unfinished::OutOfMemory(overrun)) => (None, Some(overrun)),
            Err(Unfinished::CalledOff) => {
                self.books.meter.given_up().map_err(does_not_fit)?;
                return Err(TrainError::CalledOff);
            }
        };
        self.books.meter.passed(before.0, overrun).map_err(does_not_fit)?;
        let (loss, settled) = loss.expect("a pass without a loss has overrun");
        settled.map_err(|error| TrainError::Device { step, detail: error.to_string() })?;
        Ok(loss?)
    }

    fn vote(
        &mut self,
        step: Step,
        fared: Fared,
        share: Share,
        spent: &mut Spent,
    ) -> Result<Verdict, TrainError> {
        self.enter(Phase::Communication, step)?;
        let voting = Instant::now();
        let ballot = Ballot {
            fared,
            commands: self.members.link.commands(),
            loss_sum: share.loss_sum,
            valid_count: share.valid_count,
            pressed: self.books.meter.take_pressed(),
        };
        let verdict = vote::cast(&ballot, self.members.comm.as_mut())?;
        spent.times.communication += voting.elapsed();
        Ok(verdict)
    }

    /// What this rank holds from the first step to the last, for messages.
    fn holdings(&self) -> Vec<Held> {
        let layout = self.learner.trainables.layout();
        let rows = self.learner.objective.modules(layout);
        let frozen = rows.iter().filter(|row| !row.trains).map(|row| row.bytes).sum();
        let optimizer = &self.learner.held.as_ref().expect("a generation begins with a state").optimizer;
        let optimizer = optimizer.bytes(self.members.comm.as_ref());
        [
            (Category::FrozenWeights, Bytes(frozen)),
            (Category::Trainables, optimizer.weights),
            (Category::Gradients, optimizer.grads),
            (Category::OptimizerShard, optimizer.moments),
            (Category::Mirror, optimizer.redundancy),
            (Category::CollectiveBuffers, optimizer.comm_buffers),
            (Category::Cache, self.features.as_ref().map_or(Bytes(0), Features::bytes)),
        ]
        .map(|(what, bytes)| Held { what, bytes })
        .into()
    }

    /// Reduce, clip, AdamW on this rank's shard, gather.
    fn update(&mut self, step: Step, verdict: &Verdict, spent: &mut Spent) -> Result<Norms, TrainError> {
        self.enter(Phase::Optimizer, step)?;
        let (updating, busy) = (Instant::now(), self.members.communicating());
        let resting = self.resting();
        let scale = 1.0 / verdict.valid_count.max(1.0);
        let input = StepInput { scale, rates: self.learner.rates.rates(step.0), resting };
        let mut weights: B::Flat = self.learner.trainables.take();
        let held = self.learner.held.as_mut().expect("a generation begins with a state");
        let grads = self.learner.grads.values_but(resting, self.learner.trainables.layout());
        let outcome = held.optimizer.step(grads, &mut weights, &input, self.members.comm.as_mut());
        self.learner.trainables.put(weights);
        let communication = self.members.communicating() - busy;
        spent.times.communication += communication;
        spent.times.optimizer += updating.elapsed().saturating_sub(communication);
        // Refused here, memory is missing in the middle of a step that others may have taken: what this rank holds is not to be trusted, and
        // its part is its neighbour's mirror's to give.
        match memory::refused() {
            Some(detail) => Err(TrainError::Device { step, detail }),
            None => {
                let outcome = outcome?;
                Ok(Norms { all: outcome.grad_norm, groups: outcome.group_norms })
            }
        }
    }

    /// What stays as it is in the step that runs: the adapter, where features come from a generation that it made.
    fn resting(&self) -> Option<Group> {
        let cached = matches!(self.feed.claimed.front(), Some(Claim { turn: CacheTurn::Cached(_), .. }));
        let periodic = cached && self.run.spec.cache.mode == CacheMode::Periodic;
        self.learner.objective.extractor().filter(|_| periodic).map(|extractor| extractor.resting())
    }

    /// What there is to tell of a step that only names itself: every sink shows whatever stands here. Rank 0 speaks for all where all know
    /// the same.
    fn metrics(&self, step: Step, spent: &Spent, norms: &[GroupNorm]) -> Vec<Metric> {
        let mut metrics: Vec<_> =
            spent.stages.iter().map(|(stage, time)| Metric::stage_time(stage, time)).collect();
        let speaks = |figure: &&Metric| figure.merge != Merge::Same || self.members.rank().0 == 0;
        metrics.extend(spent.figures.iter().filter(speaks).cloned());
        if self.members.rank().0 == 0 {
            let rates = self.learner.rates.rates(step.0);
            let rate = |group: Group| Metric::learning_rate(&group.to_string(), rates.of(group));
            let norm = |of: &GroupNorm| Metric::same(format!("grad_norm/{}", of.group), of.norm);
            metrics.extend(norms.iter().map(norm));
            metrics.extend(self.learner.trainables.layout().groups().into_iter().map(rate));
        }
        metrics
    }

    fn done(
        &mut self,
        step: Step,
        batch: &Batch,
        (share, memory_peak): (Share, Bytes),
        times: StepTimes,
        (verdict, grad_norm): (&Verdict, f64),
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
            cache_generation: claim.as_ref().map_or(0, |claim| claim.turn.number()),
            cache,
            positions: claim.map_or(Vec::new(), |claim| claim.positions),
            totals: Totals { loss_sum: verdict.loss_sum, valid_count: verdict.valid_count, grad_norm },
            times,
            metrics: Arc::default(),
            tokens: share.tokens,
            retries: 0,
            memory_peak,
        }
    }
}
