//! The model of a run: read, adapted, run forward and backward.
//!
//! ```text
//! ids, pixels ─▶ vision tower, decoder layers, final norm ─▶ [n, d]
//!                   rows before learned tokens ─▶ [m, d] ─▶ head, cross entropy, back, in chunks ─▶ [m, d]
//!                                                           scattered to [n, d], then down the tower
//! ```
//!
//! The head runs for the rows alone that predict something; a prompt's logits are never computed.

use std::path::Path;

use burn::tensor::Tensor;
use coxswain_models::{
    directory,
    qwen2_5_vl::{
        LoadOptions, QwenVl,
        adapters::{Adapters, HeadAdapter, Tuned},
        blocks::{BlockWeights, TablePlace},
        config::QwenConfig,
        decode::Decoder,
        dropout::{ModelRows, RowsOf},
        error::ModelError,
        modules::modules,
        pass::{Broken, Entry, Until, VlContext, VlRun},
        prompts::Prompts,
        settings::Model,
    },
};
use coxswain_nn::{
    files::StoredTensor,
    kernels::Tape,
    lora::{LoraPlan, Module, TrainedModules},
    next_token::{Head, NextTokens, TokenTargets, next_tokens},
    params::{GradientSums, ParamScope, TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::run_spec::{Recompute, RunSpec};
use coxswain_task::{MicroLoss, Pass, StageClock, TaskError};

use super::{config::SftSettings, data::ChatBatch};
use crate::{
    pretrained::{self, Tuning},
    tokens::{memory::HEAD_STAGE, sums::TokenSums},
};

/// The model with what trains of it.
pub struct ChatModel<B: Tape<Base = B>> {
    model: QwenVl<B>,
    lora: Option<LoraPlan>,
    full: TrainedModules,
    retention: Retention,
    seed: u64,
    device: B::Device,
}

impl<B: Tape<Base = B>> ChatModel<B> {
    /// Reads the model directory. Returns the model with the layout of everything that trains and the values
    /// it starts from; both are the same on every rank.
    pub fn load(spec: &RunSpec, device: &B::Device) -> Result<(Self, TrainableLayout, Vec<f32>), TaskError> {
        let settings = SftSettings::of(spec).map_err(TaskError::bad_input)?;
        let tuned = tuned(&settings).map_err(TaskError::bad_input)?;
        let mut layout = TrainableLayout::default();
        let (blocks, table) = (BlockWeights::of(spec), TablePlace::of(spec));
        let options = LoadOptions { blocks, table, head: true, ..settings.model.weights_dtype.into() };
        let dir = &pretrained::directory::<B>(&settings.model.path).map_err(TaskError::bad_input)?;
        let model = QwenVl::load(dir, options, tuned.trains(), &mut layout, device);
        let model = model.map_err(TaskError::bad_input)?;
        let values = tuned.initial_values::<B>(spec.run.seed, &layout, dir, settings.model.weights_dtype);
        let values = values.map_err(TaskError::bad_input)?;
        let retention =
            Retention { recompute: spec.train.recompute, activations: settings.model.activations_dtype };
        let device = device.clone();
        let seed = spec.run.seed;
        let Tuned { adapters, full } = tuned;
        let lora = adapters.map(|Adapters { plan, .. }| plan);
        let model = Self { model, lora, full, retention, seed, device };
        Ok((model, layout, values))
    }

    /// Its adapters, if it has any.
    pub fn lora(&self) -> Option<&LoraPlan> {
        self.lora.as_ref()
    }

    /// What of it trains in full.
    pub fn full(&self) -> &TrainedModules {
        &self.full
    }

    /// Sizes of the model.
    pub fn config(&self) -> &QwenConfig {
        &self.model.config
    }

    /// The pretrained model.
    pub fn pretrained(&self) -> &QwenVl<B> {
        &self.model
    }

    /// Most bytes of streamed frozen weights that were in memory at once so far.
    pub fn most_streamed(&self) -> u64 {
        self.model.most_streamed()
    }

    /// Runs one micro-batch and adds the gradient of its loss *sum* to `grads`.
    pub fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &ChatBatch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError> {
        let targets = batch.targets();
        if targets.rows.is_empty() {
            return Ok(MicroLoss::default());
        }
        clock.enter(Pass::Forward);
        let failed = |broken| failed(batch, broken);
        let context = VlContext::new(&self.model, batch.prompts(), &Entry::Pixels);
        let context = context.map_err(|broken| failed(broken.into()))?;
        let vl = VlRun {
            model: &self.model,
            context: &context,
            trainables,
            retention: self.retention,
            dropout: self.dropout(batch),
        };
        let head = self.head(trainables, vl.dropout.as_ref(), &targets);
        let mut lap = |stage| clock.lap(stage);
        let (hidden_nd, trace) = vl.forward(batch.prompts(), Entry::Pixels, &mut lap).map_err(failed)?;
        let NextTokens { rows, dhidden, dupdate } =
            next_tokens(hidden_nd, &head, &targets, Some(&mut *grads));
        let loss = sums(batch, &targets, &rows)?.loss();
        clock.lap(HEAD_STAGE);

        clock.enter(Pass::Backward);
        if let (Some(gradients), Some(adapter)) = (dupdate, self.model.head_adapter()) {
            let params = adapter.matrices().map(|id| trainables.layout().get(id));
            grads.add(params.into_iter().zip(gradients).collect());
        }
        if let Some(dhidden_nd) = dhidden {
            let mut lap = |stage| clock.lap(stage);
            vl.backward(batch.prompts(), trace, dhidden_nd, grads, &mut lap).map_err(failed)?;
        }
        Ok(loss)
    }

    /// Losses of a batch without a trace.
    pub fn answers(&self, trainables: &Trainables<B>, batch: &ChatBatch) -> Result<TokenSums, TaskError> {
        let targets = batch.targets();
        if targets.rows.is_empty() {
            return Ok(TokenSums::default());
        }
        let failed = |broken| failed(batch, broken);
        let context = VlContext::new(&self.model, batch.prompts(), &Entry::Pixels);
        let context = context.map_err(|broken| failed(broken.into()))?;
        // Nothing is kept for a backward pass, and every value is the one that a training pass computes.
        let retention = Retention { recompute: Recompute::None, ..self.retention };
        let vl = VlRun { model: &self.model, context: &context, trainables, retention, dropout: None };
        let hidden_nd = vl.features(batch.prompts(), Entry::Pixels, Until::Hidden).map_err(failed)?;
        let head = self.head(trainables, None, &targets);
        sums(batch, &targets, &next_tokens(hidden_nd, &head, &targets, None).rows)
    }

    /// Runs prompts that are to be gone on with: for each the logits of its next token, `[b, vocab]`.
    pub fn decoder<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        prompts: Prompts<'_>,
    ) -> Result<(Decoder<'a, B>, Tensor<B, 2>), Broken> {
        let retention = Retention { recompute: Recompute::None, ..self.retention };
        Decoder::begin(&self.model, trainables, retention, prompts)
    }

    /// The rows that the adapters of a training pass drop from; none where they drop nothing.
    fn dropout(&self, batch: &ChatBatch) -> Option<ModelRows<B>> {
        let (samples, images_per_row) = (&batch.indices, &batch.images_per_chat);
        let of = RowsOf { seed: self.seed, step: batch.step.0, samples, images_per_row };
        ModelRows::of_training(self.lora.as_ref(), &self.model.config, of, batch.prompts(), &self.device)
    }

    /// The head with its adapter, which drops some of the rows that predict something if `dropout` says so.
    fn head(
        &self,
        trainables: &Trainables<B>,
        dropout: Option<&ModelRows<B>>,
        targets: &TokenTargets,
    ) -> Head<B> {
        let rows = dropout.map(|rows| rows.tokens.select(targets.rows.iter().map(|&row| row as usize)));
        let params = ParamScope::<B>::frozen(trainables).dropping(rows);
        let w_vd = self.model.head_weight(&params).expect("the model was read with its head");
        let update = self.model.head_adapter().map(|adapter| adapter.update(&params));
        let trained = self.model.trained_head().map(|id| trainables.layout().get(id).clone());
        Head { w_vd, update, trained }
    }
}

/// What trains of the model, by a run's settings.
pub(super) fn tuned(settings: &SftSettings) -> Result<Tuned, ModelError> {
    let modules = modules_of(&settings.model)?;
    Tuned::resolve(settings.lora.as_ref(), &settings.model.train, &modules, HeadAdapter::Taken)
}

/// What a run of this task has left at `path`, under the names that this run's layout has.
pub(super) fn read_left(spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
    let SftSettings { model, lora, .. } = SftSettings::of(spec).map_err(TaskError::bad_input)?;
    let modules = || modules_of(&model).map_err(TaskError::bad_input);
    let here = Tuning {
        modules: &modules,
        lora: &|_| Ok(lora.clone()),
        train: &model.train,
        weights: model.weights_dtype,
    };
    pretrained::read(path, &[pretrained::BASE.path], &here)
}

fn modules_of(model: &Model) -> Result<Vec<Module>, ModelError> {
    Ok(modules(&QwenConfig::read(&directory::outline(&model.path)?)?))
}

fn sums(batch: &ChatBatch, targets: &TokenTargets, rows: &[[f32; 2]]) -> Result<TokenSums, TaskError> {
    TokenSums::of(rows, targets, batch.step, |row| batch.chat_at(row))
}

fn failed(batch: &ChatBatch, broken: Broken) -> TaskError {
    let ChatBatch { step, indices, .. } = batch;
    match broken {
        Broken::Tokens(source) => TaskError::bad_input(format!("step {step}, chats {indices:?}: {source}")),
        Broken::Weights(source) => TaskError::io(format!("step {step}: {source}")),
    }
}
