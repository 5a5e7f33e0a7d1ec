//! The loop of one rank, from its first step to its last, through as many generations as that takes.
//!
//! ```text
//! join: ready ─▶ assignment ─▶ ring ─▶ agree on a state ─▶ steps ─▶ save, evaluate, export ─▶ end
//!   ▲                                                       │
//!   └────── a rank is lost, or the world changes ───────────┘
//! ```
//!
//! What outlives a generation (the process, the frozen weights, this rank's part of the state) stays where it
//! is.

use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::Step;

use super::{
    TrainError, average, divergence, export::write_spec, learned, recovery::is_the_generations, skip,
    stats::STEPS_OBSERVED, training::Training, validation,
};
use crate::{
    collective::{Computes, RingListener},
    feeder::{DataError, note},
    link::{BadSample, Commands, LinkError, Phase, Report},
};

/// How a generation ended that did not fail.
enum Ended {
    /// Every step is done, or the run was stopped; results are written.
    Done,
    /// All ranks have left it together, to form another one.
    Regroup,
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Trains through generation after generation to the end of the run. `listener` is where this rank's
    /// neighbour calls.
    pub(super) fn train(&mut self, listener: Option<&RingListener>) -> Result<(), TrainError> {
        let mut why = None;
        loop {
            match self.join(listener, why.take()).and_then(|()| self.run()) {
                Ok(Ended::Done) | Err(TrainError::Link(LinkError::Dismissed(_))) => return Ok(()),
                Ok(Ended::Regroup) => {}
                Err(error) if !self.members.link.has_generations() => return Err(error),
                Err(error) if is_the_generations(&error) => {
                    tracing::warn!(step = self.next.0, %error, "the generation is over; waiting for the next one");
                    why = Some(error.to_string());
                }
                // A network that is away is no sample's fault: the worker ends, and is started again.
                Err(TrainError::Data(error)) if error.is_remote() => return Err(TrainError::Data(error)),
                Err(TrainError::Data(DataError::AtPosition { epoch, position, row, source })) => {
                    // Whether another worker tries it or the sample is left out is for the coordinator to
                    // decide.
                    let (step, message) = (self.next, source.to_string());
                    why = Some(message.clone());
                    self.skips.samples.note(&message);
                    self.members.link.report(Report::BadSample(BadSample {
                        step,
                        epoch,
                        position,
                        row,
                        message,
                    }))?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes this worker's place in the next generation, and the state that its ranks agree on.
    fn join(&mut self, listener: Option<&RingListener>, why: Option<String>) -> Result<(), TrainError> {
        self.members.leave();
        self.feed.prefetch.clear();
        self.members.link.at(Phase::Joining, self.next);
        self.members.assignment = self.members.link.assignment(why.as_deref())?;
        note::begin(self.members.assignment.generation);
        // What moving state takes is no step's.
        self.enter(Phase::Connecting, self.next)?;
        self.members.connect(listener, &self.run.spec_digest, self.run.spec.launch.collectives)?;
        self.share_out(listener)?;
        let start = self.settle()?;
        if self.members.assignment.closing {
            return Ok(self.members.link.report(Report::Started(start))?);
        }
        if self.run.spec.train.auto_micro_batch && !self.feed.searched {
            self.find_micro_batch()?;
        }
        self.skips.samples.begin(self.next);
        self.stats.summary.begin(self.next, self.members.world());
        self.feed.restart(self.next);
        self.members.link.report(Report::Started(start))?;
        if !std::mem::replace(&mut self.announced, true) {
            if self.members.rank().0 == 0 {
                write_spec(&self.run)?;
            }
            self.announce(&start)?;
        }
        Ok(())
    }

    /// Runs steps to the end of the run or of the generation; at the end of the run saves, evaluates and
    /// exports. The last generation of a run that has failed only saves.
    fn run(&mut self) -> Result<Ended, TrainError> {
        if self.members.assignment.closing {
            if self.next > Step(0) && self.saved != Some(self.next) {
                self.save()?;
            }
            return Ok(Ended::Regroup);
        }
        let seen = if self.before.is_none() { Some(self.evaluate()?) } else { None };
        self.before = self.before.take().or_else(|| seen.clone());
        if validation::is_validated(self, self.next) {
            // Where a run or a generation begins: it may be that a fault has broken the one before off here.
            if let Some(best) = validation::validate(self, seen)? {
                validation::keep(self, &best)?;
            }
        }
        let total = Step(self.run.plan.total_steps());
        while self.next < total && !self.stopped {
            self.request_ahead(total)?;
            let step = self.next;
            let (mut done, verdict) = self.transaction(step)?;
            self.next = Step(step.0 + 1);
            if done.skipped.is_none() {
                match self.learner.gradients.verdict(self.learner.trainables.layout()) {
                    Err(silent) if silent.is_all() => return Err(silent.into()),
                    Err(silent) => tracing::warn!("{silent}"),
                    Ok(()) => {}
                }
            }
            let (too_many, left_out) = (skip::count(self, &done), learned::count(self, &done));
            self.stats.summary.book(&done);
            // A CPU compiles nothing, and a step that was tried again is none to compare with.
            let compares = self.members.computes == Computes::OnGpu && done.retries == 0;
            let warm_up = compares.then(|| self.stats.warm_up.add(done.times.total)).flatten();
            let best = validation::behind(self, &mut done);
            self.members.link.report(Report::Step(done))?;
            if let Some(best) = best? {
                validation::keep(self, &best)?;
            }
            if too_many {
                return Err(divergence::too_many(self, step)?);
            }
            left_out?;
            if let Some(line) = warm_up.filter(|_| self.members.rank().0 == 0) {
                self.members.link.report(Report::Note(line))?;
            }
            if self.stats.summary.losses.len() == STEPS_OBSERVED {
                let peaks = self.stats.meter.report_recent();
                self.report_memory(peaks)?;
            }
            self.with_features(|features, desk| features.tell_step(desk, step))?;
            self.obey(verdict.commands)?;
            if verdict.commands.regroup && !self.stopped {
                self.with_features(|features, desk| features.publish_all(desk))?;
                return Ok(Ended::Regroup);
            }
        }
        self.with_features(|features, desk| features.publish_all(desk))?;
        learned::require(self)?;
        if self.saved != Some(self.next) {
            self.save()?;
        }
        let (after, of_average) = match self.validation.newest.take() {
            Some((step, found, of_average)) if step == self.next => (found, of_average),
            _ => (self.evaluate()?, average::evaluate(self)?),
        };
        if let Some(error) = divergence::spoilt(self, after.as_ref())? {
            return Err(error);
        }
        // Before this run is among those that the prediction learns from.
        let peaks = self.stats.meter.report();
        self.report_memory(peaks)?;
        // The results first: what keeps the average's from being written costs those alone.
        self.export(after, of_average)?;
        average::export(self)?;
        self.members.link.at(Phase::Done, self.next);
        Ok(Ended::Done)
    }

    /// Does what all ranks have agreed was asked for, at this boundary.
    fn obey(&mut self, agreed: Commands) -> Result<(), TrainError> {
        if agreed.memory_reports > self.obeyed.memory_reports {
            let peaks = self.stats.meter.report_recent();
            self.report_memory(peaks)?;
            if agreed.memory_reset > self.obeyed.memory_reports {
                self.stats.meter.forget_recent();
            }
        }
        let every = self.run.spec.train.checkpoint_every;
        let due = every > 0 && self.next.0.is_multiple_of(every);
        let due = due && self.saved != Some(self.next);
        if due || agreed.hand_over || agreed.checkpoints > self.obeyed.checkpoints {
            self.save()?;
        }
        self.obeyed = agreed;
        self.stopped |= agreed.stop;
        if agreed.pause && !agreed.stop && !agreed.regroup {
            self.members.link.at(Phase::Paused, self.next);
            self.members.link.wait_while_paused()?;
        }
        Ok(())
    }
}
