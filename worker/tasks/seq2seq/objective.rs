//! The model as the engine trains it.

use std::path::Path;

use coxswain_models::{
    qwen2_5_vl::{modules::FrozenTensor, settings::Model},
    t5::{modules::tensors, writing::likeliest},
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
    Artifact, Batch, Evaluation, Fault, MicroLoss, Module, Objective, PartSum, Samples, StageClock, TaskError,
};

use super::{
    config::Seq2SeqSettings,
    data::{PairBatch, Pairs},
    model::{NonFiniteLoss, PairModel, TargetSums, tuned},
    rouge,
};

/// What held-out pairs are measured by: nats for each token of a target, and how many of these tokens are the
/// likeliest at their place. ROUGE is told beside them: it counts texts, not tokens.
const MEASURES: [&str; 2] = ["loss", "token_accuracy"];

const BASE: Artifact =
    Artifact { path: "base.safetensors", what: "modules of the model that trained in full" };
const ADAPTER: [Artifact; 2] = [
    Artifact { path: "adapter/adapter_config.json", what: "PEFT configuration of the adapter" },
    Artifact { path: "adapter/adapter_model.safetensors", what: "LoRA weights under PEFT's names" },
];
/// What PEFT wraps such a model in.
const TASK_TYPE: &str = "SEQ_2_SEQ_LM";

/// A model, and the run that it is trained by.
pub(super) struct Seq2SeqObjective<B: Tape<Base = B>> {
    pub(super) model: PairModel<B>,
    pub(super) spec: RunSpec,
    pub(super) settings: Seq2SeqSettings,
}

impl<B: Tape<Base = B>> Seq2SeqObjective<B> {
    /// ROUGE of what the model writes for the sources of a batch, a sum for each of [`rouge::NAMES`].
    fn rouge(
        &self,
        trainables: &Trainables<B>,
        batch: &PairBatch,
        pairs: &Pairs,
    ) -> Result<Vec<PartSum>, TaskError> {
        let most = self.settings.data.max_target_tokens;
        let answers = self.model.write(trainables, batch, most, &mut |_, _, logits| likeliest(logits));
        let answers = answers.map_err(|error| TaskError::new(Fault::Numeric, error))?;
        let mut sums = [PartSum::default(); 3];
        for (&index, answer) in batch.indices.iter().zip(&answers) {
            let reference = pairs.texts(index).map_err(TaskError::bad_input)?.target;
            let answer = pairs.tokenizer().text(answer).map_err(TaskError::bad_input)?;
            for (sum, found) in sums.iter_mut().zip(rouge::of(&answer, &reference)) {
                *sum = PartSum { count: sum.count + 1.0, sum: sum.sum + found };
            }
        }
        Ok(sums.into())
    }
}

impl<B: Tape<Base = B>> Objective<B> for Seq2SeqObjective<B> {
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
        let TargetSums { loss_sum, tokens, .. } = self.model.losses(trainables, batch.content())?;
        Ok(MicroLoss { loss_sum, valid: tokens })
    }

    fn measures(&self) -> &'static [&'static str] {
        &MEASURES
    }

    fn parts(&self) -> Vec<String> {
        let names: &[&str] = if self.settings.eval.rouge { &rouge::NAMES } else { &[] };
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        samples: &dyn Samples,
    ) -> Result<Evaluation, TaskError> {
        let batch: &PairBatch = batch.content();
        let TargetSums { loss_sum, right, tokens } = self.model.losses(trainables, batch)?;
        let parts = match (self.settings.eval.rouge, samples.as_any().downcast_ref()) {
            (true, Some(pairs)) => self.rouge(trainables, batch, pairs)?,
            _ => Vec::new(),
        };
        Ok(Evaluation { count: tokens, sums: vec![loss_sum, right], parts })
    }

    fn modules(&self, layout: &TrainableLayout) -> Vec<Module> {
        let dtype = self.settings.model.weights_dtype;
        let name = match dtype {
            WeightsDtype::Float32 => "float32",
            WeightsDtype::Bfloat16 => "bfloat16",
        };
        let mut all = tensors(self.model.config());
        all.retain(|tensor| !self.model.full().trains(&tensor.name));
        let frozen = STACKS.map(|stack| {
            let of: Vec<&FrozenTensor> =
                all.iter().filter(|tensor| stack_of(&tensor.name) == stack).collect();
            let parameters = of.iter().map(|tensor| tensor.elements).sum();
            let bytes = of.iter().map(|tensor| tensor.kept_bytes(dtype)).sum();
            Module { module: stack.into(), tensors: of.len(), parameters, trains: false, dtype: name, bytes }
        });
        let parts =
            [Group::LORA, Group::BASE].into_iter().flat_map(|group| STACKS.map(|stack| (group, stack)));
        let trained = parts.map(|(group, stack)| {
            let of = |param: &&ParamSpec| param.group == group && stack_of(&param.name) == stack;
            let params: Vec<_> = layout.params().iter().filter(of).collect();
            let parameters = params.iter().map(|param| param.len()).sum();
            let (module, bytes) = (format!("{stack}.{group}"), 4 * parameters as u64);
            Module { module, tensors: params.len(), parameters, trains: true, dtype: "float32", bytes }
        });
        frozen.into_iter().chain(trained).filter(|module| module.tensors > 0).collect()
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
            let readme = readme(base_model);
            let origin =
                AdapterOrigin { base_model, task_type: Some(TASK_TYPE), readme: &readme, tied: None };
            write_adapter(&dir.join("adapter"), plan, layout, values, &origin)
                .map_err(|error: LoraError| TaskError::io(error))?;
            written.extend(ADAPTER);
        }
        Ok(written)
    }
}

/// Parts of the model, as tables name them.
const STACKS: [&str; 4] = ["embedding", "encoder", "decoder", "head"];

/// The part that a tensor is of, by its name or PEFT's.
fn stack_of(tensor: &str) -> &'static str {
    let tensor = tensor.trim_start_matches("base_model.model.");
    match tensor.split('.').next() {
        Some("lm_head") => "head",
        Some("encoder") if !tensor.contains("embed_tokens") => "encoder",
        Some("decoder") if !tensor.contains("embed_tokens") => "decoder",
        _ => "embedding",
    }
}

fn readme(base_model: &str) -> String {
    format!(
        "---\n\
         base_model: {base_model}\n\
         library_name: peft\n\
         tags:\n\
         - base_model:adapter:{base_model}\n\
         - lora\n\
         - transformers\n\
         ---\n\n\
         # LoRA adapter of {base_model}\n\n\
         Fine-tuned by Coxswain on pairs of texts.\n\n\
         ```python\n\
         from peft import PeftModel\n\
         from transformers import AutoModelForSeq2SeqLM\n\n\
         base = AutoModelForSeq2SeqLM.from_pretrained(\"{base_model}\")\n\
         model = PeftModel.from_pretrained(base, \"path/to/this/directory\")\n\
         ```\n"
    )
}

impl From<NonFiniteLoss> for TaskError {
    fn from(error: NonFiniteLoss) -> Self {
        Self::new(Fault::Numeric, error)
    }
}
