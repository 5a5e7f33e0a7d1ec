//! A policy of LeRobot's as the engine trains it.

use std::{collections::BTreeMap, path::Path};

use coxswain_data::lerobot::stats::FeatureStats;
use coxswain_models::{
    Shelf,
    pretrained::{adapters::TunedModules, checkpoint::CheckpointDir, error::ModelError},
};
use coxswain_nn::{
    kernels::Tape,
    lora::{AdapterOrigin, Module as ModelModule, write_adapter},
    params::{GradientSums, TrainableLayout, Trainables},
};
use coxswain_policies::{
    directory::Feature,
    export::{Export, Rounding, Statistics, write},
};
use coxswain_proto::run_spec::{CacheMode, RunSpec};
use coxswain_task::{
    Artifact, Assembly, Batch, Evaluation, Example, Extractor, MicroLoss, Module, Objective, Samples,
    StageClock, TaskError,
};

use super::{
    parts::{frozen, rows},
    passes::{PolicyPasses, TunedPolicy},
};
use crate::{
    pretrained::{ADAPTER, ADAPTER_DIR},
    vla_flow::{
        base::PolicyBase,
        config::VlaSettings,
        data::{CameraInput, Dataset, MicroBatch, PolicyFile, SampleDims},
        examples::examples,
        measures::{MEASURES, evaluated, parts, run_data},
        policy::PolicyError,
    },
};

/// What a run leaves: the policy as LeRobot loads it.
const POLICY: [Artifact; 2] = [
    Artifact { path: "policy/config.json", what: "configuration of the policy, in LeRobot's format" },
    Artifact { path: "policy/model.safetensors", what: "all weights of the policy" },
];
/// Where it is.
pub const POLICY_DIR: &str = "policy";

/// A policy, and the run that it is trained by.
pub struct PolicyObjective<B: Tape<Base = B>> {
    pub(super) passes: PolicyPasses<B>,
    pub(super) base: PolicyBase,
    pub(super) settings: VlaSettings,
    tuned: TunedModules,
    spec: RunSpec,
    dims: SampleDims,
    inputs: Vec<Feature>,
    outputs: Vec<Feature>,
    statistics: Statistics,
    renamed: BTreeMap<String, String>,
}

impl<B: Tape<Base = B>> PolicyObjective<B> {
    /// Reads the policy that a run starts from.
    pub fn build(
        spec: &RunSpec,
        base: PolicyBase,
        models: Shelf<B>,
        samples: &dyn Samples,
        device: &B::Device,
    ) -> Result<Assembly<B>, TaskError> {
        let settings = VlaSettings::from_spec(spec).map_err(TaskError::bad_input)?;
        let dims = run_data(samples).dims();
        let tuned = check(&base, &settings, spec, dims).map_err(TaskError::bad_input)?;
        let policy = TunedPolicy { base: &base, tuned: &tuned, settings: &settings };
        let loaded = PolicyPasses::load(spec, policy, models, dims, device);
        let (passes, layout, initial) = loaded.map_err(TaskError::bad_input)?;
        let statistics = statistics(samples, &settings);
        let (inputs, outputs) = features(samples, dims, &base, &settings).map_err(TaskError::bad_input)?;
        let renamed = renamed(&settings);
        let spec = spec.clone();
        let objective =
            Self { passes, base, settings, tuned, spec, dims, inputs, outputs, statistics, renamed };
        Ok(Assembly { objective: Box::new(objective), layout, initial })
    }

    fn write(&self, out: &Path, layout: &TrainableLayout, values: &[f32]) -> Result<Rounding, TaskError> {
        let Self { base, inputs, outputs, statistics, renamed, .. } = self;
        let (directory, plan) = (&base.directory, self.tuned.trains().lora);
        let (rules, named) = (base.kind.rules(), base.kind.written_name());
        let export =
            Export { directory, rules, named, plan, layout, values, inputs, outputs, statistics, renamed };
        write(out, export).map_err(TaskError::io)
    }

    fn sampled(&self, trainables: &Trainables<B>, batch: &MicroBatch) -> Result<Vec<f32>, TaskError> {
        let seed = self.spec.eval.seed.unwrap_or(self.spec.run.seed);
        Ok(self.passes.sample(trainables, batch, seed)?)
    }
}

/// What trains. Refuses settings that the policy does not have, and data that do not fit it.
pub(super) fn check(
    base: &PolicyBase,
    settings: &VlaSettings,
    spec: &RunSpec,
    dims: SampleDims,
) -> Result<TunedModules, PolicyError> {
    if let Some((field, problem)) = base.misfit(settings, spec) {
        return Err(PolicyError::Setting { field, problem });
    }
    let [state, action] = base.kind.sizes().padded;
    for (field, found, most) in [("data.state", dims.state, state), ("data.action", dims.action, action)] {
        if found > most {
            let problem = format!("has {found} values, but the policy has room for {most}");
            return Err(PolicyError::Setting { field, problem });
        }
    }
    let tuned = base.tuned(settings)?;
    let kept = base.kept(spec);
    let below = |module: &ModelModule| base.kind.is_kept_above(kept, &format!("{}.weight", module.name));
    let trains = |module: &ModelModule| below(module) && tuned.trains().touches(module);
    let found = base.modules().into_iter().find(trains).filter(|_| spec.cache.mode != CacheMode::Off);
    if let Some(ModelModule { name, .. }) = found {
        let problem = format!(
            "is `exact`, but `{name}` trains, and the cached features depend on it; take it out of lora.targets and model.train, or use `off`"
        );
        return Err(PolicyError::Setting { field: "cache.mode", problem });
    }
    Ok(tuned)
}

/// Statistics of the data set, under LeRobot's names.
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

/// What the policy sees and gives, as its directory says it: its own features, in the data set's sizes.
fn features(
    samples: &dyn Samples,
    dims: SampleDims,
    base: &PolicyBase,
    settings: &VlaSettings,
) -> Result<(Vec<Feature>, Vec<Feature>), ModelError> {
    let [mut inputs, mut outputs] =
        [base.directory.features("input_features")?, base.directory.features("output_features")?];
    let dataset = samples.downcast_ref::<Dataset>();
    let cameras = dataset.map(|dataset| PolicyFile::from_dataset(dataset, dims).cameras).unwrap_or_default();
    for feature in inputs.iter_mut().chain(&mut outputs) {
        let seen = |camera: &&CameraInput| settings.data.renamed(&camera.name) == feature.name;
        match &feature.kind[..] {
            "STATE" => feature.shape = vec![dims.state],
            "ACTION" => feature.shape = vec![dims.action],
            _ => {
                if let Some(CameraInput { height, width, .. }) = cameras.iter().find(seen) {
                    feature.shape = vec![3, *height, *width];
                }
            }
        }
    }
    Ok((inputs, outputs))
}

/// LeRobot's map: of the data set's names those that are not the policy's.
fn renamed(settings: &VlaSettings) -> BTreeMap<String, String> {
    let mut map = settings.data.rename_map.clone();
    if let [name] = settings.data.state.names() {
        map.insert(name.clone(), "observation.state".into());
    }
    map.retain(|from, to| from != to);
    map
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
        Ok(examples(batch, run_data(samples), self.sampled(trainables, batch)?))
    }

    fn modules(&self, layout: &TrainableLayout) -> Vec<Module> {
        rows(&frozen(&self.base, &self.tuned), self.settings.model.weights_dtype, layout)
    }

    fn base(&self) -> &str {
        &self.settings.model.path
    }

    fn initial_values(&self, layout: &TrainableLayout) -> Result<Vec<f32>, TaskError> {
        let checkpoint = CheckpointDir { path: &self.base.directory.dir, rules: self.base.kind.rules() };
        let dtype = self.settings.model.weights_dtype;
        let values = self.tuned.initial_values::<B>(self.spec.run.seed, layout, checkpoint, dtype);
        values.map_err(TaskError::bad_input)
    }

    fn export(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Result<Vec<Artifact>, TaskError> {
        let cost = self.write(&dir.join(POLICY_DIR), layout, values)?;
        tracing::info!("{POLICY_DIR}: {cost}");
        let mut written = POLICY.to_vec();
        if let Some(plan) = self.tuned.trains().lora {
            let base_model = &self.settings.model.path;
            let readme = readme(base_model, self.base.kind.class());
            let trained_above = Some(self.settings.model.weights_dtype);
            let origin =
                AdapterOrigin { base_model, task_type: None, readme: &readme, tied: None, trained_above };
            write_adapter(&dir.join(ADAPTER_DIR), plan, layout, values, &origin)
                .map_err(|error| TaskError::io(ModelError::from(error)))?;
            written.extend(ADAPTER);
        }
        Ok(written)
    }

    fn extractor(&self) -> Option<&dyn Extractor<B>> {
        (self.spec.cache.mode != CacheMode::Off).then_some(self as &dyn Extractor<B>)
    }

    fn export_lerobot(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Option<Result<String, TaskError>> {
        Some(self.write(dir, layout, values).map(|cost| cost.to_string()))
    }
}

/// The README of a policy's adapter.
fn readme(base_model: &str, [module, class]: [&str; 2]) -> String {
    format!(
        "---\n\
         base_model: {base_model}\n\
         library_name: peft\n\
         tags:\n\
         - base_model:adapter:{base_model}\n\
         - lora\n\
         - lerobot\n\
         ---\n\n\
         # LoRA adapter of {base_model}\n\n\
         Trained by Coxswain. `../policy` is the policy with this adapter merged in.\n\n\
         ```python\n\
         from {module} import {class}\n\
         from peft import PeftModel\n\n\
         base = {class}.from_pretrained(\"{base_model}\")\n\
         policy = PeftModel.from_pretrained(base, \"path/to/this/directory\")\n\
         ```\n"
    )
}
