//! Cache phases: which generation serves the next step, and what has to be ready for it.
//!
//! ```text
//! live phase     LoRA moves; the last generation is kept, adapter and all, to be compared with
//! it ends        a generation begins, or the kept one goes on, at least until drift has decided; drift is
//!                measured from here on (`probes`)
//! begins         snapshot of the adapter as it is before the step; its digest names the namespace, so all
//!                ranks open the same
//! goes on        what is missing is computed with the adapter of then
//! joins later    the namespace's name comes with the lease, from the other ranks, or from the checkpoint;
//!                the adapter from the namespace
//! ```
//!
//! Within a cached phase LoRA rests, so the present adapter *is* the generation's, and a rank that comes back
//! there needs nothing from the store.

use std::{collections::VecDeque, sync::Arc};

use coxswain_proto::{
    cache_plan::{CacheGeneration, CacheReport},
    ids::{Bytes, Step},
};

use super::{
    adapter::{self, AdapterSnapshot},
    claim::{Claim, FeatureVersion, Mark},
    desk::Desk,
    memo::Features,
    serving::Serving,
};
use crate::{
    feeder::KeptFeatures,
    link::{CacheNamespace, CachePhase, Report},
    train::TrainError,
};
use coxswain_feature_store::{Digest, NamespaceKey};
use coxswain_nn::{kernels::Tape, params::Trainables};

impl<B: Tape<Base = B>> Features<B> {
    /// Where a step of this cache phase takes its features from: nothing if it computes them itself; the
    /// outer none if that is not known yet. `next` is the step that runs next, `claimed` what is requested
    /// already.
    pub(in crate::train) fn source(
        &self,
        cache_phase: &CachePhase,
        next: Step,
        claimed: &VecDeque<Claim>,
    ) -> Option<Option<KeptFeatures>> {
        let CachePhase::Cached(namespace) = cache_phase else { return Some(None) };
        let number = namespace.generation.number;
        match self.serving.as_ref().filter(|serving| serving.generation == namespace.generation) {
            Some(serving) => Some(Some(serving.source.clone())),
            // It has no name before it begins, so its samples are read as if nothing were there, and looked
            // for when they are due. Not before a step that fills another generation: it would take them for
            // its own.
            None if namespace.generation.since > next => {
                let alike = |claim: &Claim| [0, number].contains(&claim.cache_phase.number());
                claimed.iter().all(alike).then(|| Some(self.setup.source_in(None)))
            }
            None => None,
        }
    }

    /// Makes ready what the step that runs next needs. Nothing happens if it is as the step before.
    pub(in crate::train) fn enter_cache_phase(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        cache_phase: &CachePhase,
    ) -> Result<(), TrainError> {
        let step = desk.next;
        if !self.setup.rests() {
            return Ok(());
        }
        let begins =
            matches!(cache_phase, CachePhase::Cached(namespace) if namespace.generation.since == step);
        if self.taken == Some(step) || (self.phase == Some(cache_phase.number()) && !begins) {
            return Ok(());
        }
        (self.phase, self.taken) = (Some(cache_phase.number()), Some(step));
        desk.storing(step, |desk| self.prepare_cache_phase(desk, cache_phase))?;
        self.tell_cache_phase(desk, cache_phase)
    }

    fn prepare_cache_phase(&mut self, desk: &Desk<'_, '_, B>, cache_phase: &CachePhase) {
        self.publish();
        let trainables = &desk.learner.trainables;
        match cache_phase {
            CachePhase::Live { kept } => {
                // What is not measured by now never will be: LoRA moves on.
                self.measuring = None;
                if let Some(serving) = &mut self.serving {
                    serving.older = None;
                }
                if let Some(kept) = kept
                    && kept.namespace.is_some()
                    && !self.serves(&kept.generation)
                {
                    self.recall(kept, trainables);
                }
            }
            CachePhase::Cached(namespace) => {
                let before = self.serve(namespace, desk.next, trainables);
                self.begin_measuring(desk, namespace, before);
            }
        }
    }

    /// One line for people, and for the coordinator what serves now.
    fn tell_cache_phase(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        cache_phase: &CachePhase,
    ) -> Result<(), TrainError> {
        self.tell_complaints(desk)?;
        if desk.members.rank().0 > 0 {
            return Ok(());
        }
        desk.members.link.report(Report::Note(self.words_of_cache_phase(desk.next, cache_phase)))?;
        if matches!(cache_phase, CachePhase::Cached(_))
            && let Some(report) = self.report()
        {
            desk.members.link.report(Report::Cache(report))?;
        }
        Ok(())
    }

    /// What other ranks, or a checkpoint, must know.
    pub(in crate::train) fn mark(&self) -> Option<Mark> {
        let serving = self.serving.as_ref().filter(|_| self.setup.rests())?;
        let place = |serving: &Serving<B>| FeatureVersion {
            generation: serving.generation,
            namespace: serving.key.0,
        };
        let before = self.measuring.as_ref().and_then(|measuring| measuring.before());
        Some(Mark { newest: place(serving), before: before.map(place) })
    }

    /// Takes over what a generation of workers has agreed on: the state that it starts with was left with
    /// this mark.
    pub(in crate::train) fn resume(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        mark: Option<Mark>,
    ) -> Result<(), TrainError> {
        desk.storing(desk.next, |desk| self.resume_generation(desk, mark))
    }

    fn resume_generation(&mut self, desk: &Desk<'_, '_, B>, mark: Option<Mark>) {
        // What the last generation of workers computed and had not published yet.
        self.publish();
        if !self.setup.rests() {
            return;
        }
        (self.phase, self.taken, self.measured, self.probed) = (None, None, None, None);
        self.measuring = None;
        let Some(Mark { newest: FeatureVersion { generation, namespace }, before }) = mark else {
            self.serving = None;
            return;
        };
        let here = self.serving.as_ref();
        if here.is_none_or(|own| own.generation != generation || own.key.0 != namespace || own.stale) {
            let namespace = CacheNamespace { generation, namespace: Some(namespace.to_string()) };
            self.recall(&namespace, &desk.learner.trainables);
        }
        if let Some(before) = before {
            let before = self.past(before, &desk.learner.trainables);
            self.measure_again(desk, generation.since, before);
        }
    }

    /// The generation of a cached step: begins, if it does so here, or is the one that was there. Returns
    /// what served before one that begins.
    fn serve(
        &mut self,
        namespace: &CacheNamespace,
        step: Step,
        trainables: &Trainables<B>,
    ) -> Option<Serving<B>> {
        let present = AdapterSnapshot::of(trainables, self.setup.resting);
        if namespace.generation.since == step {
            let before = self.serving.take();
            // A drift since what does not serve any more decides nothing.
            self.measuring.take_if(|measuring| measuring.before().is_none());
            // Again after a rollback, too: the world may be another, and then the weights are.
            self.begin(namespace.generation, Some(present));
            return before.filter(|before| before.generation.number != namespace.generation.number);
        }
        if !self.serves(&namespace.generation) {
            self.recall(namespace, trainables);
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

    /// Finds the adapter that an older generation was made with: the present one, if LoRA has rested since,
    /// or the one in its namespace.
    fn recall(&mut self, wanted: &CacheNamespace, trainables: &Trainables<B>) {
        let present = AdapterSnapshot::of(trainables, self.setup.resting);
        let key = wanted.namespace.as_ref().and_then(|key| key.parse::<Digest>().ok()).map(NamespaceKey);
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
                "the adapter of version {} of the features is in no namespace of {}: what is missing is computed with the present one, until the next version begins",
                wanted.generation.number,
                self.setup.store.dir().display()
            ));
        }
    }

    /// A generation that served before the present one, to be compared with; none if its adapter is not
    /// there.
    fn past(&mut self, place: FeatureVersion, trainables: &Trainables<B>) -> Option<Serving<B>> {
        let key = NamespaceKey(place.namespace);
        let adapter = self.find_adapter(&key, trainables)?;
        let namespace =
            self.setup.store.find(&key).inspect_err(|error| self.account.complain(error)).ok().flatten();
        Some(self.setup.serving_of(place.generation, key, namespace, Some(Arc::new(adapter))))
    }

    fn find_adapter(&mut self, key: &NamespaceKey, trainables: &Trainables<B>) -> Option<AdapterSnapshot> {
        let tensors = match self.setup.store.find(key).and_then(|namespace| match namespace {
            Some(namespace) => namespace.load_adapter(),
            None => Ok(None),
        }) {
            Ok(tensors) => tensors?,
            Err(error) => {
                self.account.complain(&error);
                return None;
            }
        };
        // The namespace may be another kind of device's: then its adapter is what is wanted, and its records
        // are not.
        let snapshot = adapter::snapshot(trainables.layout(), self.setup.resting, &tensors);
        snapshot.inspect_err(|error| self.account.complain(error.to_string())).ok()
    }

    /// The levels of the generation that serves, for the coordinator.
    pub(super) fn report(&self) -> Option<CacheReport> {
        self.serving.as_ref().map(|serving| self.report_of(serving))
    }

    /// The levels of a generation.
    pub(super) fn report_of(&self, serving: &Serving<B>) -> CacheReport {
        let (stored, bytes, damaged) = match &serving.namespace {
            Some(namespace) => {
                let stored = self.setup.training.iter().filter(|key| namespace.contains(key)).count();
                (stored as u64, namespace.bytes(), namespace.damaged().0)
            }
            None => (0, 0, 0),
        };
        CacheReport {
            generation: serving.generation.number,
            namespace: serving.key.to_string(),
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
