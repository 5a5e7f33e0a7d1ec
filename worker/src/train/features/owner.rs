//! What a run's features are owned by, together: the memo of those that are kept, the watch on their drift,
//! and the cache phase that was made ready.

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    cache_plan::CacheGeneration,
    ids::{Bytes, Step},
    run_spec::{CacheMode, RunSpec},
};
use coxswain_task::{Objective, Samples};

use super::{desk::Desk, drift_watch::DriftWatch, memo::Memo, serving::Serving};
use crate::train::{Facts, TrainError};

/// What a run keeps of its features, and how.
pub(in crate::train) struct Features<B: Tape<Base = B>> {
    pub(super) memo: Memo<B>,
    pub(super) drift: DriftWatch<B>,
    /// The generation of the cache phase that was made ready last, 0 if live; none if that has to be looked
    /// at again.
    pub(super) phase: Option<u64>,
    /// The step for which that was.
    pub(super) taken: Option<Step>,
}

impl<B: Tape<Base = B>> Features<B> {
    /// Opens the store of a run; none if its cache is off. `gpu` is what the device's maker calls it.
    pub(in crate::train) fn open(
        spec: &RunSpec,
        samples: &dyn Samples,
        objective: &dyn Objective<B>,
        device: &B::Device,
        gpu: Option<String>,
    ) -> Result<Option<Self>, TrainError> {
        let Some(extractor) = objective.extractor() else { return Ok(None) };
        let mut memo = Memo::for_run(spec, samples, extractor, device, gpu.as_deref())?;
        if memo.setup.mode == CacheMode::Exact {
            memo.begin(CacheGeneration { number: 1, since: Step(0) }, None, None);
        }
        Ok(Some(Self { memo, drift: DriftWatch::default(), phase: None, taken: None }))
    }

    /// Bytes held for it from step to step, but for features that wait to be written or read.
    pub(in crate::train) fn bytes(&self) -> Bytes {
        let setup = &self.memo.setup;
        let keys = setup.keys.bytes() + size_of_val(&*setup.training) as u64;
        let held = [self.memo.serving.as_ref(), self.drift.before()];
        Bytes(keys + held.into_iter().flatten().map(Serving::bytes).sum::<u64>())
    }

    /// Samples of one forward pass when features are computed.
    pub(in crate::train) fn encoder_batch(&self) -> usize {
        self.memo.fill_batch
    }

    /// Compares this step's portion of the probes of drift, if one is due.
    pub(in crate::train) fn measure_portion(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        step: Step,
    ) -> Result<(), TrainError> {
        self.drift.measure_portion(&mut self.memo, desk, step)
    }

    /// Whether drift is to be measured before a step is leased.
    pub(in crate::train) fn measures_before(&self, run: &Facts<'_, B>, step: Step) -> bool {
        self.drift.decides(&self.memo, run, step)
    }

    /// Measures it before the step that runs next, if so.
    pub(in crate::train) fn measure_before(&mut self, desk: &mut Desk<'_, '_, B>) -> Result<(), TrainError> {
        self.drift.measure_before(&mut self.memo, desk)
    }
}
