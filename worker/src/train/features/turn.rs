//! Turns: which generation serves the next step, and what has to be ready for it.
//!
//! ```text
//! live phase     LoRA moves; the last generation is kept, adapter and all, to be compared with
//! it ends        a generation begins, or the kept one goes on, at least until drift has decided; drift is measured from here on (`probes`)
//! begins         snapshot of the adapter as it is before the step; its digest names the space, so all ranks open the same
//! goes on        what is missing is computed with the adapter of then
//! joins later    the space's name comes with the lease, from the other ranks, or from the checkpoint; the adapter from the space
//! ```
//!
//! Within a cached phase LoRA rests, so the present adapter *is* the generation's, and a rank that comes back there needs nothing from
//! the store.

use std::sync::Arc;

use coxswain_proto::{
    cache_plan::{CacheGeneration, CacheReport},
    ids::{Bytes, Step},
};

use super::{
    Features, Serving,
    adapter::{self, AdapterSnapshot},
    claim::{Claim, Mark, Place},
};
use crate::{
    feeder::KeptFeatures,
    link::{CacheSpace, CacheTurn, Leased, Report},
    train::{TrainError, training::Training},
};
use coxswain_feature_store::{Digest, SpaceKey};
use coxswain_nn::{kernels::Tape, params::Trainables};

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Leases the next step, after what has to be known for that.
    pub(in crate::train) fn lease_next(&mut self, samples: u64) -> Result<Leased, TrainError> {
        let step = self.next;
        if self.measures_before(step) {
            self.measure_before(step)?;
        }
        let leased = self.members.link.lease(step, samples)?;
        self.take_turn(&leased.turn)?;
        Ok(leased)
    }

    /// Where a step of this turn takes its features from: nothing if it computes them itself; the outer none if that is not known yet.
    pub(in crate::train) fn source(&self, turn: &CacheTurn) -> Option<Option<KeptFeatures>> {
        let (Some(features), CacheTurn::Cached(space)) = (&self.features, turn) else { return Some(None) };
        let number = space.generation.number;
        match features.serving.as_ref().filter(|serving| serving.generation == space.generation) {
            Some(serving) => Some(Some(serving.source.clone())),
            // It has no name before it begins, so its samples are read as if nothing were there, and looked for when they are due. Not before a
            // step that fills another generation: it would take them for its own.
            None if space.generation.since > self.next => {
                let alike = |claim: &Claim| [0, number].contains(&claim.turn.number());
                self.feed.claimed.iter().all(alike).then(|| Some(features.source(None)))
            }
            None => None,
        }
    }

    /// Makes ready what the step that runs next needs. Nothing happens if it is as the step before.
    pub(in crate::train) fn take_turn(&mut self, turn: &CacheTurn) -> Result<(), TrainError> {
        let step = self.next;
        let Some(features) = self.features.as_mut().filter(|features| features.rests()) else {
            return Ok(());
        };
        let begins = matches!(turn, CacheTurn::Cached(space) if space.generation.since == step);
        if features.taken == Some(step) || (features.phase == Some(turn.number()) && !begins) {
            return Ok(());
        }
        (features.phase, features.taken) = (Some(turn.number()), Some(step));
        self.storing(step, |own| own.prepare_turn(turn))?;
        self.tell_turn(turn)
    }

    fn prepare_turn(&mut self, turn: &CacheTurn) {
        let (step, Some(features)) = (self.next, self.features.as_mut()) else { return };
        features.publish();
        match turn {
            CacheTurn::Live { kept } => {
                // What is not measured by now never will be: LoRA moves on.
                features.measuring = None;
                if let Some(serving) = &mut features.serving {
                    serving.older = None;
                }
                if let Some(kept) = kept
                    && kept.space.is_some()
                    && !features.serves(&kept.generation)
                {
                    features.recall(kept, &self.learner.trainables);
                }
            }
            CacheTurn::Cached(space) => {
                let before = features.serve(space, step, &self.learner.trainables);
                self.begin_measuring(space, before);
            }
        }
    }

    /// One line for people, and for the coordinator what serves now.
    fn tell_turn(&mut self, turn: &CacheTurn) -> Result<(), TrainError> {
        self.tell_complaints()?;
        let Some(features) = self.features.as_mut().filter(|_| self.members.assignment.rank.0 == 0) else {
            return Ok(());
        };
        self.members.link.report(Report::Note(features.words_of_turn(self.next, turn)))?;
        if matches!(turn, CacheTurn::Cached(_))
            && let Some(report) = features.report()
        {
            self.members.link.report(Report::Cache(report))?;
        }
        Ok(())
    }

    /// What other ranks, or a checkpoint, must know of the cache.
    pub(in crate::train) fn cache_mark(&self) -> Option<Mark> {
        let features = self.features.as_ref().filter(|features| features.rests())?;
        let serving = features.serving.as_ref()?;
        let place = |serving: &Serving<B>| Place { generation: serving.generation, space: serving.key.0 };
        let before = features.measuring.as_ref().and_then(|measuring| measuring.before());
        Some(Mark { newest: place(serving), before: before.map(place) })
    }

    /// Takes over what a generation of workers has agreed on: the state that it starts with was left with this mark.
    pub(in crate::train) fn resume_cache(&mut self, mark: Option<Mark>) -> Result<(), TrainError> {
        self.storing(self.next, |own| own.resume_generation(mark))
    }

    fn resume_generation(&mut self, mark: Option<Mark>) {
        let Some(features) = self.features.as_mut() else { return };
        // What the last generation of workers computed and nobody could see yet.
        features.publish();
        if !features.rests() {
            return;
        }
        (features.phase, features.taken, features.measured, features.probed) = (None, None, None, None);
        features.measuring = None;
        let Some(Mark { newest: Place { generation, space }, before }) = mark else {
            features.serving = None;
            return;
        };
        let here = features.serving.as_ref();
        if here.is_none_or(|own| own.generation != generation || own.key.0 != space || own.stale) {
            let space = CacheSpace { generation, space: Some(space.to_string()) };
            features.recall(&space, &self.learner.trainables);
        }
        if let Some(before) = before {
            let before = features.past(before, &self.learner.trainables);
            self.measure_again(generation.since, before);
        }
    }
}

impl<B: Tape<Base = B>> Features<B> {
    /// The generation of a cached step: begins, if it does so here, or is the one that was there. Returns what served before one that begins.
    fn serve(&mut self, space: &CacheSpace, step: Step, trainables: &Trainables<B>) -> Option<Serving<B>> {
        let present = AdapterSnapshot::of(trainables, self.resting);
        if space.generation.since == step {
            let before = self.serving.take();
            // A drift since what does not serve any more decides nothing.
            self.measuring.take_if(|measuring| measuring.before().is_none());
            // Again after a rollback, too: the world may be another, and then the weights are.
            self.begin(space.generation, Some(present));
            return before.filter(|before| before.generation.number != space.generation.number);
        }
        if !self.serves(&space.generation) {
            self.recall(space, trainables);
        }
        let device = &self.device;
        if let Some(serving) = &mut self.serving {
            let other = serving.adapter.as_ref().filter(|adapter| ***adapter != present);
            serving.older = other.map(|adapter| adapter.trainables(device));
        }
        None
    }

    fn serves(&self, generation: &CacheGeneration) -> bool {
        self.serving.as_ref().is_some_and(|serving| serving.generation == *generation)
    }

    /// Finds the adapter that an older generation was made with: the present one, if LoRA has rested since, or the one in its space.
    fn recall(&mut self, wanted: &CacheSpace, trainables: &Trainables<B>) {
        let present = AdapterSnapshot::of(trainables, self.resting);
        let key = wanted.space.as_ref().and_then(|key| key.parse::<Digest>().ok()).map(SpaceKey);
        let here = self.described(Some(&present)).key();
        if key.is_none_or(|key| key == here) {
            self.begin(wanted.generation, Some(present));
            return;
        }
        let found = key.and_then(|key| self.find_adapter(&key, trainables));
        let stale = found.is_none();
        self.begin(wanted.generation, Some(found.unwrap_or(present)));
        if let Some(serving) = &mut self.serving {
            serving.stale = stale;
        }
        if stale {
            self.account.complain(format!(
                "the adapter of cache generation {} is in no space of {}: what is missing is computed with the present one, until the next generation begins",
                wanted.generation.number,
                self.store.dir().display()
            ));
        }
    }

    /// A generation that served before the present one, to be compared with; none if its adapter is not there.
    fn past(&mut self, place: Place, trainables: &Trainables<B>) -> Option<Serving<B>> {
        let key = SpaceKey(place.space);
        let adapter = self.find_adapter(&key, trainables)?;
        let space = self.store.find(&key).inspect_err(|error| self.account.complain(error)).ok().flatten();
        Some(self.serving_of(place.generation, key, space, Some(Arc::new(adapter))))
    }

    fn find_adapter(&mut self, key: &SpaceKey, trainables: &Trainables<B>) -> Option<AdapterSnapshot> {
        let tensors = match self.store.find(key).and_then(|space| match space {
            Some(space) => space.load_adapter(),
            None => Ok(None),
        }) {
            Ok(tensors) => tensors?,
            Err(error) => {
                self.account.complain(&error);
                return None;
            }
        };
        // The space may be another kind of device's: then its adapter is what is wanted, and its records are not.
        let snapshot = adapter::snapshot(trainables.layout(), self.resting, &tensors);
        snapshot.inspect_err(|error| self.account.complain(error.to_string())).ok()
    }

    /// The levels of the generation that serves, for the coordinator.
    pub(super) fn report(&self) -> Option<CacheReport> {
        self.serving.as_ref().map(|serving| self.report_of(serving))
    }

    /// The levels of a generation.
    pub(super) fn report_of(&self, serving: &Serving<B>) -> CacheReport {
        let (stored, bytes, damaged) = match &serving.space {
            Some(space) => {
                let stored = self.training.iter().filter(|key| space.contains(key)).count();
                (stored as u64, space.bytes(), space.damaged().0)
            }
            None => (0, 0, 0),
        };
        CacheReport {
            generation: serving.generation.number,
            space: serving.key.to_string(),
            stored,
            total: self.account.total,
            bytes: Bytes(bytes),
            fill_batch: if self.account.filled() { self.fill_batch as u32 } else { 0 },
            damaged,
            drift: None,
            lost: serving.stale,
        }
    }
}
