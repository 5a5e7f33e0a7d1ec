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

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    ids::{Bytes, Rank, Step},
    report::{Skip, SkipCause, Totals},
};
use coxswain_task::Figures;

use super::{
    tally::{NonFiniteNumbers, Share, StepEnding, TimeBreakdown},
    vote::{self, Ballot, Lookout, Verdict, Vote},
};
use crate::train::{AttemptOutcome, STEPS_OBSERVED, Suspicions, TrainError, Witness, Workbench, verify};
use crate::{
    clock,
    feeder::RowBatch,
    link::{Commands, Phase, Report, StepReport},
};

/// One step, until all ranks have committed it, or leave it out.
pub(in crate::train) struct Transaction<'t, 'a, B: Tape<Base = B>> {
    pub(super) bench: &'t mut Workbench<'a, B>,
    pub(super) step: Step,
    /// Sums of the newest attempt.
    share: Share,
    /// The micro-batch that ran last in it.
    pub(super) last: Option<RowBatch>,
    /// Attempts that were voted down.
    retries: u32,
    pub(super) spent: TimeBreakdown,
    /// An attempt had numbers that were not finite: which.
    pub(super) doubt: Option<NonFiniteNumbers>,
    /// Whose gradients were wrong, where the step was run by others, too.
    suspicions: Suspicions,
}

impl<'t, 'a, B: Tape<Base = B>> Transaction<'t, 'a, B> {
    /// The next step, of which nothing has run.
    pub fn begin(bench: &'t mut Workbench<'a, B>) -> Self {
        Self {
            step: bench.next,
            bench,
            share: Share::default(),
            last: None,
            retries: 0,
            spent: TimeBreakdown::default(),
            doubt: None,
            suspicions: Suspicions::default(),
        }
    }

    /// Tries the step as often as it takes. Returns what happened and everybody's commands.
    pub fn run(mut self) -> Result<(StepReport, Commands), TrainError> {
        let started = clock::now();
        let (step, bench) = (self.step, &mut *self.bench);
        if !bench.stats.meter.accounts_for(bench.members.assignment.rank) {
            let cache = bench.features.as_ref().map_or(Bytes(0), |features| features.bytes());
            let holdings = bench.learner.holdings(&bench.members, cache);
            bench.stats.meter.begin_run(holdings, &bench.run.output_dir, bench.members.assignment.rank);
        }
        let StepEnding { verdict, norms, skipped, broken } = loop {
            match self.attempt()? {
                Some(outcome) => break outcome,
                None => self.retries += 1,
            }
        };
        let Self { bench, share, retries, mut spent, doubt, last, .. } = self;
        drop(last);
        spent.times.total = started.elapsed();
        let memory_peak = bench.stats.meter.end_step(step, bench.feed.micro_batch, retries + 1);
        let rank = bench.members.rank();
        let (totals, metrics) = match skipped {
            Some(_) => (Totals::default(), bench.learner.loss_scale_metric(rank).into_iter().collect()),
            None => (
                Totals { loss_sum: verdict.loss_sum, valid_count: verdict.valid_count, grad_norm: norms.all },
                spent.metrics(step, rank, &bench.learner, &norms.groups),
            ),
        };
        let cache = match &mut bench.features {
            Some(features) => features.book(share.cache, &spent.times),
            None => share.cache,
        };
        // What this rank had claimed for the step is consumed.
        let claim = bench.feed.claimed.pop_front();
        let done = StepReport {
            generation: bench.members.assignment.generation,
            step,
            epoch: bench.run.plan.batch(step).epoch,
            cache_generation: claim.as_ref().map_or(0, |claim| claim.cache_phase.number()),
            cache,
            positions: claim.map_or(Vec::new(), |claim| claim.positions),
            totals,
            times: spent.times,
            metrics: metrics.into(),
            tokens: share.tokens,
            retries,
            memory_peak,
            skipped,
        };
        bench.testify(&done);
        if let Some(error) = broken {
            // The last collective broke, but this rank has taken the step, and may be the only one left to
            // report it: if all parts of that version exist, the next generation goes on from it.
            bench.stats.summary.book(&done);
            bench.members.link.report(Report::Step(done))?;
            return Err(error);
        }
        if let Some(doubted) = doubt.filter(|_| done.skipped.is_none()) {
            doubted.tell_cleared(step, &mut bench.members)?;
        }
        if let Some(rank) = verdict.pressed {
            let Workbench { run, members, feed, stats, .. } = bench;
            feed.relieve(run, members, &mut stats.meter, Step(step.0 + 1), rank)?;
        }
        Ok((done, verdict.commands))
    }

    /// Tries the step once; none if it is to be tried again.
    fn attempt(&mut self) -> Result<Option<StepEnding>, TrainError> {
        let step = self.step;
        (self.share, self.last) = (Share::default(), None);
        let moved = self.suspicions.run_moved(self.bench, self.doubt.is_some())?;
        let (fared, own) = match self.accumulate() {
            Ok(()) => (Vote::Ok, None),
            Err(TrainError::CalledOff) => (Vote::GaveUp, None),
            Err(own @ TrainError::DoesNotFit { .. }) => (Vote::OutOfMemory, Some(own)),
            Err(own) if own.is_not_finite() => (Vote::NotFinite, Some(own)),
            Err(own) => (Vote::Failed, Some(own)),
        };
        let verdict = self.vote(fared)?;
        let bench = &mut *self.bench;
        if verdict.fared.0 == Vote::Ok && verify::is_due(bench.run.spec, step) {
            verify::compare(
                step,
                &bench.run,
                &mut bench.members,
                &mut bench.learner,
                &mut bench.stats.meter,
            )?;
        }
        if let Some(moved) = moved {
            let attempted = AttemptOutcome { moved, share: &self.share, fared, verdict: &verdict };
            if self.suspicions.compare(bench, &attempted)? {
                self.recut()?;
                return Ok(None);
            }
        }
        let spike = verdict.judge_spike(bench)?;
        let skipped = match (verdict.fared, own) {
            ((Vote::Ok, _), _) if bench.run.leaves_out(step) => {
                Some(Skip { cause: SkipCause::Asked, samples: Vec::new() })
            }
            ((Vote::Ok, _), _) if spike.is_some() => spike,
            ((Vote::Ok, _), _) => match bench.commit(&verdict, &mut self.spent.times) {
                Err(error) if error.is_not_finite() && bench.learner.may_lower_loss_scale() => {
                    Some(Skip { cause: SkipCause::Overflow, samples: Vec::new() })
                }
                Err(error) if error.is_not_finite() => {
                    self.doubt(NonFiniteNumbers { cause: SkipCause::Gradient, rank: Rank(0) }, Some(error))?
                }
                taken => {
                    let (norms, broken) = taken?;
                    return Ok(Some(StepEnding { verdict, norms, skipped: None, broken }));
                }
            },
            ((Vote::NotFinite, rank), own) => {
                let error = own.filter(TrainError::is_not_finite);
                self.doubt(NonFiniteNumbers { cause: SkipCause::Loss, rank }, error)?
            }
            ((Vote::OutOfMemory, _), own) => {
                self.shrink(&verdict, own)?;
                None
            }
            // What does not fit or is not finite may be well when it is tried again, without the rank or the
            // sample that failed. And a rank gives up only for another one that says what went wrong there.
            ((Vote::Failed | Vote::GaveUp, rank), own) => {
                let own =
                    own.filter(|own| !own.is_not_finite() && !matches!(own, TrainError::DoesNotFit { .. }));
                return Err(own.unwrap_or(TrainError::PeerFailed(rank)));
            }
        };
        let Some(skipped) = skipped else { return Ok(None) };
        self.bench.leave_out(skipped.cause)?;
        Ok(Some(StepEnding { verdict, norms: Default::default(), skipped: Some(skipped), broken: None }))
    }

    /// Forward and backward over this rank's samples; gradients of the loss sum add up in the learner's
    /// buffer. Leaves the micro-batch that ran last, for another attempt.
    fn accumulate(&mut self) -> Result<(), TrainError> {
        let (step, bench) = (self.step, &mut *self.bench);
        bench.stats.injected.flip_a_bit(&bench.members, &mut bench.learner, step);
        bench.learner.begin_gradients();
        bench.stats.witness.iter_mut().for_each(Witness::begin_attempt);
        self.spent.figures = Figures::default();
        // The optimizer and the collectives of the step before have no vote of their own.
        if let Some(source) = bench.stats.meter.take_overrun() {
            return Err(TrainError::DoesNotFit { step, source });
        }
        bench.with_features(|features, desk| features.measure_portion(desk, step))?;
        loop {
            bench.enter(Phase::Data, step)?;
            if Lookout::for_ranks(bench.members.comm.as_ref()).sees_loss() {
                return Err(TrainError::CalledOff);
            }
            let waiting = clock::now();
            let prepared = bench.feed.prefetch.next(step)?;
            self.spent.times.data += waiting.elapsed();
            let Some(mut prepared) = prepared else { break };
            // The one before has fitted: its rows are not wanted while this one runs.
            self.last = None;
            let used = &mut self.share.cache;
            bench.with_features(|features, desk| features.complete(desk, step, &mut prepared, used))?;
            let micro_batch = &*self.last.insert(prepared).batch;
            if bench.run.leaves_out(step) {
                continue;
            }
            // Buffers that stay are made in the first steps; later ones begin with everything there.
            if bench.stats.summary.losses.len() < STEPS_OBSERVED {
                bench.stats.meter.forget_most();
            }
            let began = clock::now();
            let lookout = Lookout::for_ranks(bench.members.comm.as_ref());
            let mut loss = bench.pass(lookout, step, micro_batch, &mut self.spent)?;
            bench.stats.injected.slow_down(step, began.elapsed(), &mut self.spent.times.data);
            loss.loss_sum = bench.stats.injected.loss(bench.members.rank(), step, loss.loss_sum);
            bench.learner.judge(step, micro_batch, &loss, self.doubt.is_some())?;
            self.share.loss_sum += loss.loss_sum;
            self.share.valid_count += loss.valid;
            self.share.tokens += micro_batch.tokens();
            bench.stats.witness.iter_mut().for_each(|witness| witness.see(micro_batch.samples()));
        }
        let rank = bench.members.rank();
        bench.stats.injected.flip_a_gradient(rank, step, true, &mut bench.learner.grads);
        bench.features.iter().for_each(|features| features.publish_epoch(&bench.run, step));
        // Where LoRA rests, that it has no gradient means nothing.
        if bench.resting().is_none() && !bench.learner.gradients.is_over() {
            let learner = &mut bench.learner;
            learner.gradients.observe(learner.trainables.layout(), &learner.grads);
        }
        Ok(())
    }

    /// What this rank has come to becomes a ballot.
    fn vote(&mut self, fared: Vote) -> Result<Verdict, TrainError> {
        let (step, bench) = (self.step, &mut *self.bench);
        bench.enter(Phase::Communication, step)?;
        let voting = clock::now();
        let ballot = Ballot {
            fared,
            commands: bench.members.link.commands(),
            loss_sum: self.share.loss_sum,
            valid_count: self.share.valid_count,
            pressed: bench.stats.meter.take_pressed(),
            spike_limit: bench.skips.losses.limit(bench.run.spec.train.spike_factor),
        };
        let verdict = vote::cast(&ballot, bench.members.comm.as_mut())?;
        self.spent.times.communication += voting.elapsed();
        Ok(verdict)
    }
}
