//! Held-out evaluation: the task's measures on samples that training never sees.
//!
//! A batch that does not fit is halved by the rank it does not fit on: samples are independent of each other
//! and of their batch, so the others need not know. Only a rank on which one sample alone does not or that
//! failed otherwise, is everybody's business; it says so in the collective that sums up, so that all leave
//! together.

use std::path::Path;

use coxswain_nn::{kernels::Tape, params::Trainables};
use coxswain_proto::{
    ids::{Bytes, Rank, Step},
    limits::MAX_PARTS,
    run_spec::RunSpec,
};
use coxswain_task::{
    Assembly, Evaluation as Found, Example, Fault, Objective, PartSum, Readable, Samples, Task, TaskOn,
};

use super::held_out::HeldOutError;
use crate::train::checkpoint::Store;
use crate::train::{Facts, Learner, TrainError, Workbench, advice, read_average_of, read_trainables};
use crate::{
    collective::{Buf, BufMut, Collective, Solo},
    device::computing::begin_computing,
    link::Phase,
    memory::{self, OutOfMemory},
};

/// Samples that people are shown.
const EXAMPLES: usize = 4;

/// Sums that add up over samples and ranks.
#[derive(Clone, Debug, Default)]
struct ErrorSums {
    samples: f64,
    unreadable: f64,
    found: Found,
}

impl ErrorSums {
    fn add(&mut self, part: Self) {
        self.samples += part.samples;
        self.unreadable += part.unreadable;
        self.found.count += part.found.count;
        self.found.sums.resize(self.found.sums.len().max(part.found.sums.len()), 0.0);
        self.found.sums.iter_mut().zip(part.found.sums).for_each(|(sum, part)| *sum += part);
        let longer = self.found.parts.len().max(part.found.parts.len());
        self.found.parts.resize(longer, PartSum::default());
        for (sum, part) in self.found.parts.iter_mut().zip(part.found.parts) {
            sum.count += part.count;
            sum.sum += part.sum;
        }
    }
}

/// The held-out error under the current trainables; every rank takes a part, every rank gets the whole. None
/// when nothing is held out, evaluation is switched off, or nothing of it can be read.
pub(super) fn evaluate<B: Tape<Base = B>>(
    bench: &mut Workbench<'_, B>,
) -> Result<Option<HeldOutError>, TrainError> {
    let step = bench.next;
    bench.enter(Phase::Evaluation, step)?;
    let Workbench { run, members, learner, feed, .. } = bench;
    Evaluation::new(run.spec, run.task, &*feed.samples, learner).run(step, members.comm.as_mut())
}

/// The held-out error of the weights' average; none if none is kept, or there is none to tell.
pub(super) fn evaluate_average<B: Tape<Base = B>>(
    bench: &mut Workbench<'_, B>,
) -> Result<Option<HeldOutError>, TrainError> {
    Ok(bench.with_average(evaluate)?.flatten())
}

/// A few held-out samples beside what is predicted of them: a concern of one rank. Nothing of it is worth a
/// run: what does not work out is a line.
pub(in crate::train) fn examples<B: Tape<Base = B>>(
    run: &Facts<'_, B>,
    samples: &dyn Samples,
    learner: &Learner<B>,
) -> Vec<Example> {
    Evaluation::new(run.spec, run.task, samples, learner).examples()
}

/// The held-out error of a run's newest checkpoint, without training: `cox eval`; with `ema` that of the
/// average of its weights.
pub fn evaluate_run<B: Tape<Base = B>>(
    task: &'static dyn TaskOn<B>,
    spec: &RunSpec,
    device: &B::Device,
    ema: bool,
) -> Result<(Step, Option<HeldOutError>), TrainError> {
    begin_computing(spec);
    let samples = task.open(spec)?;
    let Assembly { objective, layout, .. } = task.load(spec, &*samples, device)?;
    let store = Store::new(Path::new(&spec.run.output_dir));
    let found = store.newest()?;
    let mut weights = read_trainables(&found, &layout)?;
    if ema {
        weights.splice(..layout.len(), read_average_of(&found, &layout)?);
    }
    let trainables = Trainables::new(layout, weights, device);
    let (samples, objective) = (&*samples, &*objective);
    let evaluation = Evaluation { spec, task, samples, objective, trainables: &trainables };
    let step = Step(found.manifest.step);
    Ok((step, evaluation.run(step, &mut Solo::default())?))
}

struct Evaluation<'a, B: Tape<Base = B>> {
    spec: &'a RunSpec,
    task: &'a dyn Task,
    samples: &'a dyn Samples,
    objective: &'a dyn Objective<B>,
    trainables: &'a Trainables<B>,
}

impl<'a, B: Tape<Base = B>> Evaluation<'a, B> {
    fn new(spec: &'a RunSpec, task: &'a dyn Task, samples: &'a dyn Samples, learner: &'a Learner<B>) -> Self {
        let Learner { objective, trainables, .. } = learner;
        Self { spec, task, samples, objective: &**objective, trainables }
    }

    /// Examples of as many samples as people are shown, of those that are evaluated; one at a time, which
    /// takes no more memory than evaluation did.
    fn examples(&self) -> Vec<Example> {
        let chosen = spread(self.samples.holdout(), self.spec.eval.samples.min(EXAMPLES));
        let mut examples = Vec::new();
        for index in chosen {
            let Readable { samples, .. } = self.samples.readable(&[index]);
            if samples.is_empty() {
                continue;
            }
            let batch = self.samples.batch(Step(0), &samples);
            match memory::guarded(|| self.objective.examples(self.trainables, &*batch, self.samples)) {
                Ok(Ok(found)) => examples.extend(found),
                Ok(Err(error)) => tracing::warn!(%error, "a held-out sample is missing from the report"),
                Err(overrun) => {
                    tracing::warn!(in_use = overrun.in_use, "out of memory: the report shows no samples");
                    return Vec::new();
                }
            }
        }
        examples
    }

    /// `step` is where the trainables come from, for messages.
    fn run(&self, step: Step, comm: &mut dyn Collective) -> Result<Option<HeldOutError>, TrainError> {
        let measures = self.objective.measures();
        let mut parts = self.objective.parts();
        parts.truncate(MAX_PARTS);
        let chosen = spread(self.samples.holdout(), self.spec.eval.samples);
        if chosen.is_empty() || measures.is_empty() {
            return Ok(None);
        }
        let (rank, world) = (comm.rank().0 as usize, comm.world());
        let mine: Vec<u64> = chosen.into_iter().skip(rank).step_by(world).collect();
        let own = self.sum(step, &mine);
        let failed = f64::from(u8::from(own.is_err()));
        let mut ballot = vec![failed, 0.0, 0.0, 0.0];
        let by_part = 4 + measures.len();
        ballot.resize(by_part + 2 * parts.len(), 0.0);
        if let Ok(sums) = &own {
            ballot[1..4].copy_from_slice(&[sums.samples, sums.unreadable, sums.found.count]);
            ballot[4..by_part].iter_mut().zip(&sums.found.sums).for_each(|(field, sum)| *field = *sum);
            for (fields, part) in ballot[by_part..].chunks_exact_mut(2).zip(&sums.found.parts) {
                fields.copy_from_slice(&[part.count, part.sum]);
            }
        }
        let mut ballots = vec![0.0; ballot.len() * world];
        comm.all_gather(Buf::F64(&ballot), BufMut::F64(&mut ballots))?;
        own?;
        let mut total = vec![0.0; ballot.len() - 1];
        for (ballot, rank) in ballots.chunks_exact(ballot.len()).zip(0..) {
            if ballot[0] != 0.0 {
                return Err(TrainError::PeerFailed(Rank(rank)));
            }
            total.iter_mut().zip(&ballot[1..]).for_each(|(total, own)| *total += own);
        }
        let (samples, unreadable, count) = (total[0], total[1], total[2]);
        if rank == 0 && unreadable > 0.0 {
            tracing::warn!(
                unreadable,
                samples,
                "some held-out samples cannot be read; the held-out error covers the others"
            );
        }
        let measure =
            |(name, sum): (&&str, &f64)| ((*name).to_owned(), self.objective.measure(name, sum / count));
        let by_part = parts.into_iter().zip(total[by_part - 1..].chunks_exact(2));
        let found = HeldOutError {
            samples: samples as u64,
            measures: measures.iter().zip(&total[3..]).map(measure).collect(),
            unreadable: unreadable as u64,
            // A part that no sample has is not told.
            parts: by_part.filter(|(_, of)| of[0] > 0.0).map(|(name, of)| (name, of[1] / of[0])).collect(),
        };
        Ok((count > 0.0).then_some(found))
    }

    /// This rank's part, in batches as large as fit.
    fn sum(&self, step: Step, mine: &[u64]) -> Result<ErrorSums, TrainError> {
        let mut sums = ErrorSums::default();
        let (mut size, mut done) = (self.spec.eval.batch.unwrap_or(self.spec.train.micro_batch), 0);
        while done < mine.len() {
            let indices = &mine[done..mine.len().min(done + size)];
            let before = memory::in_use();
            match memory::guarded(|| self.errors(indices)) {
                Ok(part) => {
                    sums.add(part?);
                    done += indices.len();
                }
                Err(overrun) if size > 1 => {
                    size = size.min(indices.len()).div_ceil(2);
                    tracing::warn!(
                        in_use = overrun.in_use,
                        size,
                        "out of memory in evaluation: using smaller batches"
                    );
                }
                Err(overrun) => {
                    let capacity = self.spec.memory.capacity.map(Bytes);
                    let source = OutOfMemory::new(Phase::Evaluation, overrun, before, capacity);
                    return Err(TrainError::Exhausted {
                        step,
                        source: source.into(),
                        advice: advice(self.task, self.spec),
                    });
                }
            }
        }
        Ok(sums)
    }

    /// Errors of those of these samples that can be read.
    fn errors(&self, indices: &[u64]) -> Result<ErrorSums, TrainError> {
        let Readable { samples, faults } = self.samples.readable(indices);
        faults.iter().for_each(|error| tracing::warn!(%error, "a held-out sample is skipped"));
        let unreadable = faults.len() as f64;
        if samples.is_empty() {
            return Ok(ErrorSums { unreadable, ..ErrorSums::default() });
        }
        let batch = self.samples.batch(Step(0), &samples);
        let found = match self.objective.evaluate(self.trainables, &*batch, self.samples) {
            // What is not a number makes the error none; training, which may be well, is not ended by it.
            Err(error) if error.fault == Fault::Numeric => {
                tracing::warn!(%error, "the held-out error is not finite");
                let sums = vec![f64::NAN; self.objective.measures().len()];
                Found { count: samples.len() as f64, sums, ..Found::default() }
            }
            found => found?,
        };
        Ok(ErrorSums { samples: samples.len() as f64, unreadable, found })
    }
}

/// At most `count` of `all`, evenly spaced.
fn spread(all: Vec<u64>, count: usize) -> Vec<u64> {
    let count = count.min(all.len());
    (0..count).map(|i| all[i * all.len() / count]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_out_frames_are_spread_over_all_of_them() {
        assert_eq!(spread((10..20).collect(), 5), [10, 12, 14, 16, 18]);
        assert_eq!(spread((0..3).collect(), 64), [0, 1, 2]);
        assert!(spread(Vec::new(), 4).is_empty() && spread(vec![1], 0).is_empty());
    }
}
