//! The policy as the engine trains it.

use std::{io, path::Path, sync::Arc};

use crate::{
    pretrained::{ADAPTER, ADAPTER_DIR, BASE},
    vla_flow::config::VlaSettings,
};
use coxswain_models::{
    pretrained::{
        adapters::readme,
        directory,
        error::ModelError,
        merge::{TrainedModel, write_merged},
    },
    vision_language::Tap,
};
use coxswain_nn::dtypes::ActivationsDtype;
use coxswain_nn::{
    files::{replace, write_tensors},
    kernels::Tape,
    lora::{AdapterOrigin, LoraError, linear::matrix_keys, merged, write_adapter},
    params::{GradientSums, Group, ParamSpec, TrainableLayout, Trainables},
    sharded::{Cut, HeldParts, Peers},
};
use coxswain_proto::run_spec::{Recompute, RunSpec};
use coxswain_task::{
    Artifact, Batch, CachedFeatures, Evaluation, Example, Extractor, Fault, FeatureShape, FrozenWeights,
    MicroLoss, Module, Objective, Samples, StageClock, TaskError,
};

use super::{
    EXPERT, SENSOR, adapters,
    data::MicroBatch,
    examples::examples,
    measures::{MEASURES, evaluated, parts, run_data},
    policy::{Policy, StepError},
};

/// What a run leaves beside its adapter, a file for each group.
pub(super) const GROUPS: [(Group, Artifact); 3] = [
    (Group::BASE, BASE),
    (EXPERT, Artifact { path: "expert.safetensors", what: "action expert" }),
    (SENSOR, Artifact { path: "sensor.safetensors", what: "sensor encoder" }),
];

/// What its README says of an adapter.
const TRAINED: &str = "Trained by Coxswain as part of a vision-language-action policy. The action expert that reads the hidden states of this\n\
                       model is not part of this directory.";

/// A policy, and the run that it is trained by.
pub(super) struct VlaObjective<B: Tape<Base = B>> {
    pub(super) policy: Policy<B>,
    pub(super) spec: RunSpec,
    pub(super) settings: VlaSettings,
}

impl<B: Tape<Base = B>> VlaObjective<B> {
    /// Actions of held-out samples, from the noise that evaluation draws.
    fn sampled(&self, trainables: &Trainables<B>, batch: &MicroBatch) -> Result<Vec<f32>, StepError> {
        let seed = self.spec.eval.seed.unwrap_or(self.spec.run.seed);
        self.policy.sample_actions(trainables, batch, seed)
    }
}

impl<B: Tape<Base = B>> Objective<B> for VlaObjective<B> {
    fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError> {
        Ok(self.policy.forward_backward(trainables, batch.content(), grads, clock)?)
    }

    fn loss(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<MicroLoss, TaskError> {
        Ok(self.policy.loss(trainables, batch.content())?)
    }

    fn measures(&self) -> &'static [&'static str] {
        &MEASURES
    }

    fn parts(&self) -> Vec<String> {
        parts(self.policy.dims(), &self.settings.data.sets)
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
        self.policy.trainable_report(layout, self.settings.model.weights_dtype)
    }

    fn base(&self) -> &str {
        &self.settings.model.path
    }

    fn notes(&self) -> Vec<String> {
        activations(&self.settings, self.spec.train.recompute).into_iter().collect()
    }

    fn initial_values(&self, layout: &TrainableLayout) -> Result<Vec<f32>, TaskError> {
        self.policy.initial_values(&self.spec, layout).map_err(TaskError::bad_input)
    }

    fn export(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Result<Vec<Artifact>, TaskError> {
        let there = |group| layout.whole().any(|param| param.group == group);
        let mut written = Vec::new();
        for (group, artifact) in GROUPS.into_iter().filter(|(group, _)| there(*group)) {
            let path = dir.join(artifact.path);
            let adapters = self.policy.expert_lora().filter(|_| group == EXPERT);
            let merged = adapters.map(|plan| merged(plan, matrix_keys, layout, values));
            let values = merged.as_deref().unwrap_or(values);
            let wanted = |param: &ParamSpec| param.group == group && !adapters::is_beside(param);
            replace(&path, |path| write_tensors(path, layout, values, wanted))
                .map_err(|error| unwritten(&path, &error))?;
            written.push(artifact);
        }
        if let Some(plan) = self.policy.lora() {
            let base_model = &self.settings.model.path;
            let outline = self.policy.model().outline();
            let tied = outline.tied_to_head();
            let tied = tied.as_deref();
            let readme = readme(base_model, outline.class, TRAINED);
            let trained_above = Some(self.settings.model.weights_dtype);
            let origin = AdapterOrigin { base_model, task_type: None, readme: &readme, tied, trained_above };
            write_adapter(&dir.join(ADAPTER_DIR), plan, layout, values, &origin)
                .map_err(|error: LoraError| TaskError::io(error))?;
            written.extend(ADAPTER);
        }
        Ok(written)
    }

    fn export_merged(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Option<Result<(), TaskError>> {
        let plan = self.policy.lora();
        if plan.is_none() && self.policy.full().is_empty() {
            return None;
        }
        let outline = self.policy.model().outline();
        let tied = outline.tied_to_head();
        let trained =
            TrainedModel { rules: outline.rules, tied: tied.as_deref(), joined: None, plan, layout, values };
        let merged = directory::whole(&self.settings.model.path)
            .map_err(ModelError::from)
            .and_then(|model| write_merged(&model, dir, trained));
        Some(merged.map_err(TaskError::io))
    }

    fn extractor(&self) -> Option<&dyn Extractor<B>> {
        self.policy.tap().map(|_| self as &dyn Extractor<B>)
    }

    fn most_streamed(&self) -> u64 {
        self.policy.most_streamed()
    }

    fn held_parts(&self) -> Option<Arc<dyn HeldParts>> {
        Some(Arc::new(self.policy.model().shared_blocks()?))
    }

    fn share_out(&self, cut: Cut, peers: &Arc<dyn Peers>) -> Result<(), TaskError> {
        self.policy.model().share_out(cut, peers).map_err(TaskError::io)
    }
}

impl<B: Tape<Base = B>> Extractor<B> for VlaObjective<B> {
    fn tap(&self) -> String {
        self.policy.tap().map_or(String::new(), |tap| tap.to_string())
    }

    fn describe(&self) -> Vec<String> {
        self.policy.describe_tap().into_iter().flatten().collect()
    }

    fn shape(&self) -> FeatureShape {
        let rows = self.policy.model().outline().feature_rows();
        let tap = self.policy.tap().unwrap_or(Tap::Final);
        FeatureShape::new(self.policy.tap_width(), move |ids, images| rows.at(tap, ids.len(), images))
    }

    fn resting(&self) -> Group {
        Group::LORA
    }

    fn row_values(&self, batch: &dyn Batch) -> Vec<usize> {
        let width = self.policy.tap_width();
        self.policy.tap_tokens(batch.content()).into_iter().map(|tokens| tokens * width).collect()
    }

    fn compute(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<CachedFeatures, TaskError> {
        Ok(self.policy.features_below(trainables, batch.content())?)
    }

    fn frozen(&self) -> Result<Box<dyn FrozenWeights>, TaskError> {
        let tap = self.policy.tap().unwrap_or(Tap::Final);
        Ok(Box::new(self.policy.weights_below(tap).map_err(TaskError::bad_input)?))
    }
}

/// What becomes of activations, where it is not the default.
fn activations(settings: &VlaSettings, recompute: Recompute) -> Option<String> {
    let kept = match (settings.model.activations_dtype, recompute) {
        (ActivationsDtype::Float32, _) => return None,
        (ActivationsDtype::Bfloat16, Recompute::None) => {
            "without train.recompute, this saves no memory: they are stored in float32"
        }
        (ActivationsDtype::Bfloat16, _) => "saved activations take 2 bytes a value",
    };
    Some(format!("activations are rounded to bfloat16 between blocks; {kept}"))
}

fn unwritten(path: &Path, error: &io::Error) -> TaskError {
    TaskError::io(format!("write {}: {error}", path.display()))
}

impl From<StepError> for TaskError {
    fn from(error: StepError) -> Self {
        let fault = match error {
            StepError::Weights { .. } => Fault::Io,
            StepError::NonFiniteLoss { .. } => Fault::Numeric,
            StepError::Tokens { .. } | StepError::Features { .. } => Fault::BadInput,
        };
        Self::new(fault, error)
    }
}
