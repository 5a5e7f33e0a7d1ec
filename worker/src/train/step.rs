//! One step as a transaction.
//!
//! ```text
//!          ┌──────── again: micro-batch halved, or as it was ──────┐
//!          ▼                                                       │
//! accumulate: micro-batches forward and backward ─▶ vote ─▶ any out of memory
//!                                                    ├────▶ a number not finite ─▶ the 2nd time: left out
//!                                                    ├────▶ any failed ─▶ end
//!                                                    └────▶ all well: reduce, norm (not finite: as above),
//!                                                           clip, AdamW, gather
//! ```
//!
//! Where the loss is scaled, a gradient that is not finite is at first the scale's fault: the step is left
//! out at once, on all ranks, and the scale is lowered (`zero::loss_scale`). Once the scale is at its least
//! the number is at fault, as above.
//!
//! Until the vote nothing has left this rank and nothing has changed but the gradient buffer, so a step can
//! be dropped and tried again: with the same samples and, because draws are keyed by step and sample, with
//! the same noise. A rank that sees between two layers that another one's attempt is lost drops its own at
//! once ([`Lookout`]).
//!
//! Memory runs out in four ways, and all end in the same vote: a micro-batch went over `memory.capacity`
//! (noticed between two layers, so within a fraction of it), a device refused an allocation, a micro-batch is
//! expected not to fit from what earlier ones took (it does not run at all), or the phases after the vote of
//! the step before went over. A rank whose system swaps it out, step after step, says so in its ballot, too;
//! that step counts, and the next one takes less.

use coxswain_proto::{
    ids::{Bytes, Rank, Step},
    report::{SkipCause, Skipped, Totals},
    run_spec::CacheMode,
};

use super::{
    TrainError,
    features::{Claim, Features},
    learner::Learner,
    replay::{self, Attempted},
    skip::{self, Doubt},
    spike,
    stats::STEPS_OBSERVED,
    tally::{Norms, Share, Spent, Tried},
    training::Training,
    verify,
    vote::{self, Ballot, Fared, Lookout, Verdict},
};
use coxswain_nn::{
    kernels::{Tape, free_broken_off},
    params::Group,
};
use coxswain_task::{self as task, Figures, MicroLoss, Pass, StageClock};

use crate::{
    clock,
    feeder::Prepared,
    link::{CachePhase, Phase, Report, StepReport, StepTimes},
    memory::{self, Attempt, Unfinished},
    zero::StepInput,
};

/// What the last attempt of a step came to.
enum Ending {
    /// All ranks have taken the step. Also what broke after this rank had.
    Taken(Norms, Option<TrainError>),
    /// All ranks leave it out.
    LeftOut(Skipped),
}

/// The last attempt of a step.
struct LastAttempt {
    share: Share,
    verdict: Verdict,
    ending: Ending,
}

/// Tries the step once; none if it is to be tried again.
fn attempt<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    tried: &mut Tried,
) -> Result<Option<LastAttempt>, TrainError> {
    let (mut share, mut last) = (Share::default(), None);
    let moved = replay::run_moved(training, step, tried)?;
    let accumulated = training.accumulate(step, &mut share, &mut last, tried);
    let (fared, own) = match accumulated {
        Ok(()) => (Fared::Ok, None),
        Err(TrainError::CalledOff) => (Fared::GaveUp, None),
        Err(own @ TrainError::DoesNotFit { .. }) => (Fared::OutOfMemory, Some(own)),
        Err(own) if own.is_not_finite() => (Fared::NotFinite, Some(own)),
        Err(own) => (Fared::Failed, Some(own)),
    };
    let verdict = training.vote(step, fared, share, &mut tried.spent)?;
    if verdict.fared.0 == Fared::Ok && verify::is_due(training.run.spec, step) {
        verify::compare(training, step)?;
    }
    if let Some(moved) = moved {
        let attempted = Attempted { moved, share: &share, fared, verdict: &verdict };
        if replay::compare(training, step, &attempted, &mut tried.suspicions)? {
            training.recut(step, last)?;
            return Ok(None);
        }
    }
    let spike = spike::judge(training, step, &verdict)?;
    let skipped = match (verdict.fared, own) {
        ((Fared::Ok, _), _) if skip::is_asked(training.run.spec, step) => Some(skip::asked()),
        ((Fared::Ok, _), _) if spike.is_some() => spike,
        ((Fared::Ok, _), _) => match training.commit(step, &verdict, &mut tried.spent.times) {
            Err(error) if error.is_not_finite() && training.learner.may_lower_loss_scale() => {
                Some(Skipped { cause: SkipCause::Overflow, samples: Vec::new() })
            }
            Err(error) if error.is_not_finite() => {
                let doubt = Doubt { cause: SkipCause::Gradient, rank: Rank(0), error: Some(error) };
                skip::doubt(training, step, &doubt, last, &mut tried.doubt)?
            }
            taken => {
                let (norms, broken) = taken?;
                return Ok(Some(LastAttempt { share, verdict, ending: Ending::Taken(norms, broken) }));
            }
        },
        ((Fared::NotFinite, rank), own) => {
            let error = own.filter(TrainError::is_not_finite);
            skip::doubt(
                training,
                step,
                &Doubt { cause: SkipCause::Loss, rank, error },
                last,
                &mut tried.doubt,
            )?
        }
        ((Fared::OutOfMemory, _), own) => {
            training.shrink(step, &verdict, own, last)?;
            None
        }
        // What does not fit or is not finite may be well when it is tried again, without the rank or the
        // sample that failed. And a rank gives up only for another one that says what went wrong there.
        ((Fared::Failed | Fared::GaveUp, rank), own) => {
            let own = own.filter(|own| !own.is_not_finite() && !matches!(own, TrainError::DoesNotFit { .. }));
            return Err(own.unwrap_or(TrainError::PeerFailed(rank)));
        }
    };
    let Some(skipped) = skipped else { return Ok(None) };
    skip::leave_out(training, step, skipped.cause)?;
    Ok(Some(LastAttempt { share, verdict, ending: Ending::LeftOut(skipped) }))
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Runs `step` until all ranks have committed it, or leave it out. Returns what happened and the verdict
    /// with everybody's commands.
    pub(super) fn transaction(&mut self, step: Step) -> Result<(StepReport, Verdict), TrainError> {
        let started = clock::now();
        if !self.stats.meter.accounts_for(self.members.assignment.rank) {
            let cache = self.features.as_ref().map_or(Bytes(0), Features::bytes);
            let holdings = self.learner.holdings(&self.members, cache);
            self.stats.meter.begin_run(holdings, &self.run.output_dir, self.members.assignment.rank);
        }
        let batch = self.run.plan.batch(step);
        let mut tried = Tried::default();
        let LastAttempt { share, verdict, ending } = loop {
            match attempt(self, step, &mut tried)? {
                Some(last) => break last,
                None => tried.retries += 1,
            }
        };
        let Tried { mut spent, retries, doubt, .. } = tried;
        spent.times.total = started.elapsed();
        let memory_peak = self.stats.meter.end_step(step, self.feed.micro_batch, retries + 1);
        let (norms, broken, skipped) = match ending {
            Ending::Taken(norms, broken) => (norms, broken, None),
            Ending::LeftOut(skipped) => (Norms { all: 0.0, groups: Vec::new() }, None, Some(skipped)),
        };
        let (totals, metrics) = match skipped {
            Some(_) => {
                let scale = self.learner.loss_scale_metric(self.members.rank());
                (Totals::default(), scale.into_iter().collect())
            }
            None => (
                Totals { loss_sum: verdict.loss_sum, valid_count: verdict.valid_count, grad_norm: norms.all },
                spent.metrics(step, self.members.rank(), &self.learner, &norms.groups),
            ),
        };
        let done = self.done(step, &batch, share, totals, spent.times);
        let done = StepReport { retries, memory_peak, metrics: metrics.into(), skipped, ..done };
        if let Some(error) = broken {
            // The last collective broke, but this rank has taken the step, and may be the only one left to
            // report it: if all parts of that version exist, the next generation goes on from it.
            self.stats.summary.book(&done);
            self.members.link.report(Report::Step(done))?;
            return Err(error);
        }
        if let Some(doubted) = doubt.filter(|_| done.skipped.is_none()) {
            skip::tell_cleared(self, step, doubted)?;
        }
        if let Some(rank) = verdict.pressed {
            self.relieve(Step(step.0 + 1), rank)?;
        }
        Ok((done, verdict))
    }

    /// Takes a step in which all ranks are well. Also returns what broke after this rank had taken it.
    fn commit(
        &mut self,
        step: Step,
        verdict: &Verdict,
        times: &mut StepTimes,
    ) -> Result<(Norms, Option<TrainError>), TrainError> {
        self.with_features(|features, desk| features.settle_epoch(desk, step))?;
        let entered = self.enter(Phase::Optimizer, step);
        let scale = 1.0 / verdict.valid_count.max(1.0);
        let input = StepInput { scale, rates: self.learner.rates.rates(step.0), resting: self.resting() };
        match entered.and_then(|()| self.update(step, &input, times)) {
            Ok(norms) => Ok((norms, None)),
            Err(error @ TrainError::Device { .. }) => Err(error),
            Err(error) => {
                let held = self.learner.held.as_ref();
                match held.filter(|held| held.optimizer.versions().0.newest > step.0) {
                    Some(held) => {
                        Ok((Norms { all: held.optimizer.last_norm(), groups: Vec::new() }, Some(error)))
                    }
                    None => Err(error),
                }
            }
        }
    }

    /// Reduce, clip, AdamW on this rank's shard, gather.
    fn update(&mut self, step: Step, input: &StepInput, times: &mut StepTimes) -> Result<Norms, TrainError> {
        let (learner, members) = (&mut self.learner, &mut self.members);
        let (updating, busy) = (clock::now(), members.communicating());
        let mut weights: B::Flat = learner.trainables.take();
        let held = learner.held.as_mut().expect("a generation begins with a state");
        let grads = learner.grads.values_but(input.resting, learner.trainables.layout());
        let outcome = held.optimizer.step(grads, &mut weights, input, members.comm.as_mut());
        learner.trainables.put(weights);
        let communication = members.communicating() - busy;
        times.communication += communication;
        times.optimizer += updating.elapsed().saturating_sub(communication);
        // Refused here, memory is missing in the middle of a step that others may have taken: what this rank
        // holds is not to be trusted, and its part is its replica's to give.
        match memory::refused() {
            Some(detail) => Err(TrainError::Device { step, detail }),
            None => {
                let outcome = outcome?;
                Ok(Norms { all: outcome.grad_norm, groups: outcome.group_norms })
            }
        }
    }

    /// Forward and backward over this rank's samples; gradients of the loss sum end up in
    /// `self.learner.grads`. Leaves the micro-batch that ran last, for another attempt.
    fn accumulate(
        &mut self,
        step: Step,
        share: &mut Share,
        last: &mut Option<Prepared>,
        tried: &mut Tried,
    ) -> Result<(), TrainError> {
        let asked = skip::is_asked(self.run.spec, step);
        let Tried { spent, doubt, .. } = tried;
        self.begin_gradients(step);
        spent.figures = Figures::default();
        // The optimizer and the collectives of the step before have no vote of their own.
        if let Some(source) = self.stats.meter.take_overrun() {
            return Err(TrainError::DoesNotFit { step, source });
        }
        self.with_features(|features, desk| features.measure_portion(desk, step))?;
        loop {
            self.enter(Phase::Data, step)?;
            if Lookout::of(self.members.comm.as_ref()).sees_loss() {
                return Err(TrainError::CalledOff);
            }
            let next = self.next_batch(step, last, &mut spent.times, &mut share.cache)?;
            let Some(micro_batch) = next else { break };
            if asked {
                continue;
            }
            // Buffers that stay are made in the first steps; later ones begin with everything there.
            if self.stats.summary.losses.len() < STEPS_OBSERVED {
                self.stats.meter.forget_most();
            }
            let began = clock::now();
            let mut loss = self.pass(step, micro_batch, spent)?;
            self.stats.injected.slow_down(step, began.elapsed(), &mut spent.times.data);
            loss.loss_sum = self.stats.injected.loss(self.members.rank(), step, loss.loss_sum);
            self.learner.judge(step, micro_batch, &loss, doubt.is_some())?;
            share.loss_sum += loss.loss_sum;
            share.valid_count += loss.valid;
            share.tokens += micro_batch.tokens();
        }
        self.flip_a_gradient(step, true);
        self.features.iter().for_each(|features| features.publish_epoch(&self.run, step));
        // Where LoRA rests, that it has no gradient means nothing.
        if self.resting().is_none() && !self.learner.gradients.is_over() {
            self.learner.gradients.observe(self.learner.trainables.layout(), &self.learner.grads);
        }
        Ok(())
    }

    /// One micro-batch forward and backward, as far as memory goes, and as long as no other rank's attempt is
    /// lost. Everything it held is free again when this returns.
    pub(super) fn pass(
        &mut self,
        step: Step,
        micro_batch: &dyn task::Batch,
        spent: &mut Spent,
    ) -> Result<MicroLoss, TrainError> {
        let lookout = Lookout::of(self.members.comm.as_ref());
        self.pass_unless(lookout, step, micro_batch, spent)
    }

    /// The same, given up as soon as this lookout sees a lost attempt.
    pub(super) fn pass_unless(
        &mut self,
        lookout: Lookout,
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
        self.stats.meter.expect(attempt).map_err(does_not_fit)?;
        let before = self.stats.meter.in_use();
        let Learner { objective, trainables, grads, .. } = &mut self.learner;
        let (meter, link) = (&mut self.stats.meter, &mut self.members.link);
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
                // A device reports what it could not do only when its queue is waited for; gradients that it
                // did not make look like any others.
                let settled = if B::ON_HOST { Ok(()) } else { B::sync(&trainables.device()) };
                (loss, settled)
            },
        );
        // Also a task that finds its loss not finite has recorded what it does not run backward.
        if !matches!(outcome, Ok((Ok(_), _))) {
            free_broken_off::<B>(&self.learner.trainables.device());
        }
        let (stages, figures) = clock.into_parts();
        spent.stages.extend(&stages);
        spent.figures.extend(figures);
        self.enter(Phase::Data, step)?;
        let (loss, overrun) = match outcome {
            Ok(loss) => (Some(loss), None),
            Err(Unfinished::OutOfMemory(overrun)) => (None, Some(overrun)),
            Err(Unfinished::CalledOff) => {
                self.stats.meter.given_up().map_err(does_not_fit)?;
                return Err(TrainError::CalledOff);
            }
        };
        self.stats.meter.passed(before.0, overrun).map_err(does_not_fit)?;
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
        let voting = clock::now();
        let ballot = Ballot {
            fared,
            commands: self.members.link.commands(),
            loss_sum: share.loss_sum,
            valid_count: share.valid_count,
            pressed: self.stats.meter.take_pressed(),
            spike_limit: self.skips.losses.limit(self.run.spec.train.spike_factor),
        };
        let verdict = vote::cast(&ballot, self.members.comm.as_mut())?;
        spent.times.communication += voting.elapsed();
        Ok(verdict)
    }

    /// What stays as it is in the step that runs: the adapter, where features come from a generation that it
    /// made.
    fn resting(&self) -> Option<Group> {
        let cached =
            matches!(self.feed.claimed.front(), Some(Claim { cache_phase: CachePhase::Cached(_), .. }));
        let periodic = cached && self.run.spec.cache.mode == CacheMode::Periodic;
        self.learner.objective.extractor().filter(|_| periodic).map(|extractor| extractor.resting())
    }
}
