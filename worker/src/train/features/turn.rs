//! Turns: which generation serves the next step, and what has to be ready for it.
//!
//! ```text
//! live phase     LoRA moves; the last generation is kept, adapter and all, to be compared with
//! it ends        drift is measured (`drift`), then the link says whether a generation begins or the kept one goes on
//! begins         snapshot of the adapter as it is before the step; its digest names the space, so all ranks open the same
//! goes on        what is missing is computed with the adapter of then
//! joins later    the space's name comes with the lease, from the other ranks, or from the checkpoint; the adapter from the space
//! ```
//!
//! Within a cached phase LoRA rests, so the present adapter *is* the generation's, and a rank that comes back there needs nothing from
//! the store.

use std::ops::Range;

use coxswain_proto::{
    cache_plan::{CacheGeneration, CacheReport, CacheSchedule},
    ids::Step,
};
use serde::{Deserialize, Serialize};

use super::{Features, adapter};
use crate::{
    data::KeptFeatures,
    kernels::Tape,
    link::{CacheSpace, CacheTurn, Leased, Report},
    model::policy::AdapterSnapshot,
    params::Trainables,
    train::{TrainError, run::Training},
    vl_cache::{Digest, SpaceKey},
};

/// What this rank consumes in a step, and where the step takes its features from.
#[derive(Clone, Debug)]
pub(in crate::train) struct Claim {
    /// Positions of the epoch's order.
    pub positions: Vec<Range<u64>>,
    /// As leased.
    pub turn: CacheTurn,
}

/// The generation that serves or served last, as ranks and checkpoints hand it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Which.
    pub generation: CacheGeneration,
    /// The key of its space.
    pub space: Digest,
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Whether leases of `step` are asked for only when it is the next to run: there drift is measured first, by all ranks together.
    pub(in crate::train) fn waits_for_turn(&self, step: Step) -> bool {
        let schedule = CacheSchedule::new(&self.spec.cache, &self.plan);
        schedule.is_some_and(|schedule| schedule.begins_cached(step))
    }

    /// Leases the next step, after what has to be known for that.
    pub(in crate::train) fn lease_next(&mut self, samples: u64) -> Result<Leased, TrainError> {
        let step = self.next;
        if self.waits_for_turn(step) {
            self.measure_drift(step)?;
        }
        let leased = self.link.lease(step, samples)?;
        self.take_turn(&leased.turn)?;
        Ok(leased)
    }

    /// Where a step of this turn takes its features from: nothing if it computes them itself; the outer none if that is not known yet.
    pub(in crate::train) fn source(&self, turn: &CacheTurn) -> Option<Option<KeptFeatures>> {
        let (Some(features), CacheTurn::Cached(space)) = (&self.features, turn) else { return Some(None) };
        let serving = features.serving.as_ref().filter(|serving| serving.generation == space.generation)?;
        Some(Some(serving.source.clone()))
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
        features.publish();
        match turn {
            CacheTurn::Live { kept } => {
                if let Some(serving) = &mut features.serving {
                    serving.older = None;
                }
                if let Some(kept) = kept
                    && kept.space.is_some()
                    && !features.serves(&kept.generation)
                {
                    features.recall(kept, &self.trainables);
                }
            }
            CacheTurn::Cached(space) => features.serve(space, step, &self.trainables),
        }
        self.tell_turn(turn)
    }

    /// One line for people, and for the coordinator what serves now.
    fn tell_turn(&mut self, turn: &CacheTurn) -> Result<(), TrainError> {
        self.tell_complaints()?;
        let Some(features) = self.features.as_mut().filter(|_| self.assignment.rank.0 == 0) else {
            return Ok(());
        };
        self.link.report(Report::Note(features.words_of_turn(self.next, turn)))?;
        if matches!(turn, CacheTurn::Cached(_))
            && let Some(report) = features.report()
        {
            self.link.report(Report::Cache(report))?;
        }
        Ok(())
    }

    /// What other ranks, or a checkpoint, must know of the cache.
    pub(in crate::train) fn cache_mark(&self) -> Option<Mark> {
        let features = self.features.as_ref().filter(|features| features.rests())?;
        let serving = features.serving.as_ref()?;
        Some(Mark { generation: serving.generation, space: serving.key.0 })
    }

    /// Takes over what a generation of workers has agreed on: the state that it starts with was left with this mark.
    pub(in crate::train) fn resume_cache(&mut self, mark: Option<Mark>) {
        let Some(features) = self.features.as_mut() else { return };
        // What the last generation of workers computed and nobody could see yet.
        features.publish();
        if !features.rests() {
            return;
        }
        (features.phase, features.taken, features.measured, features.probed) = (None, None, None, None);
        let Some(mark) = mark else {
            features.serving = None;
            return;
        };
        let here = features.serving.as_ref();
        if here.is_none_or(|own| own.generation != mark.generation || own.key.0 != mark.space || own.stale) {
            let space = CacheSpace { generation: mark.generation, space: Some(mark.space.to_string()) };
            features.recall(&space, &self.trainables);
        }
    }
}

impl<B: Tape<Base = B>> Features<B> {
    /// The generation of a cached step: begins, if it does so here, or is the one that was there.
    fn serve(&mut self, space: &CacheSpace, step: Step, trainables: &Trainables<B>) {
        let present = AdapterSnapshot::of(trainables);
        if space.generation.since == step {
            // Again after a rollback, too: the world may be another, and then the weights are.
            self.begin(space.generation, Some(present));
            return;
        }
        if !self.serves(&space.generation) {
            self.recall(space, trainables);
        }
        let device = &self.device;
        if let Some(serving) = &mut self.serving {
            let other = serving.adapter.as_ref().filter(|adapter| **adapter != present);
            serving.older = other.map(|adapter| adapter.trainables(device));
        }
    }

    fn serves(&self, generation: &CacheGeneration) -> bool {
        self.serving.as_ref().is_some_and(|serving| serving.generation == *generation)
    }

    /// Finds the adapter that an older generation was made with: the present one, if LoRA has rested since, or the one in its space.
    fn recall(&mut self, wanted: &CacheSpace, trainables: &Trainables<B>) {
        let present = AdapterSnapshot::of(trainables);
        let key = wanted.space.as_ref().and_then(|key| key.parse::<Digest>().ok()).map(SpaceKey);
        let here = self.described(Some(&adapter::tensors(&present))).key();
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
        let snapshot = adapter::snapshot(trainables.layout(), &tensors);
        snapshot.inspect_err(|error| self.account.complain(error)).ok()
    }

    /// The levels of the generation that serves, for the coordinator.
    pub(super) fn report(&mut self) -> Option<CacheReport> {
        let serving = self.serving.as_ref()?;
        let (stored, bytes, damaged) = match &serving.space {
            Some(space) => {
                let stored = self.training.iter().filter(|key| space.contains(key)).count();
                (stored as u64, space.bytes(), space.damaged().0)
            }
            None => (0, 0, 0),
        };
        Some(CacheReport {
            generation: serving.generation.number,
            space: serving.key.to_string(),
            stored,
            total: self.account.total,
            bytes: coxswain_proto::ids::Bytes(bytes),
            fill_batch: if self.account.filled() { self.fill_batch as u32 } else { 0 },
            damaged,
            drift: None,
            lost: serving.stale,
        })
    }
}
