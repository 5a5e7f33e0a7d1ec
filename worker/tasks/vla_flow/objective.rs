//! The policy as the engine trains it.

use std::{io, path::Path, sync::Arc};

use crate::{
    pretrained::{ADAPTER, ADAPTER_DIR, BASE},
    vla_flow::config::{VlaSettings, in_metric},
};
use coxswain_models::{
    pretrained::{
        adapters::readme,
        directory,
        error::ModelError,
        merge::{Trained, write_merged},
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
    MicroLoss, Module, Objective, PartSum, Samples, StageClock, TaskError,
};

use super::{
    EXPERT, SENSOR, adapters,
    data::{Dataset, MicroBatch, Mixture, RunData},
    examples::examples,
    policy::{Policy, StepError},
};

/// What held-out samples are measured by: squared error in normalised units, which can be compared between
/// data sets, and absolute error in the data set's own units.
const MEASURES: [&str; 2] = ["mse_normalized", "mae"];

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

    /// Each measure by set of a mixture; then each by dimension of the action, and by step of the horizon.
    fn parts(&self) -> Vec<String> {
        let dims = self.policy.dims();
        let sets = &self.settings.data.sets;
        let by_set = MEASURES
            .into_iter()
            .flat_map(|of| sets.iter().map(move |set| format!("{of}/set/{}", in_metric(set.name()))));
        let names = |measure| {
            let by_dim = (0..dims.action).map(move |dim| format!("{measure}/dim{dim}"));
            by_dim.chain((0..dims.horizon).map(move |step| format!("{measure}/step{step}")))
        };
        by_set.chain(MEASURES.into_iter().flat_map(names)).collect()
    }

    fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        samples: &dyn Samples,
    ) -> Result<Evaluation, TaskError> {
        let batch: &MicroBatch = batch.content();
        let data = run_data(samples);
        let mut sampled = self.sampled(trainables, batch)?;
        let mut recorded = batch.actions.clone();
        let (width, horizon) = (data.dims().action, data.dims().horizon);
        let sets: Vec<_> = batch.sample_indices.iter().map(|index| data.set_of(*index)).collect();
        let by_set = |a: &[f32], b: &[f32], f: fn(f64) -> f64| {
            let mut parts = vec![PartSum::default(); self.settings.data.sets.len()];
            each_error(batch, width, a, b, |row, _, error| {
                if let Some(part) = sets[row].and_then(|set| parts.get_mut(set)) {
                    part.count += 1.0;
                    part.sum += f(error);
                }
            });
            parts
        };
        let mut of_sets = by_set(&sampled, &recorded, |d| d * d);
        let squared = masked_sum(batch, width, &sampled, &recorded, |d| d * d);
        let mut parts = parts_of(batch, [width, horizon], &sampled, &recorded, |d| d * d);
        for actions in [&mut sampled, &mut recorded] {
            denormalize(batch, data, actions);
        }
        let absolute = masked_sum(batch, width, &sampled, &recorded, f64::abs);
        of_sets.extend(by_set(&sampled, &recorded, f64::abs));
        parts.extend(parts_of(batch, [width, horizon], &sampled, &recorded, f64::abs));
        parts.splice(0..0, of_sets);
        let valid = batch.action_valid.chunks(horizon.max(1)).zip(&batch.action_widths);
        let count = valid.map(|(valid, &own)| valid.iter().map(|&v| f64::from(v)).sum::<f64>() * own as f64);
        Ok(Evaluation { count: count.sum(), sums: vec![squared, absolute], parts })
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
        let trained = Trained { rules: outline.rules, tied: tied.as_deref(), plan, layout, values };
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
            "nothing is saved: with train.recompute: none graphs are kept, in float32"
        }
        (ActivationsDtype::Bfloat16, _) => "what recompute keeps takes 2 bytes a value",
    };
    Some(format!("activations are rounded to bfloat16 between blocks; {kept}"))
}

/// The data behind a run's samples.
pub(super) fn run_data(samples: &dyn Samples) -> &dyn RunData {
    let one = samples.downcast_ref::<Dataset>().map(|one| one as &dyn RunData);
    let several = || samples.downcast_ref::<Mixture>().map(|several| several as &dyn RunData);
    one.or_else(several).expect("samples of a run are those of its task")
}

/// Actions of a batch in the units of the data sets that they are of.
fn denormalize(batch: &MicroBatch, data: &dyn RunData, actions: &mut [f32]) {
    let size = data.dims().action * data.dims().horizon;
    let rows = batch.sample_indices.iter().zip(actions.chunks_mut(size.max(1)));
    rows.for_each(|(&index, actions)| data.denormalize_actions(index, actions));
}

/// Tells each difference of the components of valid action steps, with its row of the batch and
/// `[step, dimension]`.
fn each_error(
    batch: &MicroBatch,
    width: usize,
    a: &[f32],
    b: &[f32],
    mut tell: impl FnMut(usize, [usize; 2], f64),
) {
    let horizon = batch.action_valid.len() / batch.len().max(1);
    let steps = a.chunks_exact(width).zip(b.chunks_exact(width)).zip(&batch.action_valid).enumerate();
    for (place, ((a, b), _)) in steps.filter(|(_, (_, valid))| **valid > 0.0) {
        let row = place / horizon;
        for (dim, (&a, &b)) in a.iter().zip(b).enumerate().take(batch.action_widths[row]) {
            tell(row, [place % horizon, dim], f64::from(a) - f64::from(b));
        }
    }
}

/// Sum of `f(difference)` over the components of valid action steps.
fn masked_sum(batch: &MicroBatch, width: usize, a: &[f32], b: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut sum = 0.0;
    each_error(batch, width, a, b, |_, _, error| sum += f(error));
    sum
}

/// The same by dimension of the action, then by step of the horizon; `[width, horizon]` are their numbers.
fn parts_of(
    batch: &MicroBatch,
    [width, horizon]: [usize; 2],
    a: &[f32],
    b: &[f32],
    f: impl Fn(f64) -> f64,
) -> Vec<PartSum> {
    let mut parts = vec![PartSum::default(); width + horizon];
    each_error(batch, width, a, b, |_, [step, dim], error| {
        for part in [dim, width + step] {
            parts[part].count += 1.0;
            parts[part].sum += f(error);
        }
    });
    parts
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
