//! Drift: how far features have moved since the generation that serves was begun.
//!
//! ```text
//! probes    cache.probe_samples training samples, spread evenly over the data set; every rank takes a part
//! fresh     what the present adapter makes of them        kept   what the store has, or the generation's own adapter makes
//! gathered  |fresh - kept| / |fresh|,  cosine by probe,  loss with either under the same noise
//! ```
//!
//! What is fresh is kept until the turn is known: if a generation begins here, these are its first records. Both are rounded as the store rounds, since that is what training would see. All ranks gather the same numbers, so all could decide; the
//! link does. Ranks measure at the same steps: where a cached phase begins and a generation has served before.

use coxswain_proto::{
    cache_plan::{CacheDrift, CacheReport, Drift},
    ids::{Rank, Step},
};

use super::{
    Features, Serving,
    keeper::{Made, MadeRow},
};
use crate::{
    batch::{CachedFeatures, MicroBatch, Sample},
    collective::{Buf, BufMut},
    data::{Readable, collate},
    kernels::Tape,
    link::{Phase, Report},
    memory::{self, OutOfMemory},
    params::Trainables,
    train::{TrainError, run::Training},
    vl_cache::round_trip,
};

/// What adds up over probes and ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sums {
    probes: f64,
    squared_difference: f64,
    squared_norm: f64,
    cosine: f64,
    loss_fresh: f64,
    loss_kept: f64,
    valid: f64,
}

/// How a rank fared: a number in its row, the worst of all counts.
const WELL: f64 = 0.0;
/// It has not the adapter to compare with.
const UNAVAILABLE: f64 = 1.0;
/// It failed; its own error says why.
const FAILED: f64 = 2.0;

const FIELDS: usize = 8;

impl Sums {
    fn row(&self, status: f64) -> [f64; FIELDS] {
        let Self { probes, squared_difference, squared_norm, cosine, loss_fresh, loss_kept, valid } = *self;
        [probes, squared_difference, squared_norm, cosine, loss_fresh, loss_kept, valid, status]
    }

    /// Rows of all ranks, in rank order, so that all ranks add up the same bits.
    fn total(rows: &[f64]) -> Self {
        let sum = |field: usize| rows.chunks_exact(FIELDS).map(|row| row[field]).sum::<f64>();
        Self {
            probes: sum(0),
            squared_difference: sum(1),
            squared_norm: sum(2),
            cosine: sum(3),
            loss_fresh: sum(4),
            loss_kept: sum(5),
            valid: sum(6),
        }
    }

    /// None without probes.
    fn drift(&self) -> Option<Drift> {
        (self.probes > 0.0).then(|| Drift {
            relative_l2: (self.squared_difference / self.squared_norm.max(f64::MIN_POSITIVE)).sqrt(),
            cosine: self.cosine / self.probes,
            loss_fresh: self.loss_fresh / self.valid.max(1.0),
            loss_cached: self.loss_kept / self.valid.max(1.0),
        })
    }

    /// One probe's features.
    fn compare(&mut self, fresh: &[f32], kept: &[f32]) {
        let (mut dot, mut of_fresh, mut of_kept, mut difference) = (0.0, 0.0, 0.0, 0.0);
        for (&f, &k) in fresh.iter().zip(kept) {
            let (f, k) = (f64::from(f), f64::from(k));
            dot += f * k;
            of_fresh += f * f;
            of_kept += k * k;
            difference += (f - k) * (f - k);
        }
        self.probes += 1.0;
        self.squared_difference += difference;
        self.squared_norm += of_fresh;
        self.cosine += dot / (of_fresh * of_kept).sqrt().max(f64::MIN_POSITIVE);
    }
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Measures how far the features of the generation that served last have moved, with all ranks, and lets rank 0 report it.
    /// Nothing happens if none has served, or if one begins here already.
    pub(super) fn measure_drift(&mut self, step: Step) -> Result<(), TrainError> {
        let wanted = self.spec.cache.probe_samples;
        let Some(features) = &mut self.features else { return Ok(()) };
        let before = features.serving.as_ref().filter(|serving| serving.generation.since < step);
        let (Some(generation), true) = (before.map(|serving| serving.generation), wanted > 0) else {
            return Ok(());
        };
        if features.measured == Some(step) {
            return Ok(());
        }
        features.measured = Some(step);
        features.publish();
        self.enter(Phase::CacheBuild, step)?;
        let own = self.probe(step, wanted);
        self.enter(Phase::Communication, step)?;
        let row = match &own {
            Ok(Some(sums)) => sums.row(WELL),
            Ok(None) => Sums::default().row(UNAVAILABLE),
            Err(_) => Sums::default().row(FAILED),
        };
        let mut rows = vec![0.0; FIELDS * self.comm.world()];
        self.comm.all_gather(Buf::F64(&row), BufMut::F64(&mut rows))?;
        own?;
        let status = |row: &[f64]| row[FIELDS - 1];
        if let Some((_, rank)) = rows.chunks_exact(FIELDS).zip(0..).find(|(row, _)| status(row) == FAILED) {
            return Err(TrainError::PeerFailed(Rank(rank)));
        }
        let lost = rows.chunks_exact(FIELDS).any(|row| status(row) == UNAVAILABLE);
        let total = Sums::total(&rows);
        let drift = total.drift().filter(|_| !lost);
        self.tell_drift(step, generation.number, (drift, total.probes as u32, lost))
    }

    fn tell_drift(
        &mut self,
        step: Step,
        generation: u64,
        (drift, probes, lost): (Option<Drift>, u32, bool),
    ) -> Result<(), TrainError> {
        let Some(features) = &mut self.features else { return Ok(()) };
        let drift = drift.map(|drift| CacheDrift { at: step, drift, probes });
        features.account.measured(generation, drift);
        let report = features.report();
        if self.assignment.rank.0 > 0 {
            return Ok(());
        }
        if let Some(CacheDrift { drift, .. }) = &drift {
            self.link.report(Report::Note(format!(
                "step {step}: features have moved by {:.2} % (relative L2, cosine {:.4}) since generation {generation} was begun; loss {:.5} with fresh ones, {:.5} with kept ones, on {probes} probes",
                100.0 * drift.relative_l2, drift.cosine, drift.loss_fresh, drift.loss_cached
            )))?;
        }
        if let Some(report) = report {
            self.link.report(Report::Cache(CacheReport { drift, lost, ..report }))?;
        }
        Ok(())
    }

    /// This rank's part of the probes; none if the adapter to compare with cannot be had.
    fn probe(&mut self, step: Step, wanted: usize) -> Result<Option<Sums>, TrainError> {
        let (rank, world) = (self.comm.rank().0 as usize, self.comm.world());
        let all = self.dataset.training_len();
        let count = (wanted as u64).min(all);
        let spread = (0..count).filter_map(|i| self.dataset.training_sample(i * all / count));
        let mine: Vec<u64> = spread.skip(rank).step_by(world).collect();
        let Some(features) = &self.features else { return Ok(None) };
        let Some(serving) = features.serving.as_ref().filter(|serving| !serving.stale) else {
            return Ok(None);
        };
        let older = serving.adapter.as_ref().map(|adapter| adapter.trainables(&features.device));
        let (mut sums, mut done, mut size) = (Sums::default(), 0, features.fill_batch);
        let mut made = Made::default();
        while done < mine.len() {
            let indices = &mine[done..mine.len().min(done + size)];
            let before = memory::in_use();
            match memory::guarded(|| self.compare(step, indices, older.as_ref())) {
                Ok(part) => {
                    let (part, fresh) = part?;
                    made.append(fresh);
                    sums = Sums::total(&[sums.row(WELL), part.row(WELL)].concat());
                    done += indices.len();
                }
                Err(_) if indices.len() > 1 => size = indices.len().div_ceil(2),
                Err(overrun) => {
                    let capacity = self.spec.memory.capacity.map(coxswain_proto::ids::Bytes);
                    let source = OutOfMemory::of(Phase::CacheBuild, overrun, before, capacity);
                    return Err(TrainError::DoesNotFit { step, source });
                }
            }
        }
        if let Some(features) = &mut self.features {
            features.probed = Some((step, made));
        }
        Ok(Some(sums))
    }

    /// Compares some samples; returns their fresh features, too.
    fn compare(
        &self,
        step: Step,
        indices: &[u64],
        older: Option<&Trainables<B>>,
    ) -> Result<(Sums, Made), TrainError> {
        let Readable { samples, faults } = self.dataset.readable(indices);
        faults.iter().for_each(|error| tracing::warn!(%error, "a probe is left out"));
        if samples.is_empty() {
            return Ok(Default::default());
        }
        let indices: Vec<u64> = samples.iter().map(|sample| sample.index).collect();
        let batch = collate(step, &samples, self.dataset.pad_token());
        let features = self.features.as_ref().expect("probes are of kept features");
        let serving = features.serving.as_ref().expect("probes are compared with a generation");
        let rounded = |mut made: CachedFeatures| {
            round_trip(features.dtype, made.width, &mut made.values);
            made
        };
        let unrounded = self.policy.features_below(&self.trainables, &batch)?;
        let fresh = rounded(unrounded.clone());
        let rows: Vec<usize> =
            self.policy.tap_tokens(&batch).into_iter().map(|tokens| tokens * fresh.width).collect();
        let kept = match features.read_probes(serving, &indices, &rows) {
            Some(values) => CachedFeatures { width: fresh.width, values },
            None => rounded(self.policy.features_below(older.unwrap_or(&self.trainables), &batch)?),
        };
        let mut sums = Sums::default();
        let mut made = Made { rows: Vec::with_capacity(rows.len()), values: unrounded.values };
        let mut at = 0;
        for (row, sample) in rows.into_iter().zip(samples) {
            let place = at..at + row;
            at = place.end;
            sums.compare(&fresh.values[place.clone()], &kept.values[place.clone()]);
            if let Some(key) = features.keys.get(sample.index) {
                let Sample { input_ids, image_grids, .. } = sample;
                made.rows.push(MadeRow { key, input_ids, image_grids, place });
            }
        }
        let loss = |made: CachedFeatures| {
            let batch = MicroBatch { features: Some(made), pixel_values: Vec::new(), ..batch.clone() };
            self.policy.loss(&self.trainables, &batch)
        };
        let (with_fresh, with_kept) = (loss(fresh)?, loss(kept)?);
        let (loss_fresh, loss_kept) = (with_fresh.loss_sum, with_kept.loss_sum);
        Ok((Sums { loss_fresh, loss_kept, valid: with_fresh.valid, ..sums }, made))
    }
}

impl<B: Tape<Base = B>> Features<B> {
    /// Kept features of these samples, whose rows have so many values; none if one of them is missing.
    fn read_probes(&self, serving: &Serving<B>, indices: &[u64], rows: &[usize]) -> Option<Vec<f32>> {
        let space = serving.space.as_ref()?;
        let mut values = vec![0.0; rows.iter().sum()];
        let mut at = 0;
        for (&index, &row) in indices.iter().zip(rows) {
            let record = space.get(&self.keys.get(index)?).filter(|r| r.tokens() * r.width() == row)?;
            record.read_f32(&mut values[at..at + row]).ok()?;
            at += row;
        }
        Some(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_features_have_not_moved() {
        let mut sums = Sums::default();
        sums.compare(&[3.0, 4.0], &[3.0, 4.0]);
        let drift = Sums { valid: 2.0, loss_fresh: 1.0, loss_kept: 1.0, ..sums }.drift().expect("a probe");
        assert_eq!((drift.relative_l2, drift.cosine, drift.loss_fresh), (0.0, 1.0, 0.5));
    }

    #[test]
    fn drift_is_relative_to_the_fresh_features_and_adds_up_over_ranks() {
        let (mut one, mut two) = (Sums::default(), Sums::default());
        one.compare(&[3.0, 4.0], &[3.0, 0.0]);
        two.compare(&[0.0, 0.0], &[0.0, 3.0]);
        let rows = [one.row(WELL), two.row(WELL)].concat();
        let drift = Sums::total(&rows).drift().expect("two probes");
        assert_eq!(drift.relative_l2, (16.0f64 + 9.0).sqrt() / 5.0);
        assert!(
            (drift.cosine - 0.3).abs() < 1e-12,
            "a probe without features counts as turned by 90 degrees"
        );
        assert_eq!(Sums::default().drift(), None);
    }
}
