//! The model as the engine trains it.

use std::path::Path;

use coxswain_models::qwen2_5_vl::{
    adapters::readme,
    embed::tied_to_head,
    merge::{Trained, write_merged},
    modules::{FrozenPart, frozen_parts, frozen_tensors, head_tensor},
    settings::Model,
};
use coxswain_nn::{
    dtypes::WeightsDtype,
    files::{replace, write_tensors},
    kernels::Tape,
    lora::{AdapterOrigin, LoraError, write_adapter},
    params::{GradientSums, Group, ParamSpec, TrainableLayout, Trainables},
};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{
    Artifact, Batch, Evaluation, Fault, MicroLoss, Module, Objective, Samples, StageClock, TaskError,
};

use super::{
    config::SftSettings,
    model::{Answers, ChatModel, ChatStepError, tuned},
};

/// What held-out chats are measured by: nats for each learned token, `e` to the power of that, and how many
/// of these tokens are the likeliest at their place.
const MEASURES: [&str; 3] = ["loss", PERPLEXITY, "token_accuracy"];
const PERPLEXITY: &str = "perplexity";

const BASE: Artifact =
    Artifact { path: "base.safetensors", what: "modules of the model that trained in full" };
const ADAPTER: [Artifact; 2] = [
    Artifact { path: "adapter/adapter_config.json", what: "PEFT configuration of the adapter" },
    Artifact { path: "adapter/adapter_model.safetensors", what: "LoRA weights under PEFT's names" },
];

/// A model, and the run that it is trained by.
pub(super) struct SftObjective<B: Tape<Base = B>> {
    pub(super) model: ChatModel<B>,
    pub(super) spec: RunSpec,
    pub(super) settings: SftSettings,
}

impl<B: Tape<Base = B>> Objective<B> for SftObjective<B> {
    fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError> {
        Ok(self.model.forward_backward(trainables, batch.content(), grads, clock)?)
    }

    fn loss(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<MicroLoss, TaskError> {
        let Answers { loss_sum, tokens, .. } = self.model.answers(trainables, batch.content())?;
        Ok(MicroLoss { loss_sum, valid: tokens })
    }

    fn measures(&self) -> &'static [&'static str] {
        &MEASURES
    }

    fn measure(&self, name: &str, mean: f64) -> f64 {
        if name == PERPLEXITY { mean.exp() } else { mean }
    }

    fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        _samples: &dyn Samples,
    ) -> Result<Evaluation, TaskError> {
        let Answers { loss_sum, right, tokens } = self.model.answers(trainables, batch.content())?;
        Ok(Evaluation { count: tokens, sums: vec![loss_sum, loss_sum, right], ..Evaluation::default() })
    }

    fn modules(&self, layout: &TrainableLayout) -> Vec<Module> {
        let dtype = self.settings.model.weights_dtype;
        let name = match dtype {
            WeightsDtype::Float32 => "float32",
            WeightsDtype::Bfloat16 => "bfloat16",
        };
        let config = self.model.config();
        let mut tensors: Vec<_> = frozen_tensors(config).into_iter().chain(head_tensor(config)).collect();
        tensors.retain(|tensor| !self.model.full().trains(&tensor.name));
        let frozen = frozen_parts(&tensors, dtype, self.model.streamed()).into_iter().map(|part| {
            let FrozenPart { name: module, tensors, elements, bytes } = part;
            Module { module: module.into(), tensors, parameters: elements, trains: false, dtype: name, bytes }
        });
        let parts = [Group::LORA, Group::BASE].into_iter().flat_map(|group| {
            [("vision", ".visual."), ("language", ".language_model."), ("head", "lm_head.")]
                .map(|part| (group, part))
        });
        let trained = parts.map(|(group, (part, path))| {
            let of_part = |param: &&ParamSpec| param.group == group && param.name.contains(path);
            let params: Vec<_> = layout.params().iter().filter(of_part).collect();
            let parameters = params.iter().map(|param| param.len()).sum();
            let module = format!("{part}.{group}");
            let bytes = 4 * parameters as u64;
            Module { module, tensors: params.len(), parameters, trains: true, dtype: "float32", bytes }
        });
        frozen.chain(trained.filter(|module| module.tensors > 0)).collect()
    }

    fn base(&self) -> &str {
        &self.settings.model.path
    }

    fn initial_values(&self, layout: &TrainableLayout) -> Result<Vec<f32>, TaskError> {
        let tuned = tuned(&self.settings).map_err(TaskError::bad_input)?;
        let Model { path, weights_dtype, .. } = &self.settings.model;
        tuned
            .initial_values::<B>(self.spec.run.seed, layout, Path::new(path), *weights_dtype)
            .map_err(TaskError::bad_input)
    }

    fn export(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Result<Vec<Artifact>, TaskError> {
        let base_model = &self.settings.model.path;
        let mut written = Vec::new();
        if !self.model.full().is_empty() {
            let path = dir.join(BASE.path);
            replace(&path, |path| write_tensors(path, layout, values, |param| param.group == Group::BASE))
                .map_err(|error| TaskError::io(format!("write {}: {error}", path.display())))?;
            written.push(BASE);
        }
        if let Some(plan) = self.model.lora() {
            let readme = readme(base_model, "Fine-tuned by Coxswain on chats.");
            let tied = tied_to_head(self.model.config());
            let origin = AdapterOrigin { base_model, task_type: None, readme: &readme, tied };
            write_adapter(&dir.join("adapter"), plan, layout, values, &origin)
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
        let trained = Trained { plan: self.model.lora(), layout, values };
        let merged = write_merged(Path::new(&self.settings.model.path), dir, trained);
        Some(merged.map_err(TaskError::io))
    }

    fn most_streamed(&self) -> u64 {
        self.model.most_streamed()
    }
}

impl From<ChatStepError> for TaskError {
    fn from(error: ChatStepError) -> Self {
        let fault = match error {
            ChatStepError::Weights { .. } => Fault::Io,
            ChatStepError::NonFiniteLoss { .. } => Fault::Numeric,
            ChatStepError::Tokens { .. } => Fault::BadInput,
        };
        Self::new(fault, error)
    }
}
