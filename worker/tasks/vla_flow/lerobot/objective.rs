//! A policy of LeRobot's as the engine trains it.

use std::path::Path;

use coxswain_data::lerobot::stats::FeatureStats;
use coxswain_models::Shelf;
use coxswain_nn::{
    kernels::Tape,
    params::{GradientSums, TrainableLayout, Trainables},
};
use coxswain_policies::{
    directory::Feature,
    export::{Export, Statistics, write},
    smolvla::{PolicyFiles, RULES, SmolVla, initial_values},
};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{
    Artifact, Batch, Built, Evaluation, Example, MicroLoss, Module, Objective, Samples, StageClock, TaskError,
};

use super::passes::PolicyPasses;
use crate::vla_flow::{
    EXPERT,
    base::PolicyBase,
    config::VlaSettings,
    data::{Dataset, MicroBatch, PolicyFile, SampleDims},
    examples::examples,
    measures::{MEASURES, denormalize, evaluated, parts, run_data},
    policy::PolicyError,
};

/// What a run leaves: the policy as LeRobot loads it.
const POLICY: [Artifact; 2] = [
    Artifact { path: "policy/config.json", what: "configuration of the policy, as LeRobot has it" },
    Artifact { path: "policy/model.safetensors", what: "all weights of the policy" },
];
/// Where it is.
const POLICY_DIR: &str = "policy";

/// A policy, and the run that it is trained by.
pub struct PolicyObjective<B: Tape<Base = B>> {
    passes: PolicyPasses<B>,
    base: PolicyBase,
    spec: RunSpec,
    settings: VlaSettings,
    dims: SampleDims,
    inputs: Vec<Feature>,
    outputs: Vec<Feature>,
    statistics: Statistics,
}

impl<B: Tape<Base = B>> PolicyObjective<B> {
    /// Reads the policy that a run starts from.
    pub fn build(
        spec: &RunSpec,
        base: PolicyBase,
        models: Shelf<B>,
        samples: &dyn Samples,
        device: &B::Device,
    ) -> Result<Built<B>, TaskError> {
        let settings = VlaSettings::of(spec).map_err(TaskError::bad_input)?;
        let dims = run_data(samples).dims();
        check(&base, &settings, spec, dims).map_err(TaskError::bad_input)?;
        let mut layout = TrainableLayout::default();
        let PolicyBase { directory, backbone, .. } = &base;
        let dtype = settings.model.weights_dtype;
        let files = PolicyFiles { directory, backbone, dtype };
        let policy = SmolVla::load(files, models, &mut layout, device).map_err(TaskError::bad_input)?;
        let initial = initial_values(&directory.dir, &layout).map_err(TaskError::bad_input)?;
        let passes = PolicyPasses {
            policy,
            image: base.outline.image_token,
            seed: spec.run.seed,
            recompute: spec.train.recompute,
            action: dims.action,
            device: device.clone(),
        };
        let statistics = statistics(samples, &settings);
        let (inputs, outputs) = features(samples, dims);
        let spec = spec.clone();
        let objective = Self { passes, base, spec, settings, dims, inputs, outputs, statistics };
        Ok(Built { objective: Box::new(objective), layout, initial })
    }

    fn sampled(&self, trainables: &Trainables<B>, batch: &MicroBatch) -> Result<Vec<f32>, TaskError> {
        let seed = self.spec.eval.seed.unwrap_or(self.spec.run.seed);
        Ok(self.passes.sample(trainables, batch, seed)?)
    }
}

/// Refuses settings that the policy does not have, and data that do not fit it.
pub(super) fn check(
    base: &PolicyBase,
    settings: &VlaSettings,
    spec: &RunSpec,
    dims: SampleDims,
) -> Result<(), PolicyError> {
    if let Some((field, problem)) = base.misfit(settings, spec) {
        return Err(PolicyError::Setting { field, problem });
    }
    let [state, action] = base.config.padded;
    for (field, found, most) in [("data.state", dims.state, state), ("data.action", dims.action, action)] {
        if found > most {
            let problem = format!("has {found} values, and the policy has room for {most}");
            return Err(PolicyError::Setting { field, problem });
        }
    }
    Ok(())
}

/// Those of the data set, under LeRobot's names.
fn statistics(samples: &dyn Samples, settings: &VlaSettings) -> Statistics {
    let Some(dataset) = samples.downcast_ref::<Dataset>() else { return Statistics::default() };
    let actions = settings.data.action.label();
    let named = |name: String| if name == actions { "action" } else { "observation.state" };
    let values = |all: Vec<f64>| all.into_iter().map(|value| value as f32).collect();
    let of = |(name, stats): (String, FeatureStats)| {
        (named(name).to_owned(), stats.into_iter().map(|(name, all)| (name, values(all))).collect())
    };
    dataset.stats().0.into_iter().map(of).collect()
}

/// What the policy sees and gives, as its directory says it.
fn features(samples: &dyn Samples, dims: SampleDims) -> (Vec<Feature>, Vec<Feature>) {
    let feature =
        |name: &str, kind: &str, shape: Vec<usize>| Feature { name: name.into(), kind: kind.into(), shape };
    let state = feature("observation.state", "STATE", vec![dims.state]);
    let file = samples.downcast_ref::<Dataset>().map(|dataset| PolicyFile::of(dataset, dims));
    let cameras = file.iter().flat_map(|file| &file.cameras);
    let cameras = cameras.map(|camera| feature(&camera.name, "VISUAL", vec![3, camera.height, camera.width]));
    let inputs = std::iter::once(state).chain(cameras).collect();
    (inputs, vec![feature("action", "ACTION", vec![dims.action])])
}

impl<B: Tape<Base = B>> Objective<B> for PolicyObjective<B> {
    fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError> {
        Ok(self.passes.forward_backward(trainables, batch.content(), grads, clock)?)
    }

    fn loss(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<MicroLoss, TaskError> {
        Ok(self.passes.loss(trainables, batch.content())?)
    }

    fn measures(&self) -> &'static [&'static str] {
        &MEASURES
    }

    fn parts(&self) -> Vec<String> {
        parts(self.dims, &self.settings.data.sets)
    }

    fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        samples: &dyn Samples,
    ) -> Result<Evaluation, TaskError> {
        let batch: &MicroBatch = batch.content();
        let sampled = self.sampled(trainables, batch)?;
        Ok(evaluated(batch, run_data(samples), self.settings.data.sets.len(), sampled))
    }

    fn examples(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        samples: &dyn Samples,
    ) -> Result<Vec<Example>, TaskError> {
        let batch: &MicroBatch = batch.content();
        let data = run_data(samples);
        let mut sampled = self.sampled(trainables, batch)?;
        let mut recorded = batch.actions.clone();
        for actions in [&mut sampled, &mut recorded] {
            denormalize(batch, data, actions);
        }
        Ok(examples(batch, data, &recorded, &sampled))
    }

    fn modules(&self, layout: &TrainableLayout) -> Vec<Module> {
        let frozen = self.base.outline.parameters();
        let dtype = self.settings.model.weights_dtype;
        let tensors = self.base.outline.tensors.len();
        let bytes = frozen as u64 * dtype.dense().bytes();
        let backbone = Module {
            module: "backbone".into(),
            tensors,
            parameters: frozen,
            trains: false,
            dtype: dtype.name(),
            bytes,
        };
        let expert = Module {
            module: EXPERT.to_string(),
            tensors: layout.params().len(),
            parameters: layout.len(),
            trains: true,
            dtype: "float32",
            bytes: 4 * layout.len() as u64,
        };
        vec![backbone, expert]
    }

    fn base(&self) -> &str {
        &self.settings.model.path
    }

    fn initial_values(&self, layout: &TrainableLayout) -> Result<Vec<f32>, TaskError> {
        initial_values(&self.base.directory.dir, layout).map_err(TaskError::bad_input)
    }

    fn export(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Result<Vec<Artifact>, TaskError> {
        let Self { base, inputs, outputs, statistics, .. } = self;
        let export =
            Export { directory: &base.directory, rules: RULES, layout, values, inputs, outputs, statistics };
        write(&dir.join(POLICY_DIR), export).map_err(TaskError::io)?;
        Ok(POLICY.into())
    }
}
