//! T5 as tasks find it.

use std::path::{Path, PathBuf};

use burn::tensor::Tensor;
use coxswain_data::DataError;
use coxswain_nn::{
    dtypes::FrozenDtype,
    kernels::Tape,
    next_token::NextTokens,
    params::{GradientSums, TrainableLayout, Trainables},
};

use super::{
    config::{FAMILY, T5Config},
    context::{T5Context, TextRows},
    forward,
    model::T5,
    outline::outline,
    pass::{T5Run, T5Trace},
    tokenizer::T5Tokenizer,
};
use crate::{
    pretrained::{
        error::ModelError,
        family::ModelTypes,
        job::{ForwardJob, Lap},
        trains::Trains,
    },
    text_to_text::{
        Choice, NoToken, TextFamily, TextFamilyOn, TextModelOutline, TextPass, TextRun, TextToText,
        TextTokenizer, TextTrace, Texts, TokenRows,
    },
};

/// The families `t5` and `mt5`.
#[derive(Clone, Copy, Debug)]
pub struct T5Family;

impl ModelTypes for T5Family {
    fn model_types(&self) -> &'static [&'static str] {
        &FAMILY
    }
}

impl TextFamily for T5Family {
    fn outline(&self, dir: &Path) -> Result<TextModelOutline, ModelError> {
        Ok(outline(&T5Config::from_dir(dir)?))
    }

    fn tokenizer_file(&self, dir: &Path) -> Option<PathBuf> {
        T5Tokenizer::file(dir)
    }

    fn tokenizer(&self, dir: &Path) -> Result<Box<dyn TextTokenizer>, DataError> {
        let config = T5Config::from_dir(dir).map_err(|error| DataError::Model(error.to_string()))?;
        Ok(Box::new(T5Tokenizer::from_checkpoint(dir, &config)?))
    }
}

impl<B: Tape<Base = B>> TextFamilyOn<B> for T5Family {
    fn load(
        &self,
        dir: &Path,
        dtype: FrozenDtype,
        trains: Trains<'_>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Box<dyn TextToText<B>>, ModelError> {
        Ok(Box::new(T5::load(dir, dtype, trains, layout, device)?))
    }

    fn forward(&self, job: &ForwardJob<'_>, device: &B::Device) -> Result<(), ModelError> {
        forward::run::<B>(job, device)
    }
}

impl<B: Tape<Base = B>> TextToText<B> for T5<B> {
    fn outline(&self) -> &TextModelOutline {
        &self.outline
    }

    fn run<'a>(&'a self, pass: TextPass<'a, B>) -> Box<dyn TextRun<B> + 'a> {
        let TextPass { texts, trainables, dropout, .. } = pass;
        let rows = dropout.map(|of| TextRows::from_texts(&texts, of, &self.device));
        let context = T5Context::of_training(self, trainables, &texts).dropping(rows);
        Box::new(TrainingRun { model: self, pass, context })
    }

    fn losses(&self, pass: TextPass<'_, B>) -> TokenRows {
        let TextPass { texts, targets, trainables, retention, .. } = pass;
        let context = T5Context::new(self, trainables, &texts);
        let run = T5Run { model: self, context: &context, trainables, retention };
        let hidden_nd = run.decode(run.encode(texts.source), texts.target);
        self.predict(trainables, hidden_nd, targets, None).rows
    }

    fn write(
        &self,
        trainables: &Trainables<B>,
        texts: &Texts<'_>,
        most: usize,
        choose: Choice<'_>,
    ) -> Result<Vec<Vec<u32>>, NoToken> {
        T5::write(self, trainables, texts, most, choose)
    }
}

/// A model with one micro-batch's context.
struct TrainingRun<'a, B: Tape<Base = B>> {
    model: &'a T5<B>,
    pass: TextPass<'a, B>,
    context: T5Context<B>,
}

impl<B: Tape<Base = B>> TextRun<B> for TrainingRun<'_, B> {
    fn forward(
        &self,
        grads: &mut dyn GradientSums<B>,
        lap: Lap<'_>,
        head: &'static str,
    ) -> (TokenRows, Box<dyn TextTrace<B> + '_>) {
        let Self { model, pass: TextPass { texts, targets, trainables, retention, .. }, context } = self;
        let run = T5Run { model, context, trainables, retention: *retention };
        let (hidden_nd, trace) = run.forward(texts, lap);
        let NextTokens { rows, dhidden, .. } = model.predict(trainables, hidden_nd, targets, Some(grads));
        lap(head);
        (rows, Box::new(TrainingTrace { run, trace, dhidden }))
    }
}

struct TrainingTrace<'r, B: Tape<Base = B>> {
    run: T5Run<'r, B>,
    trace: T5Trace<'r, B>,
    dhidden: Option<Tensor<B, 2>>,
}

impl<B: Tape<Base = B>> TextTrace<B> for TrainingTrace<'_, B> {
    fn backward(self: Box<Self>, grads: &mut dyn GradientSums<B>, lap: Lap<'_>) {
        let Self { run, trace, dhidden } = *self;
        if let Some(dhidden_nd) = dhidden {
            run.backward(trace, dhidden_nd, grads, lap);
        }
    }
}
