//! What the policy's own passes hold and compute, run on the backend that knows sizes alone.

use coxswain_models::vision_language::Tap;
use coxswain_nn::{
    kernels::sizes::{Account, Sizes},
    params::Trainables,
};
use coxswain_proto::run_spec::{Offload, RunSpec, Shard};
use coxswain_task::{CachedFeatures, dry_run::PassCost, memory::Place};

use super::about::{Kind, PredictionError, Subject};
use crate::vla_flow::{config::VlaSettings, data::MicroBatch, policy::Policy};

impl Subject {
    /// A training pass over so many of the longest samples that begins with kept features at `entry`, or with
    /// pixels. Without frozen weights, streamed or held.
    pub(super) fn pass(&self, micro_batch: u64, entry: Option<Tap>, place: Place) -> PassCost {
        let run = |rows| self.run_pass(rows, entry, place);
        // One sample ran when the subject was made; more of the same change nothing but sizes.
        self.passes.at(&self.kind(Kind::Training(entry), place), micro_batch, run).unwrap_or_default()
    }

    /// The pass that computes features of so many samples at the run's tap.
    pub(super) fn filling(&self, samples: u64, place: Place) -> PassCost {
        let run = |rows| self.run_filling(rows, place);
        self.passes.at(&self.kind(Kind::Filling, place), samples, run).unwrap_or_default()
    }

    /// Whether a pass runs at all: what cannot be loaded or does not fit together is told here.
    pub(super) fn try_pass(&self) -> Result<(), PredictionError> {
        let (place, kind) = (Place::Host { threads: 1 }, Kind::Training(None));
        self.passes.at(&self.kind(kind, place), 1, |rows| self.run_pass(rows, None, place)).map(|_| ())
    }

    /// Such a pass under the keys that change what it holds.
    fn kind(&self, kind: Kind, place: Place) -> (String, Kind) {
        let place = if place == Place::Gpu { "GPU" } else { "CPU" };
        (format!("{place} {:?} {:?} {:?}", self.vla, self.spec.train.recompute, self.spec.cache), kind)
    }

    fn run_pass(&self, rows: u64, entry: Option<Tap>, place: Place) -> Result<PassCost, PredictionError> {
        let account = place.account();
        let (policy, trainables) = self.policy(&account)?;
        let features = entry.map(|tap| CachedFeatures {
            width: self.model.hidden_size,
            values: vec![0.0; (rows * self.feature_values(tap)) as usize],
        });
        let batch = MicroBatch { features, ..self.longest(rows as usize) };
        let cost = PassCost::of(&account, |grads, clock| {
            policy.forward_backward(&trainables, &batch, grads, clock).map(|_| ())
        });
        Ok(cost?)
    }

    fn run_filling(&self, rows: u64, place: Place) -> Result<PassCost, PredictionError> {
        let account = place.account();
        let (policy, trainables) = self.policy(&account)?;
        let batch = self.longest(rows as usize);
        let (features, cost) = PassCost::of_forward(&account, || policy.features_below(&trainables, &batch));
        features?;
        Ok(cost)
    }

    /// The policy, its frozen weights held: what of streamed ones is in memory is counted with the weights.
    fn policy(&self, account: &Account) -> Result<(Policy<Sizes>, Trainables<Sizes>), PredictionError> {
        let held = held(&self.spec, &self.vla);
        let (policy, layout, values) = Policy::load(&held, self.models, self.outline.dims, account.device())?;
        Ok((policy, Trainables::new(layout, values, account.device())))
    }

    /// So many samples as long as the longest.
    fn longest(&self, rows: usize) -> MicroBatch {
        let (outline, dims) = (&self.outline, self.outline.dims);
        let ids = self.model.prompt(&outline.images, outline.prompt_tokens);
        MicroBatch::of_zeros(rows, &ids, &outline.images, dims)
    }
}

/// The run with every block held, from nothing but sizes.
fn held(spec: &RunSpec, vla: &VlaSettings) -> RunSpec {
    let (mut spec, mut vla) = (spec.clone(), vla.clone());
    if spec.memory.offload == Offload::Layers {
        spec.memory.offload = Offload::None;
    }
    spec.memory.shard = Shard::None;
    if let Some(lora) = &mut vla.lora {
        lora.init_from = None;
    }
    spec.set_settings(&vla);
    spec
}
