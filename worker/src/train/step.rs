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
//! again: with the same samples and, because draws are keyed by step and sample, with the same noise.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use coxswain_proto::{
    ids::{Bytes, Step},
    plan::Batch,
};

use super::{
    TrainError,
    run::Training,
    vote::{self, Ballot, Fared, Verdict},
};
use crate::{
    kernels::Tape,
    link::{Phase, StepDone, StepTimes},
    memory::OutOfMemory,
    model::policy::{Pass, StageClock},
    zero::StepInput,
};

/// Sums over this rank's micro-batches.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    loss_sum: f64,
    valid_count: f64,
    tokens: u64,
    micro_batches: u32,
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Runs `step` until all ranks have committed it. Returns what happened and the verdict with everybody's commands.
    pub(super) fn transaction(&mut self, step: Step) -> Result<(StepDone, Verdict), TrainError> {
        let started = Instant::now();
        let batch = self.plan.batch(step);
        let (mut times, mut retries) = (StepTimes::default(), 0);
        let (share, verdict) = loop {
            let mut share = Share::default();
            let accumulated = self.accumulate(step, &mut share, &mut times);
            let fared = match &accumulated {
                Ok(()) => Fared::Ok,
                Err(TrainError::DoesNotFit { .. }) => Fared::OutOfMemory,
                Err(_) => Fared::Failed,
            };
            let verdict = self.vote(step, fared, share, &mut times)?;
            match (verdict.fared, accumulated) {
                ((Fared::Ok, _), _) => break (share, verdict),
                ((Fared::OutOfMemory, _), accumulated) => {
                    self.shrink(step, accumulated.err())?;
                    retries += 1;
                }
                ((Fared::Failed, _), Err(own)) => return Err(own),
                ((Fared::Failed, rank), Ok(())) => return Err(TrainError::PeerFailed(rank)),
            }
        };
        let grad_norm = self.update(step, &verdict, &mut times)?;
        times.total = started.elapsed();
        let done = self.done(step, &batch, share, times, (&verdict, grad_norm));
        Ok((StepDone { retries, ..done }, verdict))
    }

    /// Forward and backward over this rank's samples; gradients of the loss sum end up in `self.grads`.
    fn accumulate(&mut self, step: Step, share: &mut Share, times: &mut StepTimes) -> Result<(), TrainError> {
        self.grads.zero();
        loop {
            self.enter(Phase::Data, step)?;
            let waiting = Instant::now();
            let micro_batch = self.prefetch.next(step)?;
            times.data += waiting.elapsed();
            let Some(micro_batch) = micro_batch else { break };
            let Self { policy, trainables, grads, meter, link, .. } = self;
            // What ran over capacity is kept until the micro-batch is done: the policy cannot be interrupted.
            let mut over = Ok(());
            let mut clock = StageClock::new(|pass| {
                let phase = match pass {
                    Pass::Forward => Phase::Forward,
                    Pass::Backward => Phase::Backward,
                };
                link.at(phase, step);
                let entered = meter.enter(phase);
                if over.is_ok() {
                    over = entered;
                }
            });
            let loss = policy.forward_backward(trainables, &micro_batch, grads, &mut clock)?;
            let stages = clock.times();
            drop(clock);
            over.map_err(|source| TrainError::DoesNotFit { step, source })?;
            times.vision += stages.vision;
            times.language += stages.language;
            times.expert += stages.expert;
            share.loss_sum += loss.loss_sum;
            share.valid_count += loss.valid;
            share.tokens += micro_batch.tokens();
            share.micro_batches += 1;
        }
        if !self.gradients.all_heard() {
            self.gradients.observe(self.trainables.layout(), &self.grads);
        }
        Ok(())
    }

    fn vote(
        &mut self,
        step: Step,
        fared: Fared,
        share: Share,
        times: &mut StepTimes,
    ) -> Result<Verdict, TrainError> {
        // A phase that ran over capacity is found out when it ends; the ballot must already know.
        let fared = match (fared, self.enter(Phase::Communication, step)) {
            (Fared::Ok, Err(_)) => Fared::OutOfMemory,
            (fared, _) => fared,
        };
        let voting = Instant::now();
        let ballot = Ballot {
            fared,
            commands: self.link.commands(),
            loss_sum: share.loss_sum,
            valid_count: share.valid_count,
        };
        let verdict = vote::cast(&ballot, self.comm.as_mut())?;
        times.communication += voting.elapsed();
        Ok(verdict)
    }

    /// Half the micro-batch for this step and all later ones; the samples and the global batch stay.
    fn shrink(&mut self, step: Step, own: Option<TrainError>) -> Result<(), TrainError> {
        if self.micro_batch == 1 {
            return Err(own.unwrap_or(TrainError::DoesNotFit {
                step,
                source: OutOfMemory { phase: Phase::Forward, wanted: Bytes(0), capacity: Bytes(0) },
            }));
        }
        self.micro_batch = self.micro_batch.div_ceil(2);
        tracing::warn!(
            step = step.0,
            micro_batch = self.micro_batch,
            "out of memory on a rank: all ranks retry the step"
        );
        self.prefetch.replan(step, self.micro_batch)?;
        Ok(())
    }

    /// Reduce, clip, AdamW on this rank's shard, gather. Returns the global gradient norm before clipping.
    fn update(&mut self, step: Step, verdict: &Verdict, times: &mut StepTimes) -> Result<f64, TrainError> {
        self.enter(Phase::Optimizer, step)?;
        let (updating, busy) = (Instant::now(), self.communicating());
        let input = StepInput { scale: 1.0 / verdict.valid_count.max(1.0), rates: self.rates.rates(step.0) };
        let mut weights = self.trainables.take();
        let held = self.held.as_mut().expect("a generation begins with a state");
        let outcome = held.optimizer.step(self.grads.values_mut(), &mut weights, &input, self.comm.as_mut());
        self.trainables.set(weights);
        let communication = self.communicating() - busy;
        times.communication += communication;
        times.optimizer += updating.elapsed().saturating_sub(communication);
        Ok(outcome?.grad_norm)
    }

    /// Time spent in collectives so far.
    fn communicating(&self) -> Duration {
        Duration::from_nanos(self.comm.progress().busy_nanos.load(Ordering::Relaxed))
    }

    fn done(
        &mut self,
        step: Step,
        batch: &Batch,
        share: Share,
        times: StepTimes,
        (verdict, grad_norm): (&Verdict, f64),
    ) -> StepDone {
        let positions = self.claimed.pop_front().unwrap_or_default();
        StepDone {
            step,
            epoch: batch.epoch,
            positions,
            loss_sum: verdict.loss_sum,
            valid_count: verdict.valid_count,
            grad_norm,
            learning_rate: self.rates.rates(step.0).expert,
            times,
            tokens: share.tokens,
            micro_batch: self.micro_batch as u32,
            accumulation: share.micro_batches,
            retries: 0,
            memory_peak: self.meter.take_step_peak(),
        }
    }
}
