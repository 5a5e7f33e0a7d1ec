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

use std::{collections::VecDeque, sync::Arc};

use coxswain_proto::{
    cache_plan::{CacheGeneration, CacheReport},
    ids::{Bytes, Step},
};

use super::{
    adapter::{self, AdapterSnapshot},
    claim::{Claim, Mark, Place},
    desk::Desk,
    memo::Features,
    serving::Serving,
};
use crate::{
    feeder::KeptFeatures,
    link::{CacheSpace, CacheTurn, Report},
    train::TrainError,
};
use coxswain_feature_store::{Digest, SpaceKey};
use coxswain_nn::{kernels::Tape, params::Trainables};

impl<B: Tape<Base = B>> Features<B> {
    /// Where a step of this turn takes its features from: nothing if it computes them itself; the outer none if that is
    /// not known yet. `next` is the step that runs next, `claimed` what is requested already.
    pub(in crate::train) fn source(
        &self,
        turn: &CacheTurn,
        next: Step,
        claimed: &VecDeque<Claim>,
    ) -> Option<Option<KeptFeatures>> {
        let CacheTurn::Cached(space) = turn else { return Some(None) };
        let number = space.generation.number;
        match self.serving.as_ref().filter(|serving| serving.generation == space.generation) {
            Some(serving) => Some(Some(serving.source.clone())),
            // It has no name before it begins, so its samples are read as if nothing were there, and looked for when they are due. Not before a
            // step that fills another generation: it would take them for its own.
            None if space.generation.since > next => {
                let alike = |claim: &Claim| [0, number].contains(&claim.turn.number());
                claimed.iter().all(alike).then(|| Some(self.setup.source_in(None)))
            }
            None => None,
        }
    }

    /// Makes ready what the step that runs next needs. Nothing happens if it is as the step before.
    pub(in crate::train) fn take_turn(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        turn: &CacheTurn,
    ) -> Result<(), TrainError> {
        let step = desk.next;
        if !self.setup.rests() {
            return Ok(());
        }
        let begins = matches!(turn, CacheTurn::Cached(space) if space.generation.since == step);
        if self.taken == Some(step) || (self.phase == Some(turn.number()) && !begins) {
            return Ok(());
        }
        (self.phase, self.taken) = (Some(turn.number()), Some(step));
        desk.storing(step, |desk| self.prepare_turn(desk, turn))?;
        self.tell_turn(desk, turn)
    }

    fn prepare_turn(&mut self, desk: &Desk<'_, '_, B>, turn: &CacheTurn) {
        self.publish();
        let trainables = &desk.learner.trainables;
        match turn {
            CacheTurn::Live { kept } => {
                // What is not measured by now never will be: LoRA moves on.
                self.measuring = None;
                if let Some(serving) = &mut self.serving {
                    serving.older = None;
                }
                if let Some(kept) = kept
                    && kept.space.is_some()
                    && !self.serves(&kept.generation)
                {
                    self.recall(kept, trainables);
                }
            }
            CacheTurn::Cached(space) => {
                let before = self.serve(space, desk.next, trainables);
                self.begin_measuring(desk, space, before);
            }
        }
    }

    /// One line for people, and for the coordinator what serves now.
    fn tell_turn(&mut self, desk: &mut Desk<'_, '_, B>, turn: &CacheTurn) -> Result<(), TrainError> {
        self.tell_complaints(desk)?;
        if desk.members.rank().0 > 0 {
            return Ok(());
        }
        desk.members.link.report(Report::Note(self.words_of_turn(desk.next, turn)))?;
        if matches!(turn, CacheTurn::Cached(_))
            && let Some(report) = self.report()
        {
            desk.members.link.report(Report::Cache(report))?;
        }
        Ok(())
    }

    /// What other ranks, or a checkpoint, must know.
    pub(in crate::train) fn mark(&self) -> Option<Mark> {
        let serving = self.serving.as_ref().filter(|_| self.setup.rests())?;
        let place = |serving: &Serving<B>| Place { generation: serving.generation, space: serving.key.0 };
        let before = self.measuring.as_ref().and_then(|measuring| measuring.before());
        Some(Mark { newest: place(serving), before: before.map(place) })
    }

    /// Takes over what a generation of workers has agreed on: the state that it starts with was left with this mark.
    pub(in crate::train) fn resume(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        mark: Option<Mark>,
    ) -> Result<(), TrainError> {
        desk.storing(desk.next, |desk| self.resume_generation(desk, mark))
    }

    fn resume_generation(&mut self, desk: &Desk<'_, '_, B>, mark: Option<Mark>) {
        // What the last generation of workers computed and nobody could see yet.
        self.publish();
        if !self.setup.rests() {
            return;
        }
        (self.phase, self.taken, self.measured, self.probed) = (None, None, None, None);
        self.measuring = None;
        let Some(Mark { newest: Place { generation, space }, before }) = mark else {
            self.serving = None;
            return;
        };
        let here = self.serving.as_ref();
        if here.is_none_or(|own| own.generation != generation || own.key.0 != space || own.stale) {
            let space = CacheSpace { generation, space: Some(space.to_string()) };
            self.recall(&space, &desk.learner.trainables);
        }
        if let Some(before) = before {
            let before = self.past(before, &desk.learner.trainables);
            self.measure_again(desk, generation.since, before);
        }
    }

    /// The generation of a cached step: begins, if it does so here, or is the one that was there. Returns what served before one that begins.
    fn serve(&mut self, space: &CacheSpace, step: Step, trainables: &Trainables<B>) -> Option<Serving<B>> {
        let present = AdapterSnapshot::of(trainables, self.setup.resting);
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
        let device = &self.setup.device;
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
        let present = AdapterSnapshot::of(trainables, self.setup.resting);
        let key = wanted.space.as_ref().and_then(|key| key.parse::<Digest>().ok()).map(SpaceKey);
        let here = self.setup.described(Some(&present)).key();
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
                self.setup.store.dir().display()
            ));
        }
    }

    /// A generation that served before the present one, to be compared with; none if its adapter is not there.
    fn past(&mut self, place: Place, trainables: &Trainables<B>) -> Option<Serving<B>> {
        let key = SpaceKey(place.space);
        let adapter = self.find_adapter(&key, trainables)?;
        let space =
            self.setup.store.find(&key).inspect_err(|error| self.account.complain(error)).ok().flatten();
        Some(self.setup.serving_of(place.generation, key, space, Some(Arc::new(adapter))))
    }

    fn find_adapter(&mut self, key: &SpaceKey, trainables: &Trainables<B>) -> Option<AdapterSnapshot> {
        let tensors = match self.setup.store.find(key).and_then(|space| match space {
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
        let snapshot = adapter::snapshot(trainables.layout(), self.setup.resting, &tensors);
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
                let stored = self.setup.training.iter().filter(|key| space.contains(key)).count();
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
