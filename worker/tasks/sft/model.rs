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

use burn::tensor::{Int, Tensor, TensorData};
use coxswain_models::qwen2_5_vl::{
    LoadOptions, QwenVl,
    adapters::{Adapters, HeadAdapter, Tuned},
    config::QwenConfig,
    decode::Decoder,
    dropout::{ModelRows, RowsOf},
    error::{ModelError, TokenError, UnreadableWeights},
    modules::modules,
    pass::{Broken, Entry, Until, VlContext, VlRun},
    prompts::Prompts,
};
use coxswain_nn::{
    kernels::Tape,
    lora::{LoraPlan, TrainedModules},
    next_token::{Head, NextTokens, next_tokens},
    params::{GradientSums, ParamScope, TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::{
    config::SettingsError,
    ids::Step,
    run_spec::{Offload, Recompute, RunSpec},
};
use coxswain_task::{MicroLoss, Pass, StageClock};

use super::{
    config::SftSettings,
    data::{ChatBatch, Targets},
};

/// Head and loss, as their time is shown.
pub(super) const HEAD_STAGE: &str = "head";

/// A model that cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint, or adapter settings that do not fit it.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The run's settings are none of this task's.
    #[error(transparent)]
    Task(#[from] SettingsError),
}

/// A micro-batch that cannot be run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ChatStepError {
    /// Its tokens or images do not fit the model.
    #[error("step {step}, chats {chats:?}: {source}")]
    Tokens {
        /// Optimizer step.
        step: Step,
        /// Chats of the micro-batch.
        chats: Vec<u64>,
        /// What does not fit.
        source: TokenError,
    },
    /// Frozen weights that are streamed cannot be read any more.
    #[error("step {step}: {source}")]
    Weights {
        /// Optimizer step.
        step: Step,
        /// Which, and why.
        source: UnreadableWeights,
    },
    /// The loss is infinite or not a number.
    #[error("step {step}: the loss of chats {chats:?} is not finite; lower the learning rate")]
    NonFiniteLoss {
        /// Optimizer step.
        step: Step,
        /// The chats concerned.
        chats: Vec<u64>,
    },
}

/// What answers of a batch have come to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Answers {
    /// Sum of the losses of learned tokens, in nats.
    pub loss_sum: f64,
    /// Learned tokens that are the likeliest at their place.
    pub right: f64,
    /// Learned tokens.
    pub tokens: f64,
}

/// The model with what trains of it.
pub struct ChatModel<B: Tape<Base = B>> {
    model: QwenVl<B>,
    lora: Option<LoraPlan>,
    full: TrainedModules,
    retention: Retention,
    seed: u64,
    streamed: bool,
    device: B::Device,
}

impl<B: Tape<Base = B>> ChatModel<B> {
    /// Reads the model directory. Returns the model with the layout of everything that trains and the values
    /// it starts from; both are the same on every rank.
    pub fn load(spec: &RunSpec, device: &B::Device) -> Result<(Self, TrainableLayout, Vec<f32>), LoadError> {
        let settings = SftSettings::of(spec)?;
        let tuned = tuned(&settings)?;
        let mut layout = TrainableLayout::default();
        let streamed = spec.memory.offload == Offload::Layers;
        let options = LoadOptions { streamed, head: true, ..settings.model.weights_dtype.into() };
        let dir = Path::new(&settings.model.path);
        let model = QwenVl::load(dir, options, tuned.trains(), &mut layout, device)?;
        let values = tuned.initial_values::<B>(spec.run.seed, &layout, dir, settings.model.weights_dtype)?;
        let retention =
            Retention { recompute: spec.train.recompute, activations: settings.model.activations_dtype };
        let device = device.clone();
        let seed = spec.run.seed;
        let Tuned { adapters, full } = tuned;
        let lora = adapters.map(|Adapters { plan, .. }| plan);
        let model = Self { model, lora, full, retention, seed, streamed, device };
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

    /// Whether blocks are read when they run.
    pub fn streamed(&self) -> bool {
        self.streamed
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
    ) -> Result<MicroLoss, ChatStepError> {
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
        let NextTokens { rows, dhidden_md, dupdate } =
            self.predicted(hidden_nd, &head, &targets, Some(&mut *grads));
        let loss = answers(batch, &targets, &rows)?;
        clock.lap(HEAD_STAGE);

        clock.enter(Pass::Backward);
        if let (Some(gradients), Some(adapter)) = (dupdate, self.model.head_adapter()) {
            let params = adapter.matrices().map(|id| trainables.layout().get(id));
            grads.add(params.into_iter().zip(gradients).collect());
        }
        if let Some(dhidden_md) = dhidden_md {
            let dhidden_nd = self.scattered(dhidden_md, &targets, batch.input_ids.len());
            clock.lap(HEAD_STAGE);
            let mut lap = |stage| clock.lap(stage);
            vl.backward(batch.prompts(), trace, dhidden_nd, grads, &mut lap).map_err(failed)?;
        }
        Ok(MicroLoss { loss_sum: loss.loss_sum, valid: loss.tokens })
    }

    /// Losses of a batch without a trace.
    pub fn answers(&self, trainables: &Trainables<B>, batch: &ChatBatch) -> Result<Answers, ChatStepError> {
        let targets = batch.targets();
        if targets.rows.is_empty() {
            return Ok(Answers::default());
        }
        let failed = |broken| failed(batch, broken);
        let context = VlContext::new(&self.model, batch.prompts(), &Entry::Pixels);
        let context = context.map_err(|broken| failed(broken.into()))?;
        // Nothing is kept for a backward pass, and every value is the one that a training pass computes.
        let retention = Retention { recompute: Recompute::None, ..self.retention };
        let vl = VlRun { model: &self.model, context: &context, trainables, retention, dropout: None };
        let hidden_nd = vl.features(batch.prompts(), Entry::Pixels, Until::Hidden).map_err(failed)?;
        let head = self.head(trainables, None, &targets);
        answers(batch, &targets, &self.predicted(hidden_nd, &head, &targets, None).rows)
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
    fn head(&self, trainables: &Trainables<B>, dropout: Option<&ModelRows<B>>, targets: &Targets) -> Head<B> {
        let rows = dropout.map(|rows| rows.tokens.select(targets.rows.iter().map(|&row| row as usize)));
        let params = ParamScope::<B>::frozen(trainables).dropping(rows);
        let w_vd = self.model.head_weight(&params).expect("the model was read with its head");
        let update = self.model.head_adapter().map(|adapter| adapter.update(&params));
        let trained = self.model.trained_head().map(|id| trainables.layout().get(id).clone());
        Head { w_vd, update, trained }
    }

    /// Head and loss of the rows that predict something; with `grads` their gradients.
    fn predicted(
        &self,
        hidden_nd: Tensor<B, 2>,
        head: &Head<B>,
        targets: &Targets,
        grads: Option<&mut dyn GradientSums<B>>,
    ) -> NextTokens<B> {
        let hidden_md = hidden_nd.select(0, self.indices(&targets.rows));
        next_tokens(hidden_md, head, &targets.ids, grads)
    }

    /// `dhidden_md` at its rows of `n`, zero at the others: every row is taken from one place, so that no sum
    /// depends on an order.
    fn scattered(&self, dhidden_md: Tensor<B, 2>, targets: &Targets, n: usize) -> Tensor<B, 2> {
        let [m, d] = dhidden_md.dims();
        let mut sources = vec![m as u32; n];
        for (row, &at) in targets.rows.iter().enumerate() {
            sources[at as usize] = row as u32;
        }
        let with_zero = Tensor::cat(vec![dhidden_md, Tensor::zeros([1, d], &self.device)], 0);
        with_zero.select(0, self.indices(&sources))
    }

    fn indices(&self, rows: &[u32]) -> Tensor<B, 1, Int> {
        let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let len = rows.len();
        Tensor::from_data(TensorData::new(rows, [len]), &self.device)
    }
}

/// What trains of the model, by a run's settings.
pub(super) fn tuned(settings: &SftSettings) -> Result<Tuned, ModelError> {
    let modules = modules(&QwenConfig::read(Path::new(&settings.model.path))?);
    Tuned::resolve(settings.lora.as_ref(), &settings.model.train, &modules, HeadAdapter::Taken)
}

fn answers(batch: &ChatBatch, targets: &Targets, rows: &[[f32; 2]]) -> Result<Answers, ChatStepError> {
    let mut sums = Answers { tokens: rows.len() as f64, ..Answers::default() };
    for [loss, margin] in rows {
        sums.loss_sum += f64::from(*loss);
        sums.right += f64::from(u8::from(*margin >= 0.0));
    }
    if sums.loss_sum.is_finite() {
        return Ok(sums);
    }
    let broken = targets.rows.iter().zip(rows).filter(|(_, row)| !row[0].is_finite());
    let mut chats: Vec<u64> = broken.map(|(at, _)| batch.chat_at(*at)).collect();
    chats.dedup();
    Err(ChatStepError::NonFiniteLoss { step: batch.step, chats })
}

fn failed(batch: &ChatBatch, broken: Broken) -> ChatStepError {
    match broken {
        Broken::Tokens(source) => {
            ChatStepError::Tokens { step: batch.step, chats: batch.indices.clone(), source }
        }
        Broken::Weights(source) => ChatStepError::Weights { step: batch.step, source },
    }
}
