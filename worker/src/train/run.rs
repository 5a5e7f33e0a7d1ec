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

use super::{Export, STEPS_OBSERVED, Search, TrainError, Training, Transaction, is_the_generations};
use crate::{
    collective::{Computes, RingListener},
    feeder::{DataError, note},
    link::{BadSample, Commands, LinkError, Phase, Report},
};

/// How a generation ended that did not fail.
enum GenerationEnd {
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
            let ended = self.join(listener, why.take()).and_then(|()| self.run());
            let bench = &mut self.bench;
            match ended {
                Ok(GenerationEnd::Done) | Err(TrainError::Link(LinkError::Dismissed(_))) => return Ok(()),
                Ok(GenerationEnd::Regroup) => {}
                Err(error) if !bench.members.link.has_generations() => return Err(error),
                Err(error) if is_the_generations(&error) => {
                    tracing::warn!(step = bench.next.0, %error, "the generation is over; waiting for the next one");
                    why = Some(error.to_string());
                }
                // A network that is away is no sample's fault: the worker ends, and is started again.
                Err(TrainError::Data(error)) if error.is_remote() => return Err(TrainError::Data(error)),
                Err(TrainError::Data(DataError::AtPosition { epoch, position, row, source })) => {
                    // Whether another worker tries it or the sample is left out is for the coordinator to
                    // decide.
                    let (step, message) = (bench.next, source.to_string());
                    why = Some(message.clone());
                    bench.skips.samples.note(&message);
                    let sample = BadSample { step, epoch, position, row, message };
                    bench.members.link.report(Report::BadSample(sample))?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes this worker's place in the next generation, and the state that its ranks agree on.
    fn join(&mut self, listener: Option<&RingListener>, why: Option<String>) -> Result<(), TrainError> {
        let bench = &mut self.bench;
        bench.members.leave();
        bench.feed.prefetch.clear();
        bench.members.link.at(Phase::Joining, bench.next);
        bench.members.assignment = bench.members.link.assignment(why.as_deref())?;
        note::begin(bench.members.assignment.generation);
        // What moving state takes is no step's.
        bench.enter(Phase::Connecting, bench.next)?;
        bench.members.connect(listener, &bench.run.spec_digest, bench.run.spec.launch.collectives)?;
        bench.members.share_out(listener, &bench.run, &bench.learner, &mut bench.stats, bench.next)?;
        let start = self.settle()?;
        let bench = &mut self.bench;
        if bench.members.assignment.closing {
            return Ok(bench.members.link.report(Report::Started(start))?);
        }
        if bench.run.spec.train.auto_micro_batch && !bench.feed.searched {
            Search::find_micro_batch(bench)?;
        }
        bench.skips.samples.recount(&bench.run, &bench.members, &bench.feed, bench.next);
        bench.stats.summary.begin(bench.next, bench.members.world());
        bench.feed.restart(bench.next);
        bench.members.link.report(Report::Started(start))?;
        self.looking.announce(bench, &start)
    }

    /// Runs steps to the end of the run or of the generation. The last generation of a run that has failed
    /// only saves.
    fn run(&mut self) -> Result<GenerationEnd, TrainError> {
        let Self { bench, results, looking, .. } = self;
        if bench.members.assignment.closing {
            if bench.next > Step(0) {
                results.save_once(bench)?;
            }
            return Ok(GenerationEnd::Regroup);
        }
        if let Some(best) = looking.begin(bench)? {
            results.keep(bench, &best)?;
        }
        let total = Step(bench.run.plan.total_steps());
        while self.bench.next < total && !self.obeyed.stop {
            if self.step(total)? {
                return Ok(GenerationEnd::Regroup);
            }
        }
        self.end()?;
        Ok(GenerationEnd::Done)
    }

    /// One step, and what is due behind it; whether all leave the generation then.
    fn step(&mut self, total: Step) -> Result<bool, TrainError> {
        let Self { bench, results, looking, .. } = self;
        bench.request_ahead(total)?;
        let step = bench.next;
        let (mut done, commands) = Transaction::begin(bench).run()?;
        bench.next = Step(step.0 + 1);
        if done.skipped.is_none() {
            match bench.learner.gradients.verdict(bench.learner.trainables.layout()) {
                Err(silent) if silent.is_all() => return Err(silent.into()),
                Err(silent) => tracing::warn!("{silent}"),
                Ok(()) => {}
            }
        }
        bench.skips.book(&done);
        let left_out = bench.skips.samples.count(&bench.run, &mut bench.members, &bench.feed, &done);
        bench.stats.summary.book(&done);
        // A CPU compiles nothing, and a step that was tried again is none to compare with.
        let compares = bench.members.computes == Computes::OnGpu && done.retries == 0;
        let warm_up = compares.then(|| bench.stats.warm_up.add(done.times.total)).flatten();
        let best = looking.behind(bench, &mut done);
        bench.members.link.report(Report::Step(done))?;
        if let Some(best) = best? {
            results.keep(bench, &best)?;
        }
        bench.require_few_skips(step)?;
        left_out?;
        if let Some(line) = warm_up.filter(|_| bench.members.rank().0 == 0) {
            bench.members.link.report(Report::Note(line))?;
        }
        if bench.stats.summary.losses.len() == STEPS_OBSERVED {
            let peaks = bench.stats.meter.report_recent();
            bench.report_memory(peaks)?;
        }
        bench.with_features(|features, desk| features.tell_step(desk, step))?;
        self.obey(commands)?;
        let regroups = commands.regroup && !self.obeyed.stop;
        if regroups {
            self.bench.with_features(|features, desk| features.publish_all(desk))?;
        }
        Ok(regroups)
    }

    /// Every step is done, or the run was stopped: saves, evaluates and exports.
    fn end(&mut self) -> Result<(), TrainError> {
        let Self { bench, results, looking, .. } = self;
        bench.with_features(|features, desk| features.publish_all(desk))?;
        bench.skips.samples.require(&mut bench.members, bench.next)?;
        results.save_once(bench)?;
        let [after, of_average] = looking.end(bench)?;
        if looking.is_spoilt(after.as_ref()) {
            return Err(bench.diverged(Some("the held-out error is not finite".into()))?);
        }
        // Before this run is among those that the prediction learns from.
        let peaks = bench.stats.meter.report();
        bench.report_memory(peaks)?;
        // The results first: what keeps the average's from being written costs those alone.
        let mut summary = bench.stats.summary.clone();
        summary.error_before = looking.before.clone().flatten();
        (summary.error_after, summary.error_after_ema) = (after, of_average);
        summary.stopped = self.obeyed.stop;
        Export { bench, summary }.write()?;
        bench.export_average()?;
        bench.members.link.at(Phase::Done, bench.next);
        Ok(())
    }

    /// Does what all ranks have agreed was asked for, at this boundary.
    fn obey(&mut self, agreed: Commands) -> Result<(), TrainError> {
        let bench = &mut self.bench;
        if agreed.memory_reports > self.obeyed.memory_reports {
            let peaks = bench.stats.meter.report_recent();
            bench.report_memory(peaks)?;
            if agreed.memory_reset > self.obeyed.memory_reports {
                bench.stats.meter.forget_recent();
            }
        }
        let every = bench.run.spec.train.checkpoint_every;
        let due = every > 0 && bench.next.0.is_multiple_of(every);
        if agreed.hand_over || agreed.checkpoints > self.obeyed.checkpoints {
            self.results.save(bench)?;
        } else if due {
            self.results.save_once(bench)?;
        }
        self.obeyed = Commands { stop: agreed.stop || self.obeyed.stop, ..agreed };
        if agreed.pause && !agreed.stop && !agreed.regroup {
            bench.members.link.at(Phase::Paused, bench.next);
            bench.members.link.wait_while_paused()?;
        }
        Ok(())
    }
}
