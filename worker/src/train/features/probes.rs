//! Comparing probes: the features of some samples under the present adapter beside those of the generation
//! compared with, and the loss with either.
//!
//! ```text
//! fresh      what the present adapter makes of them          kept   what the store has, or the generation's
//!                                                                   own adapter makes
//! ```
//!
//! Both are rounded as the store rounds, since that is what training would see.

use coxswain_feature_store::round_trip;
use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::Step;
use coxswain_task::{Batch, CachedFeatures, Fault, Readable};

use super::{
    desk::Desk,
    drift::Sums,
    measuring::{Baseline, DriftMeasurement},
    memo::Memo,
    store_writer::{ComputedFeatures, MadeRow},
};
use crate::{memory, train::TrainError};

/// Probes that are compared at once.
struct Probes<'a> {
    indices: &'a [u64],
    /// Values of each.
    rows: &'a [usize],
    batch: &'a dyn Batch,
}

impl<B: Tape<Base = B>> DriftMeasurement<B> {
    /// Compares the next `count` of this rank's probes, as many at once as memory allows.
    pub fn compare_some(
        &mut self,
        memo: &Memo<B>,
        desk: &Desk<'_, '_, B>,
        step: Step,
        count: usize,
    ) -> Result<(), TrainError> {
        let (end, mut size) = (self.done + count, memo.fill_batch);
        while self.done < end {
            let indices = self.probes[self.done..end.min(self.done + size)].to_vec();
            let before = memory::in_use();
            match memory::guarded(|| self.compare(memo, desk, &indices)) {
                Ok(compared) => {
                    let (sums, made) = compared?;
                    self.sums = sums;
                    self.done += indices.len();
                    match self.before() {
                        None => self.made.append(made),
                        Some(_) if made.rows.is_empty() => {}
                        Some(_) => memo.store_writer.keep(made),
                    }
                }
                Err(_) if indices.len() > 1 => size = indices.len().div_ceil(2),
                Err(overrun) => return Err(desk.does_not_fit(step, overrun, before)),
            }
        }
        Ok(())
    }

    /// Compares some samples: the sums with them, and their fresh features, if they were computed.
    fn compare(
        &mut self,
        memo: &Memo<B>,
        desk: &Desk<'_, '_, B>,
        indices: &[u64],
    ) -> Result<(Sums, ComputedFeatures), TrainError> {
        let Readable { samples, faults } = desk.feed.samples.readable(indices);
        faults.iter().for_each(|error| tracing::warn!(%error, "drift probe skipped"));
        if samples.is_empty() {
            return Ok((self.sums, ComputedFeatures::default()));
        }
        let indices: Vec<u64> = samples.iter().map(|sample| sample.index()).collect();
        let batch = desk.feed.samples.batch(self.at, &samples);
        let width = memo.setup.shape.width;
        let rows = desk.extractor().row_values(&*batch);
        let probes = Probes { indices: &indices, rows: &rows, batch: &*batch };
        let (fresh, unrounded) = fresh(memo, desk, &probes, self.before().is_some())?;
        let kept = self.kept(memo, desk, &probes)?;
        let mut sums = self.sums;
        let mut made = ComputedFeatures { rows: Vec::new(), values: unrounded.unwrap_or_default() };
        let mut at = 0;
        for (row, sample) in rows.iter().zip(samples) {
            let place = at..at + row;
            at = place.end;
            sums.compare(&fresh[place.clone()], &kept[place.clone()]);
            if let Some(key) = memo.setup.keys.get(sample.index()).filter(|_| !made.values.is_empty()) {
                made.rows.push(MadeRow { key, inputs: sample.inputs(), place });
            }
        }
        let loss = |values| {
            let batch = batch.with_features(CachedFeatures { width, values });
            desk.learner.objective.loss(&desk.learner.trainables, &*batch)
        };
        let (with_fresh, with_kept) = match (loss(fresh), loss(kept)) {
            (Ok(fresh), Ok(kept)) => (fresh, kept),
            // Probes are samples of the data set: one that is no number says nothing of the features.
            (Err(error), _) | (_, Err(error)) if error.fault == Fault::Numeric => {
                tracing::warn!(%error, "drift is measured without these samples: their loss is not finite");
                return Ok((self.sums, ComputedFeatures::default()));
            }
            (Err(error), _) | (_, Err(error)) => return Err(error.into()),
        };
        sums.loss_fresh += with_fresh.loss_sum;
        sums.loss_kept += with_kept.loss_sum;
        sums.valid += with_fresh.valid;
        Ok((sums, made))
    }

    /// What the generation compared with has of probes, rounded.
    fn kept(
        &mut self,
        memo: &Memo<B>,
        desk: &Desk<'_, '_, B>,
        probes: &Probes<'_>,
    ) -> Result<Vec<f32>, TrainError> {
        let Self { against, older, .. } = self;
        let serving = match against {
            Baseline::Before(before) => Some(&**before),
            Baseline::Serving | Baseline::Lost => memo.serving.as_ref(),
        };
        if let Some(found) =
            serving.and_then(|serving| memo.setup.stored(serving, probes.indices, probes.rows))
        {
            return Ok(found);
        }
        let ready = serving.and_then(|serving| serving.older.as_ref());
        let below = match (ready, serving.and_then(|serving| serving.adapter.as_ref())) {
            (Some(ready), _) => ready,
            (None, Some(adapter)) => older.get_or_insert_with(|| adapter.trainables(&memo.setup.device)),
            (None, None) => &desk.learner.trainables,
        };
        let CachedFeatures { width, mut values } = desk.extractor().compute(below, probes.batch)?;
        round_trip(memo.setup.dtype, width, &mut values);
        Ok(values)
    }
}

/// What the present adapter makes of probes, rounded; and unrounded, if it had to be computed. `serves`:
/// the generation made with it does.
fn fresh<B: Tape<Base = B>>(
    memo: &Memo<B>,
    desk: &Desk<'_, '_, B>,
    probes: &Probes<'_>,
    serves: bool,
) -> Result<(Vec<f32>, Option<Vec<f32>>), TrainError> {
    let serving = memo.serving.as_ref().filter(|_| serves);
    if let Some(found) = serving.and_then(|serving| memo.setup.stored(serving, probes.indices, probes.rows)) {
        return Ok((found, None));
    }
    let CachedFeatures { width, values } =
        desk.extractor().compute(&desk.learner.trainables, probes.batch)?;
    let mut rounded = values.clone();
    round_trip(memo.setup.dtype, width, &mut rounded);
    Ok((rounded, Some(values)))
}
