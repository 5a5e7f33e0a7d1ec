//! Filling: the features that a micro-batch lacks are computed, rounded as the store rounds, and handed to the store.
//!
//! ```text
//! look again      a part may have appeared since the data threads looked, or the generation has begun only now
//! gather          rows that are due, and rows of micro-batches that wait, up to `cache.encoder_batch` samples
//! compute         that many at a time, no tape; an out-of-memory halves that, on this rank alone
//! round           through the storage format, so that a hit later has the same bits
//! keep            to a thread that appends and publishes (`keeper`)
//! ```
//!
//! A feature depends on its own sample alone, so it does not matter with which others it is computed, and no vote is needed.

use std::time::Instant;

use coxswain_proto::{cache_plan::CacheUse, ids::Step};

use super::{
    Features,
    keeper::{Made, MadeRow, News},
};
use coxswain_feature_store::round_trip;
use coxswain_nn::kernels::Tape;
use coxswain_task::{Batch, Sample};

use crate::{
    feeder::{Missing, Prefetcher, Prepared, Upcoming},
    link::{Phase, Report},
    memory::{self, OutOfMemory},
    train::{TrainError, training::Training},
};

/// A row without features.
enum Row {
    /// Of the micro-batch that is due.
    Due(Missing),
    /// Of one that waits.
    Later(Upcoming),
}

impl Row {
    fn missing(&self) -> &Missing {
        match self {
            Self::Due(missing) => missing,
            Self::Later(upcoming) => &upcoming.missing,
        }
    }

    fn into_missing(self) -> Missing {
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
    fn put(&mut self, row: &Row, values: &[f32], computed: bool) {
        match row {
            Row::Due(missing) => {
                let features =
                    self.batch.features_mut().as_mut().expect("a row can only be missing among features");
                features.values[missing.place.clone()].copy_from_slice(values);
            }
            Row::Later(upcoming) => self.waiting.put_back(upcoming, values, computed),
        }
    }
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// The micro-batch with the features that it lacks, in a step that takes them from the cache; any other as it is.
    pub(in crate::train) fn complete(
        &mut self,
        step: Step,
        mut prepared: Prepared,
        used: &mut CacheUse,
    ) -> Result<Prepared, TrainError> {
        if prepared.batch.features().is_none() {
            return Ok(prepared);
        }
        used.read += prepared.read;
        let damaged = std::mem::take(&mut prepared.damaged);
        if let Some(features) = self.features.as_mut().filter(|_| !damaged.is_empty()) {
            damaged.into_iter().for_each(|damage| features.account.damage(damage));
            self.tell_complaints()?;
        }
        let looking = Instant::now();
        let missing = std::mem::take(&mut prepared.missing);
        let missing = self.look_again(&mut *prepared.batch, missing);
        used.read += looking.elapsed();
        if !missing.is_empty() {
            self.enter(Phase::CacheBuild, step)?;
            let began = Instant::now();
            prepared.computed.extend(missing.iter().map(|missing| missing.row));
            let filled = self.fill(step, &mut *prepared.batch, missing);
            used.fill += began.elapsed();
            self.enter(Phase::Data, step)?;
            filled?;
        }
        used.misses += prepared.computed.len() as u64;
        used.hits += (prepared.batch.len() - prepared.computed.len()) as u64;
        Ok(prepared)
    }

    /// What is still missing of a micro-batch that is due.
    fn look_again(&mut self, batch: &mut dyn Batch, missing: Vec<Missing>) -> Vec<Missing> {
        let Some(features) = self.features.as_ref().filter(|_| !missing.is_empty()) else { return missing };
        let mut rows: Vec<Row> = missing.into_iter().map(Row::Due).collect();
        let mut target = Target { batch, waiting: &mut self.feed.prefetch };
        features.look_again(&mut rows, &mut target);
        rows.into_iter().map(Row::into_missing).collect()
    }

    /// Computes these rows of `batch`.
    fn fill(&mut self, step: Step, batch: &mut dyn Batch, missing: Vec<Missing>) -> Result<(), TrainError> {
        let features = self.features.as_mut().expect("a step that asks for features has a store");
        let extractor = self.learner.objective.extractor().expect("what is kept was computed by it");
        let room = missing.len().next_multiple_of(features.fill_batch) - missing.len();
        let mut ahead: Vec<Row> = self.feed.prefetch.upcoming(room).into_iter().map(Row::Later).collect();
        let mut target = Target { batch, waiting: &mut self.feed.prefetch };
        features.look_again(&mut ahead, &mut target);
        let rows: Vec<Row> = missing.into_iter().map(Row::Due).chain(ahead).collect();
        let mut left = &rows[..];
        while !left.is_empty() {
            let (now, later) = left.split_at(left.len().min(features.fill_batch));
            let samples: Vec<&dyn Sample> = now.iter().map(|row| &*row.missing().seen).collect();
            let inputs = self.feed.samples.collate(step, &samples);
            let serving = features.serving.as_ref();
            let below =
                serving.and_then(|serving| serving.older.as_ref()).unwrap_or(&self.learner.trainables);
            let before = memory::in_use();
            match memory::guarded(|| extractor.compute(below, &*inputs)) {
                Ok(made) => {
                    features.keep(&mut target, now, made?.values);
                    left = later;
                }
                Err(_) if now.len() > 1 => {
                    features.fill_batch = now.len().div_ceil(2);
                    target.waiting.keep_ahead(features.fill_batch);
                    let line = format!(
                        "rank {}: out of memory while computing features: {} samples at a time from now on; steps are not affected",
                        self.members.assignment.rank, features.fill_batch
                    );
                    tracing::warn!(step = step.0, "{line}");
                    self.members.link.report(Report::Note(line))?;
                }
                Err(overrun) => {
                    // One sample does not fit beside what is there; a smaller micro-batch leaves more room.
                    let capacity = self.run.spec.memory.capacity.map(coxswain_proto::ids::Bytes);
                    let source = OutOfMemory::of(Phase::CacheBuild, overrun, before, capacity);
                    return Err(TrainError::DoesNotFit { step, source });
                }
            }
        }
        Ok(())
    }

    /// Lets the features of an epoch be published where its last step has computed them; training goes on meanwhile.
    pub(in crate::train) fn publish_features(&self, step: Step) {
        if let Some(features) = self.features.as_ref().filter(|_| self.run.ends_epoch(step)) {
            features.keeper.publish();
        }
    }

    /// Where an epoch ends, waits until its features are published: called before a collective, so that after it all ranks can see them.
    pub(in crate::train) fn settle_features(&mut self, step: Step) -> Result<(), TrainError> {
        match self.run.ends_epoch(step) {
            true => self.storing(step, |own| own.features.iter_mut().for_each(Features::settle)),
            false => Ok(()),
        }
    }

    /// What may wait for the store's disk, in a phase of which the coordinator knows that; then the present phase goes on.
    pub(super) fn storing(&mut self, step: Step, work: impl FnOnce(&mut Self)) -> Result<(), TrainError> {
        if self.features.is_none() {
            return Ok(());
        }
        let phase = self.books.meter.phase();
        self.enter(Phase::CacheBuild, step)?;
        work(self);
        self.enter(phase, step)
    }

    /// Says what the step that is done has brought.
    pub(in crate::train) fn tell_features(&mut self, step: Step) -> Result<(), TrainError> {
        self.conclude_drift(step)?;
        let first = self.members.assignment.rank.0 == 0;
        let epoch_ends = self.run.ends_epoch(step);
        if let Some(features) = self.features.as_mut().filter(|_| first && epoch_ends) {
            let Features { keeper, base, training, .. } = features;
            keeper.note(&base.made_by, training);
            if let Some(line) = features.words_of_epoch() {
                self.members.link.report(Report::Note(line))?;
            }
        }
        self.tell_cache()
    }

    /// Publishes everything: where a run or a generation ends, and with every checkpoint.
    pub(in crate::train) fn publish_all(&mut self) -> Result<(), TrainError> {
        self.storing(self.next, |own| own.features.iter_mut().for_each(Features::publish))?;
        self.tell_cache()
    }

    /// Says what has gone wrong since the last call.
    pub(super) fn tell_complaints(&mut self) -> Result<(), TrainError> {
        let Some(features) = &mut self.features else { return Ok(()) };
        features.hear();
        for line in features.account.take_complaints() {
            self.members
                .link
                .report(Report::Note(format!("rank {}: {line}", self.members.assignment.rank)))?;
        }
        Ok(())
    }

    /// Says what has gone wrong, and how far the generation is.
    fn tell_cache(&mut self) -> Result<(), TrainError> {
        self.tell_complaints()?;
        let Some(features) = self.features.as_mut().filter(|_| self.members.assignment.rank.0 == 0) else {
            return Ok(());
        };
        if features.account.has_news()
            && let Some(report) = features.report()
        {
            self.members.link.report(Report::Cache(report))?;
        }
        Ok(())
    }
}

impl<B: Tape<Base = B>> Features<B> {
    /// Reads what has appeared since the data threads looked; what is left is to be computed.
    fn look_again(&self, rows: &mut Vec<Row>, target: &mut Target<'_>) {
        let Some(space) = self.serving.as_ref().and_then(|serving| serving.space.as_ref()) else { return };
        if let Err(error) = space.refresh() {
            tracing::debug!(%error, "the cache's directory cannot be read");
        }
        let mut values = Vec::new();
        rows.retain(|row| {
            let Missing { key, place, .. } = row.missing();
            let record = key.and_then(|key| space.get(&key));
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
    fn keep(&self, target: &mut Target<'_>, rows: &[Row], values: Vec<f32>) {
        let mut made = Made { rows: Vec::with_capacity(rows.len()), values };
        let (mut rounded, mut begin) = (Vec::new(), 0);
        for row in rows {
            let Missing { key, place, seen, .. } = row.missing();
            let own = begin..begin + place.len();
            begin = own.end;
            rounded.clear();
            rounded.extend_from_slice(&made.values[own.clone()]);
            round_trip(self.dtype, self.shape.width, &mut rounded);
            target.put(row, &rounded, true);
            if let Some(key) = *key {
                made.rows.push(MadeRow { key, inputs: seen.inputs(), place: own });
            }
        }
        // Unrounded, so that the part knows what rounding costs; its bytes are the same.
        self.keeper.keep(made);
    }

    /// Makes what was stored so far visible to everybody.
    pub(super) fn publish(&mut self) {
        self.keeper.publish();
        self.settle();
    }

    /// Waits until everything that was handed to the store is there.
    pub(super) fn settle(&mut self) {
        let began = Instant::now();
        self.keeper.settle();
        self.account.fill_time(began.elapsed());
        self.hear();
    }

    /// Takes in what the storing thread has to tell.
    pub(super) fn hear(&mut self) {
        let News { kept, published, complaints } = self.keeper.news();
        complaints.into_iter().for_each(|line| self.account.complain(line));
        self.account.kept(kept, published);
    }
}
