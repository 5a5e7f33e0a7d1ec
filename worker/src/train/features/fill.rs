//! Filling: the features that a micro-batch lacks are computed, rounded as the store rounds, and stored.
//!
//! ```text
//! look again      a part may have appeared since the data threads looked
//! compute         `cache.encoder_batch` samples at a time, no tape; an out-of-memory halves that, on this rank alone
//! round           through the storage format, so that a hit later has the same bits
//! append          to the open part; published when it is full, at an epoch's end, at a turn, with a checkpoint
//! ```
//!
//! A feature depends on its own sample alone, so it does not matter with which others it is computed, and no vote is needed.

use std::time::Instant;

use coxswain_proto::ids::Step;

use super::{Features, Serving};
use crate::{
    batch::{MicroBatch, Sample},
    data::{Missing, Prepared, collate},
    kernels::Tape,
    link::{CacheUse, Phase, Report},
    memory::{self, OutOfMemory},
    train::{TrainError, run::Training},
    vl_cache::{Coverage, Record, round_trip},
};

impl<B: Tape<Base = B>> Training<'_, B> {
    /// The micro-batch with the features that it lacks, in a step that takes them from the cache; any other as it is.
    pub(in crate::train) fn complete(
        &mut self,
        step: Step,
        prepared: Prepared,
        used: &mut CacheUse,
    ) -> Result<MicroBatch, TrainError> {
        let Prepared { mut batch, mut missing, read, damaged } = prepared;
        if batch.features.is_none() {
            return Ok(batch);
        }
        used.read += read;
        if let Some(features) = self.features.as_mut().filter(|_| !damaged.is_empty()) {
            damaged.into_iter().for_each(|damage| features.account.damage(damage));
            self.tell_complaints()?;
        }
        if !missing.is_empty() {
            self.enter(Phase::CacheBuild, step)?;
            let began = Instant::now();
            self.features
                .as_ref()
                .expect("who asks for features has a store")
                .look_again(&mut batch, &mut missing);
            used.misses += missing.len() as u64;
            let filled = self.fill(step, &mut batch, &missing);
            used.fill += began.elapsed();
            self.enter(Phase::Data, step)?;
            filled?;
        }
        used.hits += (batch.len() - missing.len()) as u64;
        Ok(batch)
    }

    fn fill(&mut self, step: Step, batch: &mut MicroBatch, missing: &[Missing]) -> Result<(), TrainError> {
        let mut left = missing;
        while !left.is_empty() {
            let features = self.features.as_mut().expect("who asks for features has a store");
            let (now, later) = left.split_at(left.len().min(features.fill_batch));
            let samples: Vec<&Sample> = now.iter().map(|missing| &missing.seen).collect();
            let pixels = collate(step, &samples, self.dataset.pad_token());
            let serving = features.serving.as_ref();
            let below = serving.and_then(|serving| serving.older.as_ref()).unwrap_or(&self.trainables);
            let before = memory::in_use();
            match memory::guarded(|| self.policy.features_below(below, &pixels)) {
                Ok(made) => {
                    features.keep(batch, now, made?.values);
                    left = later;
                }
                Err(_) if now.len() > 1 => {
                    features.fill_batch = now.len().div_ceil(2);
                    let line = format!(
                        "rank {}: out of memory while computing features: {} samples at a time from now on; steps are not affected",
                        self.assignment.rank, features.fill_batch
                    );
                    tracing::warn!(step = step.0, "{line}");
                    self.link.report(Report::Note(line))?;
                }
                Err(overrun) => {
                    // One sample does not fit beside what is there; a smaller micro-batch leaves more room.
                    let capacity = self.spec.memory.capacity.map(coxswain_proto::ids::Bytes);
                    let source = OutOfMemory::of(Phase::CacheBuild, overrun, before, capacity);
                    return Err(TrainError::DoesNotFit { step, source });
                }
            }
        }
        Ok(())
    }

    /// Publishes what was stored by the end of `step`, if that is the time; before the vote, so that after it all ranks can see it.
    pub(in crate::train) fn publish_features(&mut self, step: Step) -> Result<(), TrainError> {
        let epoch_ends = (step.0 + 1).is_multiple_of(self.plan.steps_per_epoch());
        let Some(features) = &mut self.features else { return Ok(()) };
        let full = features.serving.as_ref().is_some_and(Serving::part_is_full);
        if !full && !epoch_ends {
            return Ok(());
        }
        let began = Instant::now();
        features.publish();
        features.account.fill_time(began.elapsed());
        self.tell_cache(epoch_ends)
    }

    /// Publishes everything: where a run or a generation ends, and with every checkpoint.
    pub(in crate::train) fn publish_all(&mut self) -> Result<(), TrainError> {
        let Some(features) = &mut self.features else { return Ok(()) };
        features.publish();
        self.tell_cache(false)
    }

    /// Says what has gone wrong since the last call.
    pub(super) fn tell_complaints(&mut self) -> Result<(), TrainError> {
        let Some(features) = &mut self.features else { return Ok(()) };
        for line in features.account.take_complaints() {
            self.link.report(Report::Note(format!("rank {}: {line}", self.assignment.rank)))?;
        }
        Ok(())
    }

    /// Says what has gone wrong, and how far the generation is.
    fn tell_cache(&mut self, epoch_ends: bool) -> Result<(), TrainError> {
        self.tell_complaints()?;
        let Some(features) = self.features.as_mut().filter(|_| self.assignment.rank.0 == 0) else {
            return Ok(());
        };
        if epoch_ends && let Some(line) = features.words_of_epoch() {
            self.link.report(Report::Note(line))?;
        }
        if epoch_ends {
            features.note_coverage();
        }
        if features.account.has_news()
            && let Some(report) = features.report()
        {
            self.link.report(Report::Cache(report))?;
        }
        Ok(())
    }
}

impl<B: Tape<Base = B>> Features<B> {
    /// Reads what has appeared since the data threads looked.
    fn look_again(&self, batch: &mut MicroBatch, missing: &mut Vec<Missing>) {
        let space = self.serving.as_ref().and_then(|serving| serving.space.as_ref());
        let (Some(space), Some(features)) = (space, &mut batch.features) else { return };
        if let Err(error) = space.refresh() {
            tracing::debug!(%error, "the cache's directory cannot be read");
        }
        missing.retain(|missing| {
            let out = &mut features.values[missing.place.clone()];
            let record =
                missing.key.and_then(|key| space.get(&key)).filter(|r| r.tokens() * r.width() == out.len());
            record.is_none_or(|record| record.read_f32(out).is_err())
        });
    }

    /// Puts computed features in their places, rounded, and stores them.
    fn keep(&mut self, batch: &mut MicroBatch, made: &[Missing], values: Vec<f32>) {
        let features = batch.features.as_mut().expect("a row can only be missing among features");
        let mut rest = &values[..];
        for missing in made {
            let place = &mut features.values[missing.place.clone()];
            let (own, others) = rest.split_at(place.len());
            rest = others;
            let Sample { input_ids, image_grids, .. } = &missing.seen;
            if let Some(serving) = &mut self.serving {
                // Unrounded, so that the part knows what rounding costs; its bytes are the same.
                let record = Record { input_ids, image_grids, values: own };
                serving.store(missing, &record, &mut self.account);
            }
            place.copy_from_slice(own);
            round_trip(self.dtype, self.shape.width, place);
        }
    }

    /// Leaves word in the space of how far this run is, for `cox cache list`.
    fn note_coverage(&mut self) {
        let Some(space) = self.serving.as_ref().and_then(|serving| serving.space.as_ref()) else { return };
        let noted = space.refresh().and_then(|_| {
            let stored = self.training.iter().filter(|key| space.contains(key)).count() as u64;
            space.note_coverage(&Coverage {
                run: self.base.made_by.clone(),
                total: self.account.total,
                stored,
            })
        });
        let _ = noted.inspect_err(|error| self.account.complain(error));
    }

    /// Makes what was appended so far visible to everybody.
    pub(super) fn publish(&mut self) {
        let Some(serving) = &mut self.serving else { return };
        let Some(part) = serving.part.take() else { return };
        match part.publish() {
            Ok(records) => self.account.published(records),
            Err(error) => serving.give_up(&mut self.account, &error),
        }
    }
}

impl<B: Tape<Base = B>> Serving<B> {
    fn part_is_full(&self) -> bool {
        self.part.as_ref().is_some_and(|part| part.is_full())
    }

    fn store(&mut self, missing: &Missing, record: &Record<'_>, account: &mut super::Account) {
        let (false, Some(space), Some(key)) = (self.full, &self.space, missing.key) else { return };
        if self.part.is_none() {
            match space.writer() {
                Ok(part) => self.part = Some(part),
                Err(error) => return self.give_up(account, &error),
            }
        }
        let Some(part) = &mut self.part else { return };
        if let Err(error) = part.append(key, record) {
            // Within the budget's error the part is still sound, and is published in its time.
            if !matches!(error, crate::vl_cache::StoreError::OverBudget { .. }) {
                self.part = None;
            }
            self.give_up(account, &error);
        }
    }
}
