//! What a rank of a run will hold: from configuration, headers and the file of chats. No weight is read.
//!
//! What a step holds and computes is counted by running it on the backend that knows sizes alone.

use std::sync::Arc;

use coxswain_models::{
    Shelf,
    pretrained::{
        checkpoint::CheckpointDir,
        directory,
        prompts::{Prompts, Rows},
    },
    vision_language::ModelOutline,
};
use coxswain_nn::{
    kernels::sizes::{Account, Sizes},
    params::{TrainableLayout, Trainables},
};
use coxswain_proto::{
    ids::Step,
    run_spec::{Offload, RunSpec, Shard},
};
use coxswain_task::{
    TaskError,
    dry_run::{PassCost, Passes},
    memory::{Ask, Place, Prediction, Subject, Suggestion, Use},
};
use serde_json::{Value, json};

use super::{
    config::SftSettings,
    data::{ChatBatch, ChatOutline},
    model::{ChatModel, outline_of},
};
use crate::{
    holdout,
    tokens::memory::{HEAD_STAGE, TokenRun, TokenWeights},
};

/// Tokens of an answer where nothing else is said: the default of `cox generate --max-new-tokens`.
const ANSWER_TOKENS: usize = 128;

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct ChatSizes {
    spec: RunSpec,
    settings: SftSettings,
    models: Shelf<Sizes>,
    model: Arc<ModelOutline>,
    outline: ChatOutline,
    weights: TokenWeights,
    /// By the keys that change what a pass holds.
    passes: Passes<String>,
}

impl ChatSizes {
    /// Reads configuration and headers of everything the run names, and its chats.
    pub fn from_spec(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, TaskError> {
        let settings = SftSettings::from_spec(spec).map_err(TaskError::bad_input)?;
        let model = outline_of(&settings.model, models).map_err(TaskError::bad_input)?;
        let weights = weights(spec, models, &settings, &model)?;
        let outline = ChatOutline::from_settings(spec, &settings, models).map_err(TaskError::bad_input)?;
        let (spec, model, passes) = (spec.clone(), Arc::new(model), Passes::default());
        let sizes = Self { spec, settings, models, model, outline, weights, passes };
        sizes.pass(1, Place::Host { threads: 1 })?;
        Ok(sizes)
    }

    fn with(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Self, TaskError> {
        let mut sizes = self.clone();
        change(&mut sizes.spec);
        sizes.settings = SftSettings::from_spec(&sizes.spec).map_err(TaskError::bad_input)?;
        sizes.weights = weights(&sizes.spec, sizes.models, &sizes.settings, &sizes.model)?;
        Ok(sizes)
    }

    fn run(&self) -> TokenRun<'_> {
        let pixels = self.outline.patches * self.model.patches.columns();
        TokenRun {
            spec: &self.spec,
            model: &self.settings.model,
            weights: &self.weights,
            vocab: self.model.vocab_size,
            predicted: self.outline.learned,
            sample_bytes: (4 * pixels + 5 * self.outline.tokens) as u64,
            tokenizer_bytes: self.outline.tokenizer_bytes,
        }
    }

    /// A training pass over so many of the longest chats.
    fn pass(&self, micro_batch: u64, place: Place) -> Result<PassCost, TaskError> {
        let on_gpu = place == Place::Gpu;
        let kind = format!("{on_gpu} {:?} {:?}", self.settings, self.spec.train.recompute);
        self.passes.at(&kind, micro_batch, |chats| {
            let account = place.account();
            let (model, layout) = hollow(&self.spec, &self.settings, self.models, &account)?;
            let trainables = Trainables::new(layout, Vec::new(), account.device());
            let batch = self.longest(chats as usize);
            PassCost::of(&account, |grads, clock| {
                model.forward_backward(&trainables, &batch, grads, clock).map(|_| ())
            })
        })
    }

    /// So many of the longest chats measured, or gone on with: the longest as the prompt, an answer as long
    /// as `cox generate` writes by itself.
    fn using(&self, using: Use, chats: u64, place: Place) -> Result<PassCost, TaskError> {
        let kind = format!("{using:?} {} {:?}", place == Place::Gpu, self.settings);
        self.passes.at(&kind, chats, |chats| {
            let account = place.account();
            let (model, layout) = hollow(&self.spec, &self.settings, self.models, &account)?;
            let trainables = Trainables::new(layout, Vec::new(), account.device());
            let batch = self.longest(chats as usize);
            let answer = || -> Result<(), TaskError> {
                let whole = 0..self.outline.tokens as u32;
                let rows = vec![whole; chats as usize];
                let prompts = Prompts { rows: Rows::Padded(&rows), ..batch.prompts() };
                let (mut decoder, mut logits_bv) =
                    model.decoder(&trainables, prompts).map_err(TaskError::bad_input)?;
                let next = vec![batch.input_ids[batch.input_ids.len() - 1]; rows.len()];
                for _ in 1..ANSWER_TOKENS {
                    drop(logits_bv);
                    logits_bv = decoder.follow(&next).map_err(TaskError::io)?;
                }
                Ok(())
            };
            let (done, cost) = match using {
                Use::Answers => PassCost::of_forward(&account, answer),
                Use::Evaluation => {
                    let measure = || model.answers(&trainables, &batch).map(|_| ());
                    let (done, cost) = PassCost::of_forward(&account, measure);
                    (done, cost.named(HEAD_STAGE))
                }
            };
            done.map(|()| cost)
        })
    }

    /// So many chats as long as the longest, with as much to learn as any, at their ends.
    fn longest(&self, chats: usize) -> ChatBatch {
        let ChatOutline { tokens, learned, images, .. } = &self.outline;
        let marks = images.iter().map(|shape| self.model.patches.tokens(*shape) + 2).sum::<usize>();
        let ids = self.model.prompt(images, (*tokens).max(marks + learned));
        let learned: Vec<bool> = (0..ids.len()).map(|at| at + learned >= ids.len()).collect();
        ChatBatch {
            step: Step(1),
            indices: (0..chats as u64).collect(),
            ends: (0..=chats).map(|chat| (chat * ids.len()) as u32).collect(),
            input_ids: ids.repeat(chats),
            learned: learned.repeat(chats),
            // Megabytes a chat, which nothing here reads.
            pixel_values: Vec::new(),
            image_shapes: images.repeat(chats),
            images_per_chat: vec![images.len() as u32; chats],
        }
    }
}

/// The run's model without values, its frozen weights held: what of streamed ones is in memory is counted
/// with the weights.
fn hollow(
    spec: &RunSpec,
    settings: &SftSettings,
    models: Shelf<Sizes>,
    account: &Account,
) -> Result<(ChatModel<Sizes>, TrainableLayout), TaskError> {
    let mut held = spec.clone();
    if held.memory.offload == Offload::Layers {
        held.memory.offload = Offload::None;
    }
    held.memory.shard = Shard::None;
    let (model, layout, _) = ChatModel::load(&held, settings, models, account.device())?;
    Ok((model, layout))
}

fn weights(
    spec: &RunSpec,
    models: Shelf<Sizes>,
    settings: &SftSettings,
    model: &ModelOutline,
) -> Result<TokenWeights, TaskError> {
    let (_, layout) = hollow(spec, settings, models, &Account::open())?;
    let tensors = model.tensors().into_iter().chain(model.head()).collect();
    let dir = directory::outline(&settings.model.path).map_err(TaskError::bad_input)?;
    TokenWeights::from_tensors(CheckpointDir { path: &dir, rules: model.rules }, tensors, &layout)
        .map_err(TaskError::bad_input)
}

impl Subject for ChatSizes {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn layout(&self) -> &TrainableLayout {
        &self.weights.layout
    }

    fn model(&self) -> String {
        format!("{} for chats", self.model.sizes)
    }

    fn predict(&self, ask: Ask) -> Prediction {
        // One chat ran when this was made; more of the same change nothing but sizes.
        self.run().predict(&self.pass(ask.micro_batch, ask.place).unwrap_or_default(), ask)
    }

    fn predict_use(&self, using: Use, ask: Ask) -> Option<Prediction> {
        // Which of the streamed blocks are held meanwhile is told for a training pass alone.
        let streamed = self.spec.memory.offload == Offload::Layers;
        let pass = (!streamed).then(|| self.using(using, ask.micro_batch, ask.place))?.ok()?;
        Some(self.run().predict_use(using, &pass, ask))
    }

    fn beside_gpu(&self, ask: Ask) -> u64 {
        self.run().beside_gpu(ask)
    }

    fn suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        self.run().savings(self, ask, &self.settings, |settings| &mut settings.model).into_suggestions()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let ChatOutline { tokens, learned, estimated, .. } = self.outline;
        let patches = self.outline.patches;
        let estimated = if estimated { " (estimated)" } else { "" };
        let sample =
            format!("{tokens} tokens{estimated}, {learned} learned, {patches} image patches (the longest)");
        vec![("model", self.run().describe()), ("sample", sample)]
    }

    fn precision(&self) -> Option<&'static str> {
        self.run().precision()
    }

    fn epoch_len(&self) -> Option<u64> {
        Some(holdout::trained(self.outline.chats, self.settings.data.holdout_every))
    }

    fn to_json(&self) -> Value {
        let outline = &self.outline;
        json!({
            "parameters": self.run().parameters(),
            "sample": {
                "tokens": outline.tokens,
                "learned": outline.learned,
                "estimated": outline.estimated,
                "patches": outline.patches,
            },
        })
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(self.with(change)?))
    }
}
