//! Held-out evaluation: how far sampled actions are from the recorded ones, on episodes that training never sees.
//!
//! A batch that does not fit is halved by the rank it does not fit on: samples are independent of each other and of their batch, so the
//! others need not know. Only a rank on which one sample alone does not fit, or that failed otherwise, is everybody's business; it says
//! so in the collective that sums up, so that all leave together.

use std::{path::Path, sync::Arc};

use coxswain_proto::{
    ids::{Bytes, Rank, Step},
    run_spec::RunSpec,
};
use serde::{Deserialize, Serialize};

use super::{TrainError, checkpoint::Store, fit, run::Training, save};
use coxswain_nn::{kernels::{Tape, pool}, params::Trainables};
use coxswain_tasks::vla_flow::{batch::MicroBatch, policy::Policy};
use crate::{collective::{Buf, BufMut, Collective, Solo}, data::{Dataset, Readable, collate}, link::Phase, memory::{self, OutOfMemory}};

/// Error of sampled action chunks against recorded ones, over valid steps of held-out samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActionError {
    /// Held-out samples looked at.
    pub samples: u64,
    /// Mean squared error in normalised units, comparable between data sets.
    pub mse_normalized: f64,
    /// Mean absolute error in the data set's own units.
    pub mae: f64,
    /// Held-out samples that should have been looked at and cannot be read.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unreadable: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Sums that add up over samples and ranks.
#[derive(Clone, Copy, Debug, Default)]
struct ErrorSums {
    samples: f64,
    unreadable: f64,
    values: f64,
    squared_normalized: f64,
    absolute: f64,
}

impl ErrorSums {
    fn add(&mut self, part: Self) {
        self.samples += part.samples;
        self.unreadable += part.unreadable;
        self.values += part.values;
        self.squared_normalized += part.squared_normalized;
        self.absolute += part.absolute;
    }
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// The held-out action error under the current trainables; every rank takes a part, every rank gets the whole.
    /// None when nothing is held out, evaluation is switched off, or nothing of it can be read.
    pub(super) fn evaluate(&mut self) -> Result<Option<ActionError>, TrainError> {
        self.enter(Phase::Evaluation, self.next)?;
        let evaluation = Evaluation {
            spec: self.spec,
            dataset: &self.dataset,
            policy: &self.policy,
            trainables: &self.trainables,
        };
        evaluation.run(self.next, self.comm.as_mut())
    }
}

/// The held-out action error of a run's newest checkpoint, without training: `cox eval`.
pub fn evaluate_run<B: Tape<Base = B>>(
    spec: &RunSpec,
    device: &B::Device,
) -> Result<(Step, Option<ActionError>), TrainError> {
    pool::join();
    let dataset = Arc::new(Dataset::open(spec)?);
    let (policy, layout, _) = Policy::<B>::load(spec, dataset.dims(), device)?;
    let store = Store::new(Path::new(&spec.run.output_dir));
    let found = store.newest()?;
    let weights = save::read_trainables(&found, &layout)?;
    let trainables = Trainables::new(layout, weights, device);
    let evaluation = Evaluation { spec, dataset: &dataset, policy: &policy, trainables: &trainables };
    let step = Step(found.manifest.step);
    Ok((step, evaluation.run(step, &mut Solo::default())?))
}

struct Evaluation<'a, B: Tape<Base = B>> {
    spec: &'a RunSpec,
    dataset: &'a Dataset,
    policy: &'a Policy<B>,
    trainables: &'a Trainables<B>,
}

impl<B: Tape<Base = B>> Evaluation<'_, B> {
    /// `step` is where the trainables come from, for messages.
    fn run(&self, step: Step, comm: &mut dyn Collective) -> Result<Option<ActionError>, TrainError> {
        let chosen = spread(self.dataset.holdout().collect(), self.spec.eval.samples);
        if chosen.is_empty() {
            return Ok(None);
        }
        let (rank, world) = (comm.rank().0 as usize, comm.world());
        let mine: Vec<u64> = chosen.into_iter().skip(rank).step_by(world).collect();
        let own = self.sum(step, &mine);
        let sums = own.as_ref().copied().unwrap_or_default();
        let failed = f64::from(u8::from(own.is_err()));
        let ballot =
            [failed, sums.samples, sums.unreadable, sums.values, sums.squared_normalized, sums.absolute];
        let mut ballots = vec![0.0; ballot.len() * world];
        comm.all_gather(Buf::F64(&ballot), BufMut::F64(&mut ballots))?;
        own?;
        let mut total = [0.0; 5];
        for (ballot, rank) in ballots.chunks_exact(ballot.len()).zip(0..) {
            if ballot[0] != 0.0 {
                return Err(TrainError::PeerFailed(Rank(rank)));
            }
            total.iter_mut().zip(&ballot[1..]).for_each(|(total, own)| *total += own);
        }
        let [samples, unreadable, values, squared, absolute] = total;
        if rank == 0 && unreadable > 0.0 {
            tracing::warn!(
                unreadable,
                samples,
                "held-out samples cannot be read; the error is of the others"
            );
        }
        let found = ActionError {
            samples: samples as u64,
            mse_normalized: squared / values,
            mae: absolute / values,
            unreadable: unreadable as u64,
        };
        Ok((values > 0.0).then_some(found))
    }

    /// This rank's part, in batches as large as fit.
    fn sum(&self, step: Step, mine: &[u64]) -> Result<ErrorSums, TrainError> {
        let mut sums = ErrorSums::default();
        let (mut size, mut done) = (self.spec.train.micro_batch, 0);
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
                        "out of memory in evaluation: smaller batches"
                    );
                }
                Err(overrun) => {
                    let capacity = self.spec.memory.capacity.map(Bytes);
                    let source = OutOfMemory::of(Phase::Evaluation, overrun, before, capacity);
                    return Err(TrainError::Exhausted {
                        step,
                        source: source.into(),
                        advice: fit::advice(self.spec),
                    });
                }
            }
        }
        Ok(sums)
    }

    /// Of those of these samples that can be read.
    fn errors(&self, indices: &[u64]) -> Result<ErrorSums, TrainError> {
        let Readable { samples, faults } = self.dataset.readable(indices);
        faults.iter().for_each(|error| tracing::warn!(%error, "a held-out sample is left out"));
        let unreadable = faults.len() as f64;
        if samples.is_empty() {
            return Ok(ErrorSums { unreadable, ..ErrorSums::default() });
        }
        let batch = collate(Step(0), &samples, self.dataset.pad_token());
        let mut sampled = self.policy.sample_actions(self.trainables, &batch, self.spec.run.seed)?;
        let mut recorded = batch.actions.clone();
        let width = self.dataset.dims().action;
        let squared_normalized = masked_sum(&batch, width, &sampled, &recorded, |d| d * d);
        self.dataset.denormalize_actions(&mut sampled);
        self.dataset.denormalize_actions(&mut recorded);
        Ok(ErrorSums {
            samples: samples.len() as f64,
            unreadable,
            values: batch.action_valid.iter().map(|&v| f64::from(v)).sum::<f64>() * width as f64,
            squared_normalized,
            absolute: masked_sum(&batch, width, &sampled, &recorded, f64::abs),
        })
    }
}

/// Sum of `f(difference)` over the components of valid action steps.
fn masked_sum(batch: &MicroBatch, width: usize, a: &[f32], b: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let steps = a.chunks_exact(width).zip(b.chunks_exact(width)).zip(&batch.action_valid);
    steps
        .filter(|(_, valid)| **valid > 0.0)
        .flat_map(|((a, b), _)| a.iter().zip(b))
        .map(|(&a, &b)| f(f64::from(a) - f64::from(b)))
        .sum()
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
