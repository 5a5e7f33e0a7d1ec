//! What a rank holds beside its passes, for a model whose samples are texts: weights, samples read ahead, the
//! logits of a chunk; and what of it settings would save.

use coxswain_models::{
    pretrained::{
        blocks::InMemory,
        checkpoint::CheckpointDir,
        error::ModelError,
        frozen::{FrozenBytes, FrozenTensor},
        settings::Model,
    },
    vision_language::streamed_during,
};
use coxswain_nn::{
    dtypes::{ActivationsDtype, FrozenDtype},
    next_token::chunk_rows,
    params::{Group, TrainableLayout},
};
use coxswain_proto::{
    config::TaskSettings,
    human,
    memory::Category,
    run_spec::{Offload, Recompute, RunSpec},
};
use coxswain_task::{
    dry_run::PassCost,
    memory::{Ask, GPU, Place, Prediction, Subject, Use},
};
use serde_json::{Value, json};

use crate::{
    savings::{Savings, of_settings},
    vla_flow::memory::{FrozenStorage, of_process},
};

/// Head and loss, as their time is shown.
pub const HEAD_STAGE: &str = "head";

/// Weights of a run, by what becomes of them.
#[derive(Clone, Debug)]
pub struct TokenWeights {
    frozen: FrozenStorage,
    /// Elements that are frozen.
    held: u64,
    lora: u64,
    base: u64,
    /// What trains.
    pub layout: TrainableLayout,
}

impl TokenWeights {
    /// From all `tensors` that training loads of the checkpoint in `dir`, whose names follow `rules`, and
    /// what of them trains.
    pub fn from_tensors(
        dir: CheckpointDir<'_>,
        mut tensors: Vec<FrozenTensor>,
        layout: &TrainableLayout,
    ) -> Result<Self, ModelError> {
        tensors.retain(|tensor| layout.find(&tensor.name).is_none());
        let held = tensors.iter().map(|tensor| tensor.elements as u64).sum();
        let trained = |group: Group| -> u64 {
            let params = layout.params().iter().filter(|param| param.group == group);
            params.map(|param| param.len() as u64).sum()
        };
        let [lora, base] = [Group::LORA, Group::BASE].map(trained);
        let (frozen, layout) = (FrozenStorage::from_headers(dir.path, dir.rules, &tensors)?, layout.clone());
        Ok(Self { frozen, held, lora, base, layout })
    }

    /// Elements that train.
    pub fn trained(&self) -> u64 {
        self.lora + self.base
    }
}

/// A run as its memory is predicted.
pub struct TokenRun<'a> {
    /// Keys.
    pub spec: &'a RunSpec,
    /// The keys that say something of the model.
    pub model: &'a Model,
    /// Weights.
    pub weights: &'a TokenWeights,
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Tokens that a sample predicts, at most.
    pub predicted: usize,
    /// Bytes of a sample as the data threads hand it over.
    pub sample_bytes: u64,
    /// Bytes of the tokenizer's file.
    pub tokenizer_bytes: u64,
}

impl TokenRun<'_> {
    /// One rank, with this pass.
    pub fn predict(&self, pass: &PassCost, ask: Ask) -> Prediction {
        let held = self.weights.frozen.bytes(ask.place, self.model.weights_dtype);
        let in_memory = InMemory::from_spec(self.spec, ask.cut());
        let fetched = in_memory.fetches().then_some(held);
        let beside = |stage: &str| {
            let blocks = fetched.map_or(0, |frozen| streamed_during(stage, frozen));
            blocks + if stage == HEAD_STAGE { self.further_logits(ask) } else { 0 }
        };
        let mut prediction = Prediction::of_engine(self.spec, &self.weights.layout, ask);
        prediction = prediction.with_pass(pass, beside);
        prediction.set(Category::FrozenWeights, held.in_memory(in_memory) - self.table_elsewhere(ask));
        // The step holds blocks that are fetched when they run; two of them are booked as weights.
        let activations = prediction.forward.max(prediction.backward);
        let booked = fetched.map_or(0, FrozenBytes::two_blocks);
        prediction.set(Category::Activations, activations.saturating_sub(booked));
        let batch = ask.micro_batch.min(self.spec.train.global_batch as u64) * self.sample_bytes;
        // On a GPU what a micro-batch brings is counted with the activations.
        if let Place::Host { threads } = ask.place {
            let ahead = self.spec.data.prefetch.max(1) as u64 + 1;
            prediction.set(Category::Input, ahead * batch);
            let process = of_process(self.tokenizer_bytes, threads, pass.scratch);
            prediction.set(Category::Framework, process);
        }
        prediction
    }

    /// One rank while the model is used as `using` says, with this pass.
    pub fn predict_use(&self, using: Use, pass: &PassCost, ask: Ask) -> Prediction {
        if using == Use::Evaluation {
            // Samples of an evaluation are not bounded by those of a step.
            let mut prediction = self.predict(pass, ask);
            if ask.place != Place::Gpu {
                prediction.set(Category::Input, ask.micro_batch * self.sample_bytes);
            }
            return prediction;
        }
        let mut prediction = Prediction::default().with_pass(pass, |_| 0);
        let held = self.weights.frozen.bytes(ask.place, self.model.weights_dtype);
        let frozen = held.in_memory(InMemory::All) - self.table_elsewhere(ask);
        prediction.set(Category::FrozenWeights, frozen);
        prediction.set(Category::Trainables, 4 * self.weights.trained());
        prediction.set(Category::Activations, prediction.forward);
        let process = match ask.place {
            Place::Gpu => GPU,
            Place::Host { threads } => {
                prediction.set(Category::Input, ask.micro_batch * self.sample_bytes);
                of_process(self.tokenizer_bytes, threads, pass.scratch)
            }
        };
        prediction.set(Category::Framework, process);
        prediction
    }

    /// In host memory beside a GPU.
    pub fn beside_gpu(&self, ask: Ask) -> u64 {
        let host = Place::Host { threads: 1 };
        let table = self.weights.frozen.bytes(host, self.model.weights_dtype).table;
        Prediction::of_engine_beside_gpu(self.spec, &self.weights.layout, ask)
            + if self.table_elsewhere(ask) > 0 { table } else { 0 }
    }

    /// Bytes of the table of token embeddings that are beside the memory in question.
    fn table_elsewhere(&self, ask: Ask) -> u64 {
        let offloaded = ask.place == Place::Gpu && self.spec.memory.offload == Offload::Embedding;
        let held = self.weights.frozen.bytes(ask.place, self.model.weights_dtype);
        if offloaded { held.table } else { 0 }
    }

    /// Logits of a chunk on a GPU beyond those that the pass has counted, which is the host's.
    fn further_logits(&self, ask: Ask) -> u64 {
        let rows = ask.micro_batch as usize * self.predicted;
        let [host, device] = [true, false].map(|on_host| chunk_rows(self.vocab, on_host).min(rows));
        if ask.place == Place::Gpu { 4 * (self.vocab * (device - host)) as u64 } else { 0 }
    }

    /// What every run on tokens may save. `model` finds the model's keys among the task's.
    pub fn savings<'s, S: TaskSettings + Clone>(
        &self,
        subject: &'s dyn Subject,
        ask: Ask,
        settings: &S,
        model: fn(&mut S) -> &mut Model,
    ) -> Savings<'s> {
        let mut savings = Savings::new(subject, ask);
        let bfloat16 = of_settings(settings, |keys| model(keys).weights_dtype = FrozenDtype::Bfloat16);
        let setting = "model.weights_dtype=bfloat16".into();
        savings.add("frozen weights in bf16", setting, "rounds the frozen weights", bfloat16);
        savings.add_recompute("recomputes blocks in the backward pass");
        if self.spec.train.recompute != Recompute::None {
            let bfloat16 =
                of_settings(settings, |keys| model(keys).activations_dtype = ActivationsDtype::Bfloat16);
            let setting = "model.activations_dtype=bfloat16".into();
            let remark = "rounds block outputs and saved activations";
            savings.add("activations kept in bf16", setting, remark, bfloat16);
        }
        savings.add_micro_batch();
        savings
    }

    /// What is frozen and what trains, for people.
    pub fn describe(&self) -> String {
        let (frozen, trained) = (self.weights.held, self.weights.trained());
        let share = 100.0 * trained as f64 / (frozen + trained).max(1) as f64;
        format!(
            "{} parameters frozen in {}, {} trained in float32 ({share:.2} %)",
            human::grouped(frozen),
            self.model.weights_dtype.name(),
            human::grouped(trained)
        )
    }

    /// Numbers of frozen and trained parameters for programs, as JSON.
    pub fn parameters(&self) -> Value {
        let TokenWeights { held, lora, base, .. } = self.weights;
        json!({"pretrained": held + base, "trainable": lora + base, "lora": lora, "base": base})
    }

    /// How precise activations are, where it is not the default.
    pub fn precision(&self) -> Option<&'static str> {
        match (self.model.activations_dtype, self.spec.train.recompute) {
            (ActivationsDtype::Float32, _) => None,
            (ActivationsDtype::Bfloat16, Recompute::None) => Some("activations rounded to bfloat16"),
            (ActivationsDtype::Bfloat16, _) => Some("activations kept in bfloat16"),
        }
    }
}

/// Keys that would take less memory, for somebody whose run did not fit.
pub fn frugal(model: &Model) -> Vec<String> {
    let mut settings = Vec::new();
    if model.activations_dtype == ActivationsDtype::Float32 {
        settings.push("model.activations_dtype: bfloat16 (with recompute)".into());
    }
    if model.weights_dtype == FrozenDtype::Float32 {
        settings.push("model.weights_dtype: bfloat16".into());
    }
    settings
}
