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

use coxswain_models::{
    Shelf,
    pretrained::{
        adapters::{Adapters, HeadAdapter, TunedModules},
        blocks::{BlockWeights, TablePlace},
        checkpoint::CheckpointDir,
        directory,
        error::ModelError,
        prompts::{DropoutKeys, Prompts},
        settings::Model,
    },
    vision_language::{LoadOptions, ModelOutline, PassError, Prefill, Tap, VisionLanguage, VlPass},
};
use coxswain_nn::{
    files::StoredTensor,
    kernels::{DropoutRows, Tape, Weight, sizes::Sizes},
    lora::{LoraLinear, LoraPlan, TrainedModules},
    next_token::{Head, NextTokens, TokenTargets, next_tokens},
    params::{GradientSums, ParamScope, TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::run_spec::{Recompute, RunSpec};
use coxswain_task::{MicroLoss, Pass, StageClock, TaskError};

use super::{config::SftSettings, data::ChatBatch};
use crate::{
    pretrained,
    tokens::{memory::HEAD_STAGE, sums::TokenSums},
};

/// The model with what trains of it.
pub struct ChatModel<B: Tape<Base = B>> {
    model: Box<dyn VisionLanguage<B>>,
    lora: Option<LoraPlan>,
    full: TrainedModules,
    retention: Retention,
    seed: u64,
}

impl<B: Tape<Base = B>> ChatModel<B> {
    /// Reads the model directory. Returns the model with the layout of everything that trains and the values
    /// it starts from; both are the same on every rank.
    pub fn load(
        spec: &RunSpec,
        settings: &SftSettings,
        models: Shelf<B>,
        device: &B::Device,
    ) -> Result<(Self, TrainableLayout, Vec<f32>), TaskError> {
        let dir = &pretrained::directory::<B>(&settings.model.path).map_err(TaskError::bad_input)?;
        let family = models.vision_language.of(dir).map_err(TaskError::bad_input)?;
        let outline = family.outline(dir).map_err(TaskError::bad_input)?;
        let tuned = tuned(settings, &outline).map_err(TaskError::bad_input)?;
        let mut layout = TrainableLayout::default();
        let (blocks, table) = (BlockWeights::from_spec(spec), TablePlace::from_spec(spec));
        let options = LoadOptions { blocks, table, head: true, ..settings.model.weights_dtype.into() };
        let model = family.load(dir, options, tuned.trains(), &mut layout, device);
        let model = model.map_err(TaskError::bad_input)?;
        let checkpoint = CheckpointDir { path: dir, rules: outline.rules };
        let values =
            tuned.initial_values::<B>(spec.run.seed, &layout, checkpoint, settings.model.weights_dtype);
        let values = values.map_err(TaskError::bad_input)?;
        let retention =
            Retention { recompute: spec.train.recompute, activations: settings.model.activations_dtype };
        let seed = spec.run.seed;
        let TunedModules { adapters, full } = tuned;
        let lora = adapters.map(|Adapters { plan, .. }| plan);
        let model = Self { model, lora, full, retention, seed };
        Ok((model, layout, values))
    }

    /// Adapters, if it has any.
    pub fn lora(&self) -> Option<&LoraPlan> {
        self.lora.as_ref()
    }

    /// What of it trains in full.
    pub fn full(&self) -> &TrainedModules {
        &self.full
    }

    /// The pretrained model.
    pub fn pretrained(&self) -> &dyn VisionLanguage<B> {
        &*self.model
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
        let (retention, dropout) = (self.retention, self.dropout(batch));
        let pass = VlPass { prompts: batch.prompts(), kept: None, trainables, retention, dropout };
        let vl = self.model.run(pass).map_err(|broken| failed(broken.into()))?;
        let head = self.head(trainables, vl.token_rows(), &targets);
        let mut lap = |stage| clock.lap(stage);
        let (mut read, trace) = vl.forward(&[Tap::Final], &mut lap).map_err(failed)?;
        let hidden_nd = read.pop().expect("a run gives a tensor for each tap that it is asked for");
        let NextTokens { rows, dhidden, dupdate } =
            next_tokens(hidden_nd, &head, &targets, Some(&mut *grads));
        let loss = sums(batch, &targets, &rows)?.loss();
        clock.lap(HEAD_STAGE);

        clock.enter(Pass::Backward);
        if let (Some(gradients), Some(adapter)) = (dupdate, self.model.head().and_then(LoraLinear::adapter)) {
            let params = adapter.matrices().map(|id| trainables.layout().get(id));
            grads.add(params.into_iter().zip(gradients).collect());
        }
        if let Some(dhidden_nd) = dhidden {
            let mut lap = |stage| clock.lap(stage);
            trace.backward(vec![dhidden_nd], grads, &mut lap).map_err(failed)?;
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
        // Nothing is kept for a backward pass, and every value is the one that a training pass computes.
        let retention = Retention { recompute: Recompute::None, ..self.retention };
        let pass = VlPass { prompts: batch.prompts(), kept: None, trainables, retention, dropout: None };
        let vl = self.model.run(pass).map_err(|broken| failed(broken.into()))?;
        let hidden_nd = vl.until(Tap::Final).map_err(failed)?;
        let head = self.head(trainables, None, &targets);
        sums(batch, &targets, &next_tokens(hidden_nd, &head, &targets, None).rows)
    }

    /// Runs prompts that are to be gone on with: for each the logits of its next token, `[b, vocab]`.
    pub fn decoder<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        prompts: Prompts<'_>,
    ) -> Result<Prefill<'a, B>, PassError> {
        let retention = Retention { recompute: Recompute::None, ..self.retention };
        self.model.decode(trainables, retention, prompts)
    }

    /// What keys the draws of the adapters' dropout; none where they drop nothing.
    fn dropout<'b>(&self, batch: &'b ChatBatch) -> Option<DropoutKeys<'b>> {
        let drops = self.lora.as_ref().is_some_and(|plan| plan.recipe().dropout > 0.0);
        let (samples, images_per_row) = (&batch.indices[..], &batch.images_per_chat[..]);
        drops.then_some(DropoutKeys { seed: self.seed, step: batch.step.0, samples, images_per_row })
    }

    /// The head with its adapter, which drops some of the rows that predict something where there are
    /// `token_rows`.
    fn head(
        &self,
        trainables: &Trainables<B>,
        token_rows: Option<&DropoutRows<B>>,
        targets: &TokenTargets,
    ) -> Head<B> {
        let rows = token_rows.map(|rows| rows.select(targets.rows.iter().map(|&row| row as usize)));
        let params = ParamScope::<B>::frozen(trainables).dropping(rows);
        let head = self.model.head().expect("the model was read with its head");
        let Weight::Dense(w_vd) = head.weight_on_tape(&params) else {
            unreachable!("a head is never quantized")
        };
        let update = head.adapter().map(|adapter| adapter.update(&params));
        let trained = head.trained_weight().map(|id| trainables.layout().get(id).clone());
        Head { w_vd, update, trained }
    }
}

/// What trains of the model, by a run's settings.
pub(super) fn tuned(settings: &SftSettings, model: &ModelOutline) -> Result<TunedModules, ModelError> {
    let (lora, train) = (settings.lora.as_ref(), &settings.model.train);
    TunedModules::resolve(lora, train, &model.modules, HeadAdapter::Taken)
}

/// What a run of this task has left at `path`, under the names that this run's layout has.
pub(super) fn read_left(
    SftSettings { model, lora, .. }: &SftSettings,
    models: Shelf<Sizes>,
    path: &Path,
) -> Result<Vec<StoredTensor>, TaskError> {
    let modules = || Ok(outline_of(model, models).map_err(TaskError::bad_input)?.modules);
    pretrained::read_left(path, model, lora.as_ref(), &modules)
}

/// The run's model as its configuration has it.
pub(super) fn outline_of(model: &Model, models: Shelf<Sizes>) -> Result<ModelOutline, ModelError> {
    let dir = directory::outline(&model.path)?;
    models.vision_language.of(&dir)?.outline(&dir)
}

fn sums(batch: &ChatBatch, targets: &TokenTargets, rows: &[[f32; 2]]) -> Result<TokenSums, TaskError> {
    TokenSums::from_rows(rows, targets, batch.step, |row| batch.chat_at(row))
}

fn failed(batch: &ChatBatch, broken: PassError) -> TaskError {
    let ChatBatch { step, indices, .. } = batch;
    match broken {
        PassError::Tokens(source) => {
            TaskError::bad_input(format!("step {step}, chats {indices:?}: {source}"))
        }
        PassError::Weights(source) => TaskError::io(format!("step {step}: {source}")),
    }
}
