//! Cache phases: which generation serves the next step, and what has to be ready for it.
//!
//! ```text
//! live phase     LoRA moves; the last generation is kept, adapter and all, to be compared with
//! it ends        a generation begins, or the kept one goes on, at least until drift has decided; drift is
//!                measured from here on (`drift_watch`)
//! begins         snapshot of the adapter as it is before the step; its digest names the namespace, so all
//!                ranks open the same
//! goes on        what is missing is computed with the adapter of then
//! joins later    the namespace's name comes with the lease, from the other ranks, or from the checkpoint;
//!                the adapter from the namespace
//! ```
//!
//! Within a cached phase LoRA rests, so the present adapter *is* the generation's, and a rank that comes back
//! there needs nothing from the store.

use std::collections::VecDeque;

use coxswain_proto::{cache_plan::CacheGeneration, ids::Step};

use super::{
    adapter::AdapterSnapshot,
    claim::{Claim, FeatureVersion, Mark},
    desk::Desk,
    drift_watch::DriftWatch,
    owner::Features,
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
        match self.memo.serving.as_ref().filter(|serving| serving.generation == namespace.generation) {
            Some(serving) => Some(Some(serving.source.clone())),
            // It has no name before it begins, so its samples are read as if nothing were there, and looked
            // for when they are due. Not before a step that fills another generation: it would take them for
            // its own.
            None if namespace.generation.since > next => {
                let alike = |claim: &Claim| [0, number].contains(&claim.cache_phase.number());
                claimed.iter().all(alike).then(|| Some(self.memo.setup.source_in(None)))
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
        if !self.memo.setup.rests() {
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
        self.memo.publish();
        let trainables = &desk.learner.trainables;
        match cache_phase {
            CachePhase::Live { kept } => {
                // What is not measured by now never will be: LoRA moves on.
                self.drift.give_up();
                if let Some(serving) = &mut self.memo.serving {
                    serving.older = None;
                }
                if let Some(kept) = kept
                    && kept.namespace.is_some()
                    && !self.memo.serves(&kept.generation)
                {
                    self.recall(kept, trainables);
                }
            }
            CachePhase::Cached(namespace) => {
                let before = self.serve(namespace, desk.next, trainables);
                self.drift.begin(&self.memo, desk, namespace, before);
            }
        }
    }

    /// One line for people, and for the coordinator what serves now.
    fn tell_cache_phase(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        cache_phase: &CachePhase,
    ) -> Result<(), TrainError> {
        self.memo.tell_complaints(desk)?;
        if desk.members.rank().0 > 0 {
            return Ok(());
        }
        desk.members.link.report(Report::Note(self.memo.words_of_cache_phase(desk.next, cache_phase)))?;
        if matches!(cache_phase, CachePhase::Cached(_))
            && let Some(report) = self.memo.report()
        {
            desk.members.link.report(Report::Cache(report))?;
        }
        Ok(())
    }

    /// What other ranks, or a checkpoint, must know.
    pub(in crate::train) fn mark(&self) -> Option<Mark> {
        let serving = self.memo.serving.as_ref().filter(|_| self.memo.setup.rests())?;
        let place = |serving: &Serving<B>| FeatureVersion {
            generation: serving.generation,
            namespace: serving.key.0,
        };
        Some(Mark { newest: place(serving), before: self.drift.before().map(place) })
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
        self.memo.publish();
        if !self.memo.setup.rests() {
            return;
        }
        (self.phase, self.taken, self.drift) = (None, None, DriftWatch::default());
        let Some(Mark { newest: FeatureVersion { generation, namespace }, before }) = mark else {
            self.memo.serving = None;
            return;
        };
        let here = self.memo.serving.as_ref();
        if here.is_none_or(|own| own.generation != generation || own.key.0 != namespace || own.stale) {
            let namespace = CacheNamespace { generation, namespace: Some(namespace.to_string()) };
            self.recall(&namespace, &desk.learner.trainables);
        }
        if let Some(before) = before {
            let before = self.memo.past(before, &desk.learner.trainables);
            self.drift.begin_again(&self.memo, desk, generation.since, before);
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
        let present = AdapterSnapshot::from_trainables(trainables, self.memo.setup.resting);
        if namespace.generation.since == step {
            let before = self.memo.serving.take();
            self.drift.give_up_deciding();
            // Again after a rollback, too: the world may be another, and then the weights are.
            self.begin(namespace.generation, present);
            return before.filter(|before| before.generation.number != namespace.generation.number);
        }
        if !self.memo.serves(&namespace.generation) {
            self.recall(namespace, trainables);
        }
        let device = &self.memo.setup.device;
        if let Some(serving) = &mut self.memo.serving {
            let other = serving.adapter.as_ref().filter(|adapter| ***adapter != present);
            serving.older = other.map(|adapter| adapter.trainables(device));
        }
        None
    }

    /// From now on this generation serves, made with this adapter.
    fn begin(&mut self, generation: CacheGeneration, adapter: AdapterSnapshot) {
        let first = self.drift.first_records(generation.since);
        self.memo.begin(generation, Some(adapter), first);
    }

    /// Finds the adapter that an older generation was made with: the present one, if LoRA has rested since,
    /// or the one in its namespace.
    fn recall(&mut self, wanted: &CacheNamespace, trainables: &Trainables<B>) {
        let present = AdapterSnapshot::from_trainables(trainables, self.memo.setup.resting);
        let key = wanted.namespace.as_ref().and_then(|key| key.parse::<Digest>().ok()).map(NamespaceKey);
        let here = self.memo.setup.described(Some(&present)).key();
        if key.is_none_or(|key| key == here) {
            self.begin(wanted.generation, present);
            return;
        }
        let found = key.and_then(|key| self.memo.find_adapter(&key, trainables));
        let stale = found.is_none();
        self.begin(wanted.generation, found.unwrap_or(present));
        if let Some(serving) = &mut self.memo.serving {
            serving.stale = stale;
        }
        if stale {
            self.memo.account.complain(format!(
                "the adapter of features version {} was not found in {}: missing features are computed \
                 with the current adapter until the next version begins",
                wanted.generation.number,
                self.memo.setup.store.dir().display()
            ));
        }
    }
}
