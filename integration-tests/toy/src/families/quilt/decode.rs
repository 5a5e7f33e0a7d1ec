//! Tokens one after another. Nothing is kept of a token but its embedding: each further one runs all of them
//! again, which suits prompts of a hundred tokens.

use std::ops::Range;

use burn::tensor::Tensor;
use coxswain_models::{
    pretrained::{
        prompts::{Prompts, Rows},
        stack::InStack,
    },
    vision_language::{Decoder, PassError, Tap, VlPass},
};
use coxswain_nn::{
    kernels::Tape,
    params::{ParamScope, Trainables},
    recompute::{Retention, Tower},
};

use super::{
    model::Quilt,
    pass::Pass,
    rows::{RowsContext, indices},
};

/// Rows of tokens that grow at their ends.
pub struct Continuation<'a, B: Tape<Base = B>> {
    model: &'a Quilt<B>,
    trainables: &'a Trainables<B>,
    retention: Retention,
    /// Inputs of the first block, `[b, s, d]`.
    x_bsd: Tensor<B, 3>,
    /// Tokens of each row; all end at the last column.
    valid: Vec<Range<u32>>,
}

impl<'a, B: Tape<Base = B>> Continuation<'a, B> {
    /// Runs prompts that end at the last column. Gives the logits of each row's next token, `[b, vocab]`. The
    /// model must have been loaded with its head.
    pub fn begin(
        model: &'a Quilt<B>,
        trainables: &'a Trainables<B>,
        retention: Retention,
        prompts: Prompts<'_>,
    ) -> Result<(Self, Tensor<B, 2>), PassError> {
        let pass = VlPass { prompts, kept: None, trainables, retention, dropout: None };
        let x_nd = Pass::new(model, pass)?.until(Tap::Layer(0))?;
        let (width, [b, s]) = (model.config.hidden_size, prompts.rows.axes(prompts.input_ids.len()));
        let lengths = prompts.rows.cells(prompts.input_ids.len()).into_iter();
        let valid = lengths.map(|cells| (s - cells.len()) as u32..s as u32).collect();
        let rows = Self { model, trainables, retention, x_bsd: x_nd.reshape([b, s, width]), valid };
        let logits_bv = rows.logits()?;
        Ok((rows, logits_bv))
    }

    fn logits(&self) -> Result<Tensor<B, 2>, PassError> {
        let Self { model, trainables, retention, .. } = *self;
        let [b, s, d] = self.x_bsd.dims();
        let context = RowsContext::new(Rows::Padded(&self.valid), b * s);
        let layers = InStack { stack: &model.blocks, range: 0..model.blocks.count(), context: &context };
        let tower = Tower { layers, trainables, retention, sides: Vec::new(), dropout: None };
        let x_nd = tower.run(self.x_bsd.clone().reshape([b * s, d]))?;
        let last: Vec<u32> = (1..=b).map(|row| (row * s) as u32 - 1).collect();
        let params = ParamScope::<B>::frozen(trainables);
        let hidden_bd = model.normed(&params, x_nd.select(0, indices::<B>(&last, &model.device)));
        let head = model.head.as_ref().expect("the model was loaded with its head");
        Ok(head.forward(&params, hidden_bd))
    }
}

impl<B: Tape<Base = B>> Decoder<B> for Continuation<'_, B> {
    fn follow(&mut self, ids: &[u32]) -> Result<Tensor<B, 2>, PassError> {
        let next_bd = self.model.embedded(&ParamScope::<B>::frozen(self.trainables), ids);
        let [b, d] = next_bd.dims();
        self.x_bsd = Tensor::cat(vec![self.x_bsd.clone(), next_bd.reshape([b, 1, d])], 1);
        self.valid.iter_mut().for_each(|row| row.end += 1);
        self.logits()
    }
}
