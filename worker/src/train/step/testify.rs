//! What this rank did in a step, for `cox audit --against`: the other side of the coordinator's ledger.
//!
//! Told are the samples whose gradients this rank has added up, by what the batches say that went through the
//! passes, not by what was leased; and only of steps that all ranks have taken or left out.

use std::{collections::HashMap, ops::Range};

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    plan,
    witness::{WitnessedStep, bits},
};

use crate::{link::StepReport, train::Workbench};

/// Samples listed that stand at no position of their step.
const MOST_STRANGERS: usize = 64;

impl<B: Tape<Base = B>> Workbench<'_, B> {
    /// Writes what this rank did in a step that all ranks have taken or left out, before it is reported.
    pub(in crate::train) fn testify(&mut self, done: &StepReport) {
        let Self { run, members, feed, stats, .. } = self;
        let Some(witness) = &mut stats.witness else { return };
        let (batch, order) = (run.plan.batch(done.step), feed.samples.order(run.spec.run.seed));
        let at = |position| order.sample(batch.epoch, position);
        let (positions, strangers) = placed(witness.seen(), &done.positions, &batch.positions, at);
        let assignment = &members.assignment;
        let left_out = match assignment.quarantined.as_slice() {
            [] => Vec::new(),
            rows => order.without(rows).in_batch(&batch),
        };
        witness.write(WitnessedStep {
            run: members.link.run_id().to_owned(),
            step: done.step.0,
            generation: assignment.generation.0,
            rank: assignment.rank.0,
            world: assignment.world,
            epoch: batch.epoch,
            positions,
            strangers,
            left_out,
            skipped: done.skipped.as_ref().map(|skipped| skipped.cause),
            totals: bits(&done.totals),
            full: false,
        });
    }
}

/// Where these samples stand in the step, and those that stand nowhere there. They are looked for where this
/// rank's `own` should be; in the rest of the step only if some are left, for that takes as long as the world
/// is large.
fn placed(
    samples: &[u64],
    own: &[Range<u64>],
    step: &Range<u64>,
    at: impl Fn(u64) -> Option<u64>,
) -> (Vec<Range<u64>>, Vec<u64>) {
    let mut left: HashMap<u64, usize> = HashMap::with_capacity(samples.len());
    for sample in samples {
        *left.entry(*sample).or_default() += 1;
    }
    let mut take = |position: &u64| {
        let times = at(*position).and_then(|sample| left.get_mut(&sample)).filter(|times| **times > 0);
        times.map(|times| *times -= 1).is_some()
    };
    let mut found: Vec<u64> = own.iter().cloned().flatten().filter(&mut take).collect();
    if found.len() < samples.len() {
        found.extend(plan::without(step.clone(), own).into_iter().flatten().filter(take));
    }
    found.sort_unstable();
    let positions = plan::joined(found.into_iter().map(|position| position..position + 1));
    let mut strangers: Vec<u64> =
        left.into_iter().flat_map(|(sample, times)| std::iter::repeat_n(sample, times)).collect();
    strangers.sort_unstable();
    strangers.truncate(MOST_STRANGERS);
    (positions, strangers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Position p of the step has sample 100 + p; two of them the same one.
    fn at(position: u64) -> Option<u64> {
        Some(if position == 7 { 106 } else { 100 + position })
    }

    #[test]
    fn samples_are_placed_by_what_they_are() {
        let own = [4..6, 7..8];
        for (samples, positions, strangers) in [
            (vec![104, 105, 106], vec![4..6, 7..8], vec![]),
            // Left out, though it was leased.
            (vec![105, 106], vec![5..6, 7..8], vec![]),
            // Another rank's, and one that is no sample of this step.
            (vec![102, 104, 106, 33], vec![2..3, 4..5, 7..8], vec![33]),
            // Twice, where there is room for one.
            (vec![104, 104, 105, 106], vec![4..6, 7..8], vec![104]),
            // The same sample at two positions.
            (vec![104, 105, 106, 106], vec![4..8], vec![]),
            (vec![], vec![], vec![]),
        ] {
            assert_eq!(placed(&samples, &own, &(0..8), at), (positions, strangers), "{samples:?}");
        }
    }
}
