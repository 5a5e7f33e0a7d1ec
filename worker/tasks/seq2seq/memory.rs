//! What a rank of a run will hold: from configuration, headers and the file of pairs. No weight is read.
//!
//! What a step holds and computes is counted by running it on the backend that knows sizes alone.

use std::sync::Arc;

use coxswain_models::{
    Shelf,
    pretrained::{checkpoint::CheckpointDir, directory},
    text_to_text::{SpecialIds, TextModelOutline},
};
use coxswain_nn::{
    kernels::sizes::{Account, Sizes},
    params::{TrainableLayout, Trainables},
};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{
    Fault, TaskError,
    dry_run::{PassCost, Passes},
    memory::{Ask, Prediction, Subject, Suggestion, Use},
};
use serde_json::{Value, json};

use super::{
    config::Seq2SeqSettings,
    data::{PairBatch, PairOutline, PairSample},
    model::{PairModel, outline_of},
};
use crate::{
    savings::of_settings,
    tokens::memory::{HEAD_STAGE, TokenRun, TokenWeights},
};

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct PairSizes {
    spec: RunSpec,
    settings: Seq2SeqSettings,
    models: Shelf<Sizes>,
    model: Arc<TextModelOutline>,
    outline: PairOutline,
    weights: TokenWeights,
    /// By the keys that change what a pass holds.
    passes: Passes<String>,
}

impl PairSizes {
    /// Reads configuration and headers of everything the run names, and its pairs.
    pub fn from_spec(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, TaskError> {
        let settings = Seq2SeqSettings::from_spec(spec).map_err(TaskError::bad_input)?;
        let model = outline_of(&settings.model, models).map_err(TaskError::bad_input)?;
        let weights = weights(spec, models, &settings, &model)?;
        let outline = PairOutline::from_settings(spec, &settings, models).map_err(TaskError::bad_input)?;
        let (spec, model, passes) = (spec.clone(), Arc::new(model), Passes::default());
        let sizes = Self { spec, settings, models, model, outline, weights, passes };
        sizes.pass(1)?;
        Ok(sizes)
    }

    fn with(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Self, TaskError> {
        let mut sizes = self.clone();
        change(&mut sizes.spec);
        sizes.settings = Seq2SeqSettings::from_spec(&sizes.spec).map_err(TaskError::bad_input)?;
        sizes.weights = weights(&sizes.spec, sizes.models, &sizes.settings, &sizes.model)?;
        if sizes.settings.data != self.settings.data {
            let outline = PairOutline::from_settings(&sizes.spec, &sizes.settings, sizes.models);
            sizes.outline = outline.map_err(TaskError::bad_input)?;
        }
        Ok(sizes)
    }

    fn run(&self) -> TokenRun<'_> {
        TokenRun {
            spec: &self.spec,
            model: &self.settings.model,
            weights: &self.weights,
            vocab: self.model.vocab_size,
            predicted: self.outline.target,
            sample_bytes: (5 * self.outline.source + 12 * self.outline.target) as u64,
            tokenizer_bytes: self.outline.tokenizer_bytes,
        }
    }

    /// A training pass over so many of the longest pairs.
    fn pass(&self, micro_batch: u64) -> Result<PassCost, TaskError> {
        let kind = format!("{:?} {:?} {:?}", self.settings, self.spec.train.recompute, self.outline);
        self.passes.at(&kind, micro_batch, |pairs| {
            let account = Account::open();
            let (model, trainables) = self.hollow(&account)?;
            let batch = self.longest(pairs as usize);
            PassCost::of(&account, |grads, clock| {
                model.forward_backward(&trainables, &batch, grads, clock).map(|_| ())
            })
        })
    }

    fn hollow(&self, account: &Account) -> Result<(PairModel<Sizes>, Trainables<Sizes>), TaskError> {
        let loaded = PairModel::load(&self.spec, &self.settings, self.models, account.device());
        loaded.map(|(model, layout, values)| (model, Trainables::new(layout, values, account.device())))
    }

    /// So many of the longest pairs measured, or their sources answered with as many tokens as a target may
    /// have.
    fn using(&self, using: Use, pairs: u64) -> Result<PassCost, TaskError> {
        let kind = format!("{using:?} {:?} {:?}", self.settings, self.outline);
        self.passes.at(&kind, pairs, |pairs| {
            let account = Account::open();
            let (model, trainables) = self.hollow(&account)?;
            let (batch, most) = (self.longest(pairs as usize), self.settings.data.max_target_tokens);
            // No answer ends before it must.
            let word = self.model.special.pad;
            let answers = || {
                let write = || model.write(&trainables, &batch, most, &mut |_, _, _| Some(word));
                let (written, cost) = PassCost::of_forward(&account, write);
                written.map(|_| cost).map_err(|error| TaskError::new(Fault::Numeric, error))
            };
            if using == Use::Answers {
                return answers();
            }
            let (found, losses) = PassCost::of_forward(&account, || model.losses(&trainables, &batch));
            found?;
            let losses = losses.named(HEAD_STAGE);
            if self.settings.eval.rouge { Ok(losses.followed_by(answers()?)) } else { Ok(losses) }
        })
    }

    /// So many pairs with the longest source and the longest target; of several the last is a token shorter,
    /// because pairs of different lengths need a mask.
    fn longest(&self, pairs: usize) -> PairBatch {
        let SpecialIds { pad, eos, decoder_start } = self.model.special;
        let ids = |len: usize| vec![eos; len];
        let mut samples: Vec<_> = (0..pairs as u64)
            .map(|index| PairSample {
                index,
                source: ids(self.outline.source),
                target: ids(self.outline.target),
            })
            .collect();
        if let [_, .., last] = &mut samples[..] {
            last.source.truncate(self.outline.source.saturating_sub(1).max(1));
        }
        PairBatch::from_samples(Step(1), &samples.iter().collect::<Vec<_>>(), [pad, decoder_start])
    }
}

fn weights(
    spec: &RunSpec,
    models: Shelf<Sizes>,
    settings: &Seq2SeqSettings,
    model: &TextModelOutline,
) -> Result<TokenWeights, TaskError> {
    let (_, layout, _) = PairModel::<Sizes>::load(spec, settings, models, Account::open().device())?;
    let dir = directory::outline(&settings.model.path).map_err(TaskError::bad_input)?;
    TokenWeights::from_tensors(
        CheckpointDir { path: &dir, rules: model.rules },
        model.tensors.clone(),
        &layout,
    )
    .map_err(TaskError::bad_input)
}

impl Subject for PairSizes {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn layout(&self) -> &TrainableLayout {
        &self.weights.layout
    }

    fn model(&self) -> String {
        format!("{} for pairs", self.model.sizes)
    }

    fn predict(&self, ask: Ask) -> Prediction {
        // One pair ran when this was made; more of the same change nothing but sizes.
        self.run().predict(&self.pass(ask.micro_batch).unwrap_or_default(), ask)
    }

    fn predict_use(&self, using: Use, ask: Ask) -> Option<Prediction> {
        let pass = self.using(using, ask.micro_batch).ok()?;
        Some(self.run().predict_use(using, &pass, ask))
    }

    fn beside_gpu(&self, ask: Ask) -> u64 {
        self.run().beside_gpu(ask)
    }

    fn suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        let mut savings = self.run().savings(self, ask, &self.settings, |settings| &mut settings.model);
        let half = (self.outline.source / 2).max(2);
        let shorter = of_settings(&self.settings, |settings| settings.data.max_source_tokens = half);
        let setting = format!("data.max_source_tokens={half}");
        savings.add("half the source tokens", setting, "longer sources are truncated", shorter);
        savings.into_suggestions()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let PairOutline { source, target, estimated, .. } = self.outline;
        let estimated = if estimated { " (estimated)" } else { "" };
        let sample = format!("{source} source tokens, {target} to predict{estimated} (the longest)");
        vec![("model", self.run().describe()), ("sample", sample)]
    }

    fn precision(&self) -> Option<&'static str> {
        self.run().precision()
    }

    fn epoch_len(&self) -> Option<u64> {
        Some(self.outline.pairs)
    }

    fn to_json(&self) -> Value {
        let PairOutline { source, target, estimated, .. } = self.outline;
        json!({
            "parameters": self.run().parameters(),
            "sample": {"source": source, "target": target, "estimated": estimated},
        })
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(self.with(change)?))
    }
}
