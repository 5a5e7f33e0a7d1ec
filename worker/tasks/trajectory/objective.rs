//! Extractor and network as the engine trains them.

use std::path::Path;

use coxswain_models::vision_language::PassError;
use coxswain_nn::{
    files::{replace, write_tensors},
    kernels::Tape,
    lora::{AdapterOrigin, LoraError, linear::peft_keys, merged, write_adapter},
    params::{GradientSums, Group, TrainableLayout, Trainables},
};
use coxswain_proto::{
    report::{Merge, Metric},
    run_spec::{CacheMode, RunSpec},
};
use coxswain_task::{
    Artifact, Batch, CachedFeatures, Evaluation, Extractor, Fault, FeatureShape, FrozenWeights, MicroLoss,
    Module, Objective, PartSum, Samples, StageClock, TaskError,
};
use serde_json::json;

use super::{
    data::ImageBatch,
    extractor::TrajectoryShape,
    model::{Losses, TrajectoryError, TrajectoryModel},
    network::{ADAPTERS, NETWORK},
};
use crate::pretrained::ADAPTER;

/// What held-out trajectories are measured by: the mean squared error of their values, and the divergence of
/// a drawn latent, in nats a trajectory.
const MEASURES: [&str; 2] = ["mse", "kl"];

/// The network; with what its adapters have learned, if it has any.
pub(super) const WEIGHTS: Artifact = Artifact { path: "network.safetensors", what: "the network's weights" };
const DESCRIPTION: Artifact =
    Artifact { path: "network.json", what: "configuration of the network and of its inputs" };

/// What its README says of an adapter.
const README: &str = "An adapter of a network that reconstructs trajectories of layer activations, trained by Coxswain. Its base\n\
                      network is the one that the run was started from; `../network.safetensors` has both merged.\n";

/// A model, and the run that it is trained by.
pub(super) struct TrajectoryObjective<B: Tape<Base = B>> {
    pub(super) model: TrajectoryModel<B>,
    pub(super) spec: RunSpec,
    pub(super) device: B::Device,
}

impl<B: Tape<Base = B>> Objective<B> for TrajectoryObjective<B> {
    fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError> {
        let (loss, losses) = self.model.forward_backward(trainables, batch.content(), grads, clock)?;
        if self.model.draws() && losses.count > 0.0 {
            for (name, sum) in [("mse", losses.squared), ("kl", losses.divergence)] {
                let value = sum / losses.count;
                clock.figure(Metric { name: name.into(), unit: "1".into(), value, merge: Merge::Mean });
            }
        }
        Ok(loss)
    }

    fn loss(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<MicroLoss, TaskError> {
        Ok(self.model.total(&self.model.evaluate(trainables, batch.content(), true)?))
    }

    fn measures(&self) -> &'static [&'static str] {
        if self.model.draws() { &MEASURES } else { &MEASURES[..1] }
    }

    /// The squared error by layer.
    fn parts(&self) -> Vec<String> {
        self.shape_of().layers.iter().map(|layer| format!("mse/layer{layer}")).collect()
    }

    fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        _samples: &dyn Samples,
    ) -> Result<Evaluation, TaskError> {
        let Losses { count, squared, divergence, by_layer } =
            self.model.evaluate(trainables, batch.content(), false)?;
        let mut sums = vec![squared, divergence];
        sums.truncate(self.measures().len());
        let parts = by_layer.into_iter().map(|sum| PartSum { count, sum });
        Ok(Evaluation { count, sums, parts: parts.collect() })
    }

    fn modules(&self, layout: &TrainableLayout) -> Vec<Module> {
        let settings = &self.model.settings.extractor;
        let dtype = settings.weights_dtype.name();
        let frozen: Vec<_> = self.model.extractor.frozen().collect();
        let extractor = Module {
            module: "extractor".into(),
            tensors: frozen.len(),
            parameters: frozen.iter().map(|tensor| tensor.elements).sum(),
            trains: false,
            dtype,
            bytes: frozen.iter().map(|tensor| tensor.kept_bytes(settings.weights_dtype.into())).sum(),
        };
        let row = |group: Group, trains| {
            let of = if trains { layout.params() } else { layout.constants() };
            let of: Vec<_> = of.iter().filter(|param| param.group == group).collect();
            Module::of_params(group.to_string(), trains, &of)
        };
        let rows = [extractor, row(NETWORK, false), row(NETWORK, true), row(ADAPTERS, true)];
        rows.into_iter().filter(|row| row.tensors > 0).collect()
    }

    fn base(&self) -> &str {
        &self.model.settings.extractor.path
    }

    fn initial_values(&self, layout: &TrainableLayout) -> Result<Vec<f32>, TaskError> {
        Ok(layout.initial_values(self.spec.run.seed))
    }

    fn export(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Result<Vec<Artifact>, TaskError> {
        let unwritten = |path: &Path, error| TaskError::io(format!("write {}: {error}", path.display()));
        let whole = self.model.plan.as_ref().map(|plan| merged(plan, peft_keys, layout, values));
        let path = dir.join(WEIGHTS.path);
        let values_of = whole.as_deref().unwrap_or(values);
        replace(&path, |path| write_tensors(path, layout, values_of, |param| param.group == NETWORK))
            .map_err(|error| unwritten(&path, error))?;
        let path = dir.join(DESCRIPTION.path);
        let text = format!("{:#}\n", self.description());
        replace(&path, |path| std::fs::write(path, &text)).map_err(|error| unwritten(&path, error))?;
        let mut written = vec![WEIGHTS, DESCRIPTION];
        if let Some(plan) = &self.model.plan {
            let origin = AdapterOrigin {
                base_model: WEIGHTS.path,
                task_type: None,
                readme: README,
                tied: None,
                trained_above: None,
            };
            write_adapter(&dir.join("adapter"), plan, layout, values, &origin)
                .map_err(|error: LoraError| TaskError::io(error))?;
            written.extend(ADAPTER);
        }
        Ok(written)
    }

    fn extractor(&self) -> Option<&dyn Extractor<B>> {
        (self.spec.cache.mode != CacheMode::Off).then_some(self as &dyn Extractor<B>)
    }

    fn most_streamed(&self) -> u64 {
        self.model.extractor.most_streamed()
    }
}

impl<B: Tape<Base = B>> TrajectoryObjective<B> {
    fn shape_of(&self) -> &TrajectoryShape {
        &self.model.extractor.shape
    }

    /// What a program needs to know to use the weights.
    fn description(&self) -> serde_json::Value {
        let (settings, shape) = (&self.model.settings, self.shape_of());
        json!({
            "network": settings.network,
            "extractor": settings.extractor,
            "image_size": settings.data.image_size,
            "trajectory": {"positions": shape.positions, "layers": shape.layers, "dim": shape.dim},
        })
    }
}

impl<B: Tape<Base = B>> Extractor<B> for TrajectoryObjective<B> {
    fn tap(&self) -> String {
        self.shape_of().tap()
    }

    fn describe(&self) -> Vec<String> {
        let what = if self.model.plan.is_some() { "the network's adapters" } else { "the network" };
        vec![
            format!("features: {}", self.tap()),
            "skipped for cached images: the whole extractor".into(),
            format!("all steps train {what}, as without a cache"),
        ]
    }

    fn shape(&self) -> FeatureShape {
        let shape = self.shape_of();
        let tokens = shape.positions * shape.layers.len();
        FeatureShape::new(shape.dim, move |_, _| tokens)
    }

    fn resting(&self) -> Group {
        // Of nothing: what is below the tap never trains.
        Group("extractor")
    }

    fn row_values(&self, batch: &dyn Batch) -> Vec<usize> {
        let shape = self.shape_of();
        vec![shape.positions * shape.width(); batch.len()]
    }

    fn compute(&self, _trainables: &Trainables<B>, batch: &dyn Batch) -> Result<CachedFeatures, TaskError> {
        Ok(self.model.features(batch.content::<ImageBatch>())?)
    }

    fn frozen(&self) -> Result<Box<dyn FrozenWeights>, TaskError> {
        let weights = self.model.extractor.weights(&self.model.settings, &self.device);
        Ok(Box::new(weights.map_err(TaskError::bad_input)?))
    }
}

impl From<TrajectoryError> for TaskError {
    fn from(error: TrajectoryError) -> Self {
        let fault = match &error {
            TrajectoryError::Extractor { source: PassError::Weights(_), .. } => Fault::Io,
            TrajectoryError::Extractor { .. } | TrajectoryError::Features { .. } => Fault::BadInput,
            TrajectoryError::NonFiniteLoss { .. } => Fault::Numeric,
        };
        Self::new(fault, error)
    }
}
