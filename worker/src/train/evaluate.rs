//! Held-out evaluation: how far sampled actions are from the recorded ones, on episodes that training never sees.

use std::{path::Path, sync::Arc};

use coxswain_proto::{ids::Step, run_spec::RunSpec};
use serde::{Deserialize, Serialize};

use super::{TrainError, checkpoint::Store, run::Training, save};
use crate::{
    batch::MicroBatch,
    collective::{BufMut, Collective, Reduce, Solo},
    data::{DataError, Dataset, collate},
    kernels::{Tape, pool},
    link::Phase,
    model::policy::Policy,
    params::Trainables,
};

/// Error of sampled action chunks against recorded ones, over valid steps of held-out samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActionError {
    /// Held-out samples looked at.
    pub samples: u64,
    /// Mean squared error in normalised units, comparable between data sets.
    pub mse_normalized: f64,
    /// Mean absolute error in the data set's own units.
    pub mae: f64,
}

/// Sums that add up over samples and ranks.
#[derive(Clone, Copy, Debug, Default)]
struct ErrorSums {
    samples: f64,
    values: f64,
    squared_normalized: f64,
    absolute: f64,
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// The held-out action error under the current trainables; every rank takes a part, every rank gets the whole.
    /// None when nothing is held out or evaluation is switched off.
    pub(super) fn evaluate(&mut self) -> Result<Option<ActionError>, TrainError> {
        self.enter(Phase::Evaluation, self.next)?;
        let evaluation = Evaluation {
            spec: self.spec,
            dataset: &self.dataset,
            policy: &self.policy,
            trainables: &self.trainables,
        };
        evaluation.run(self.comm.as_mut())
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
    Ok((Step(found.manifest.step), evaluation.run(&mut Solo::default())?))
}

struct Evaluation<'a, B: Tape<Base = B>> {
    spec: &'a RunSpec,
    dataset: &'a Dataset,
    policy: &'a Policy<B>,
    trainables: &'a Trainables<B>,
}

impl<B: Tape<Base = B>> Evaluation<'_, B> {
    fn run(&self, comm: &mut dyn Collective) -> Result<Option<ActionError>, TrainError> {
        let chosen = spread(self.dataset.holdout().collect(), self.spec.eval.samples);
        if chosen.is_empty() {
            return Ok(None);
        }
        let (rank, world) = (comm.rank().0 as usize, comm.world());
        let mine: Vec<u64> = chosen.into_iter().skip(rank).step_by(world).collect();
        let mut sums = ErrorSums::default();
        for indices in mine.chunks(self.spec.train.micro_batch) {
            self.add(indices, &mut sums)?;
        }
        let mut buffer = [sums.samples, sums.values, sums.squared_normalized, sums.absolute];
        comm.all_reduce(BufMut::F64(&mut buffer), Reduce::Sum)?;
        let [samples, values, squared, absolute] = buffer;
        Ok(Some(ActionError {
            samples: samples as u64,
            mse_normalized: squared / values,
            mae: absolute / values,
        }))
    }

    fn add(&self, indices: &[u64], sums: &mut ErrorSums) -> Result<(), TrainError> {
        let samples =
            indices.iter().map(|index| self.dataset.sample(*index)).collect::<Result<Vec<_>, DataError>>()?;
        let batch = collate(Step(0), &samples, self.dataset.pad_token());
        let mut sampled = self.policy.sample_actions(self.trainables, &batch, self.spec.run.seed)?;
        let mut recorded = batch.actions.clone();
        let width = self.dataset.dims().action;
        sums.squared_normalized += masked_sum(&batch, width, &sampled, &recorded, |d| d * d);
        self.dataset.denormalize_actions(&mut sampled);
        self.dataset.denormalize_actions(&mut recorded);
        sums.absolute += masked_sum(&batch, width, &sampled, &recorded, f64::abs);
        sums.values += batch.action_valid.iter().map(|&v| f64::from(v)).sum::<f64>() * width as f64;
        sums.samples += indices.len() as f64;
        Ok(())
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
