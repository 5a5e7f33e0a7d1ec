//! Filling: the features that a micro-batch lacks are computed, rounded as the store rounds, and handed to
//! the store.
//!
//! ```text
//! look again      a part may have appeared since the data threads looked, or the generation has begun only
//!                 now
//! gather          rows that are due, and rows of micro-batches that wait, up to `cache.encoder_batch`
//!                 samples
//! compute         that many at a time, no tape; an out-of-memory halves that, on this rank alone
//! round           through the storage format, so that a hit later has the same bits
//! keep            to a thread that appends and publishes (`store_writer`)
//! ```
//!
//! A feature depends on its own sample alone, so it does not matter with which others it is computed, and no
//! vote is needed.

use coxswain_proto::{cache_plan::CacheUse, ids::Step};

use super::{
    desk::Desk,
    memo::Memo,
    owner::Features,
    store_writer::{ComputedFeatures, MadeRow},
};
use coxswain_feature_store::round_trip;
use coxswain_nn::kernels::Tape;
use coxswain_task::{Batch, Sample};

use crate::train::{Facts, TrainError};
use crate::{
    clock,
    feeder::{DeferredRow, Prefetcher, RowBatch, UncachedRow},
    link::{Phase, Report},
    memory,
};

/// A row without features.
enum MissingRow {
    /// A row of the micro-batch that is due.
    Due(UncachedRow),
    /// A row of one that waits.
    Later(DeferredRow),
}

impl MissingRow {
    fn missing(&self) -> &UncachedRow {
        match self {
            Self::Due(missing) => missing,
            Self::Later(upcoming) => &upcoming.missing,
        }
    }

    fn into_missing(self) -> UncachedRow {
        match self {
            Self::Due(missing) => missing,
            Self::Later(upcoming) => upcoming.missing,
        }
    }
}

/// Where rows get their features.
struct Target<'a> {
    batch: &'a mut dyn Batch,
    waiting: &'a mut Prefetcher,
}

impl Target<'_> {
    fn put(&mut self, row: &MissingRow, values: &[f32], computed: bool) {
        match row {
            MissingRow::Due(missing) => {
                let features =
                    self.batch.features_mut().as_mut().expect("a row can only be missing among features");
                features.values[missing.place.clone()].copy_from_slice(values);
            }
            MissingRow::Later(upcoming) => self.waiting.put_back(upcoming, values, computed),
        }
    }
}

impl<B: Tape<Base = B>> Features<B> {
    /// Gives a micro-batch the features that it lacks, in a step that takes them from the cache; any other
    /// stays as it is.
    pub(in crate::train) fn complete(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        step: Step,
        prepared: &mut RowBatch,
        used: &mut CacheUse,
    ) -> Result<(), TrainError> {
        if prepared.batch.features().is_none() {
            return Ok(());
        }
        used.read += prepared.read;
        let damaged = std::mem::take(&mut prepared.damaged);
        if !damaged.is_empty() {
            damaged.into_iter().for_each(|damage| self.memo.account.damage(damage));
            self.memo.tell_complaints(desk)?;
        }
        let looking = clock::now();
        let missing = std::mem::take(&mut prepared.missing);
        let mut target = Target { batch: &mut *prepared.batch, waiting: &mut desk.feed.prefetch };
        let missing = self.memo.still_missing(&mut target, missing);
        used.read += looking.elapsed();
        if !missing.is_empty() {
            desk.enter(Phase::CacheBuild, step)?;
            let began = clock::now();
            prepared.computed.extend(missing.iter().map(|missing| missing.row));
            let filled = self.memo.fill(desk, step, &mut *prepared.batch, missing);
            used.fill += began.elapsed();
            desk.enter(Phase::Data, step)?;
            filled?;
        }
        used.misses += prepared.computed.len() as u64;
        used.hits += (prepared.batch.len() - prepared.computed.len()) as u64;
        Ok(())
    }

    /// Lets the features of an epoch be published where its last step has computed them; training goes on
    /// meanwhile.
    pub(in crate::train) fn publish_epoch(&self, run: &Facts<'_, B>, step: Step) {
        if run.ends_epoch(step) {
            self.memo.store_writer.publish();
        }
    }

    /// Where an epoch ends, waits until its features are published: called before a collective, so that after
    /// it all ranks can see them.
    pub(in crate::train) fn settle_epoch(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        step: Step,
    ) -> Result<(), TrainError> {
        match desk.run.ends_epoch(step) {
            true => desk.storing(step, |_| self.memo.settle()),
            false => Ok(()),
        }
    }

    /// Says what the step that is done has brought.
    pub(in crate::train) fn tell_step(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        step: Step,
    ) -> Result<(), TrainError> {
        self.drift.conclude(&mut self.memo, desk, step)?;
        if desk.members.rank().0 == 0 && desk.run.ends_epoch(step) {
            self.memo.store_writer.note(&self.memo.setup.base.made_by, &self.memo.setup.training);
            if let Some(line) = self.memo.words_of_epoch() {
                desk.members.link.report(Report::Note(line))?;
            }
        }
        self.memo.tell_cache(desk)
    }

    /// Publishes everything: where a run or a generation ends, and with every checkpoint.
    pub(in crate::train) fn publish_all(&mut self, desk: &mut Desk<'_, '_, B>) -> Result<(), TrainError> {
        desk.storing(desk.next, |_| self.memo.publish())?;
        self.memo.tell_cache(desk)
    }
}

impl<B: Tape<Base = B>> Memo<B> {
    /// What is still missing of a micro-batch that is due.
    fn still_missing(&self, target: &mut Target<'_>, missing: Vec<UncachedRow>) -> Vec<UncachedRow> {
        if missing.is_empty() {
            return missing;
        }
        let mut rows: Vec<MissingRow> = missing.into_iter().map(MissingRow::Due).collect();
        self.look_again(&mut rows, target);
        rows.into_iter().map(MissingRow::into_missing).collect()
    }

    /// Computes these rows of `batch`.
    fn fill(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        step: Step,
        batch: &mut dyn Batch,
        missing: Vec<UncachedRow>,
    ) -> Result<(), TrainError> {
        let extractor = desk.extractor();
        let room = missing.len().next_multiple_of(self.fill_batch) - missing.len();
        let mut ahead: Vec<MissingRow> =
            desk.feed.prefetch.upcoming(room).into_iter().map(MissingRow::Later).collect();
        let mut target = Target { batch, waiting: &mut desk.feed.prefetch };
        self.look_again(&mut ahead, &mut target);
        let rows: Vec<MissingRow> = missing.into_iter().map(MissingRow::Due).chain(ahead).collect();
        let mut left = &rows[..];
        while !left.is_empty() {
            let (now, later) = left.split_at(left.len().min(self.fill_batch));
            let samples: Vec<&dyn Sample> = now.iter().map(|row| &*row.missing().seen).collect();
            let inputs = desk.feed.samples.collate(step, &samples);
            let serving = self.serving.as_ref();
            let below =
                serving.and_then(|serving| serving.older.as_ref()).unwrap_or(&desk.learner.trainables);
            let before = memory::in_use();
            match memory::guarded(|| extractor.compute(below, &*inputs)) {
                Ok(made) => {
                    self.keep(&mut target, now, made?.values);
                    left = later;
                }
                Err(_) if now.len() > 1 => {
                    self.fill_batch = now.len().div_ceil(2);
                    target.waiting.keep_ahead(self.fill_batch);
                    let line = format!(
                        "out of memory while computing features: the encoder batch is {} from now on; steps are not affected",
                        self.fill_batch
                    );
                    tracing::warn!(step = step.0, "{line}");
                    desk.members.link.report(Report::Note(line))?;
                }
                Err(overrun) => return Err(desk.does_not_fit(step, overrun, before)),
            }
        }
        Ok(())
    }

    /// Says what has gone wrong since the last call.
    pub(super) fn tell_complaints(&mut self, desk: &mut Desk<'_, '_, B>) -> Result<(), TrainError> {
        self.hear();
        for line in self.account.take_complaints() {
            desk.members.link.report(Report::Note(line))?;
        }
        Ok(())
    }

    /// Says what has gone wrong, and how far the generation is.
    fn tell_cache(&mut self, desk: &mut Desk<'_, '_, B>) -> Result<(), TrainError> {
        self.tell_complaints(desk)?;
        if desk.members.rank().0 == 0
            && self.account.has_news()
            && let Some(report) = self.report()
        {
            desk.members.link.report(Report::Cache(report))?;
        }
        Ok(())
    }

    /// Reads what has appeared since the data threads looked; what is left is to be computed.
    fn look_again(&self, rows: &mut Vec<MissingRow>, target: &mut Target<'_>) {
        let Some(namespace) = self.serving.as_ref().and_then(|serving| serving.namespace.as_ref()) else {
            return;
        };
        if let Err(error) = namespace.refresh() {
            tracing::debug!(%error, "the cache's directory cannot be read");
        }
        let mut values = Vec::new();
        rows.retain(|row| {
            let UncachedRow { key, place, .. } = row.missing();
            let record = key.and_then(|key| namespace.get(&key));
            let Some(record) = record.filter(|r| r.tokens() * r.width() == place.len()) else { return true };
            values.resize(place.len(), 0.0);
            let found = record.read_f32(&mut values).is_ok();
            if found {
                target.put(row, &values, false);
            }
            !found
        });
    }

    /// Puts computed features in their places, rounded, and lets them be stored.
    fn keep(&self, target: &mut Target<'_>, rows: &[MissingRow], values: Vec<f32>) {
        let mut made = ComputedFeatures { rows: Vec::with_capacity(rows.len()), values };
        let (mut rounded, mut begin) = (Vec::new(), 0);
        for row in rows {
            let UncachedRow { key, place, seen, .. } = row.missing();
            let own = begin..begin + place.len();
            begin = own.end;
            rounded.clear();
            rounded.extend_from_slice(&made.values[own.clone()]);
            round_trip(self.setup.dtype, self.setup.shape.width, &mut rounded);
            target.put(row, &rounded, true);
            // What is not finite may be a slip of the machine: it is used in this attempt alone.
            let finite = rounded.iter().all(|value| value.is_finite());
            if let Some(key) = key.filter(|_| finite) {
                made.rows.push(MadeRow { key, inputs: seen.inputs(), place: own });
            }
        }
        // Unrounded, so that the part knows what rounding costs; its bytes are the same.
        self.store_writer.keep(made);
    }
}
