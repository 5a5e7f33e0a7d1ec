//! Tokens one after another.
//!
//! ```text
//! begin    prompts [b, s], padded on the left  -> both towers   -> logits of what follows each, [b, vocab]
//! follow   the tokens that were chosen, [b]    -> decoder layers -> the same, one token on
//! ```
//!
//! Keys and values are kept, so a token costs one pass over the weights however much was written before it.
//! What this does not do: choose tokens, or end a row before the others; a row that has ended is fed whatever
//! its caller likes.

use std::{ops::ControlFlow, ops::Range, sync::Arc};

use burn::tensor::{Int, Tensor, TensorData};

use super::{
    embed::ImageRows,
    following::KeptTokens,
    model::TwoTowers,
    pass::{Entry, PassContext, TowersPass},
    streams::{AtTap, Streams},
    text::TextContext,
    vision::VisionTower,
};
use crate::{
    pretrained::prompts::{Prompts, Rows},
    vision_language::{Decoder, Tap, model::PassError},
};
use coxswain_nn::{
    kernels::{AttentionMask, Tape},
    params::{ParamScope, Trainables},
    recompute::Retention,
};

/// Rows of tokens that grow.
pub struct TowersDecoder<'a, B: Tape<Base = B>, V: VisionTower<B>> {
    model: &'a TwoTowers<B, V>,
    trainables: &'a Trainables<B>,
    retention: Retention,
    /// Kept tokens of each decoder layer.
    kept: Vec<KeptTokens<B>>,
    /// Tokens of each row among those kept; all rows end at the same.
    valid: Vec<Range<u32>>,
    /// Rotary position of each row's next token.
    next: Vec<u32>,
}

impl<'a, B: Tape<Base = B>, V: VisionTower<B>> TowersDecoder<'a, B, V> {
    /// Runs the prompts, padded so that each row ends at the last column. Gives the logits of each row's next
    /// token, `[b, vocab]`. The model must have been loaded with its head.
    pub fn begin(
        model: &'a TwoTowers<B, V>,
        trainables: &'a Trainables<B>,
        retention: Retention,
        prompts: Prompts<'_>,
    ) -> Result<(Self, Tensor<B, 2>), PassError> {
        let context = PassContext::new(model, prompts, None)?;
        let vl = TowersPass { model, context: &context, trainables, retention, dropout: None };
        let AtTap { values, streams_md } = vl.features(prompts, Entry::Pixels, Tap::Layer(0))?;
        let (image_rows, streams) = (&context.image_rows, Streams::new(0, streams_md));
        let index = model.rope_index(prompts.input_ids, prompts.rows, prompts.images)?;
        let text = model.text.context(&index.position_ids, prompts.rows);
        let (tokens, seq) = (prompts.input_ids.len(), text.seq as u32);
        let highest = |row: Range<usize>| {
            let axes = index.position_ids.chunks_exact(tokens.max(1));
            axes.flat_map(|plane| &plane[row.clone()]).max().copied().unwrap_or(0)
        };
        let rows = prompts.rows.cells(tokens);
        let mut decoder = Self {
            model,
            trainables,
            retention,
            kept: (0..model.text.layers.count()).map(|_| KeptTokens::default()).collect(),
            valid: rows.iter().map(|row| seq - row.len() as u32..seq).collect(),
            next: rows.into_iter().map(|row| highest(row) + 1).collect(),
        };
        let logits_bv = decoder.run(values, &text, Some((image_rows, streams)))?;
        Ok((decoder, logits_bv))
    }

    /// The layers, and behind them what images add there.
    fn run(
        &mut self,
        x_nd: Tensor<B, 2>,
        context: &TextContext<B>,
        mut images: Option<(&ImageRows, Streams<B>)>,
    ) -> Result<Tensor<B, 2>, PassError> {
        let Self { model, trainables, retention, kept, .. } = self;
        let scope = || ParamScope::<B>::frozen(trainables).holding(retention.activations);
        let layers = &model.text.layers;
        let x_nd = layers.fold(0..layers.count(), x_nd, |x_nd, index, layer| {
            let x_nd = layer.following(&scope(), x_nd, context, &mut kept[index]);
            let added = images.as_mut().and_then(|(rows, streams)| Some((rows, streams.next(index + 1)?.1)));
            ControlFlow::Continue(match added {
                Some((rows, stream_md)) => rows.add(x_nd, stream_md),
                None => x_nd,
            })
        })?;
        let last: Vec<i32> = (1..=context.batch).map(|row| (row * context.seq) as i32 - 1).collect();
        let last: Tensor<B, 1, Int> =
            Tensor::from_data(TensorData::new(last, [context.batch]), model.text.device());
        let x_bd = model.text.final_norm(&scope(), x_nd.select(0, last));
        Ok(model.lm_head(&scope(), x_bd).expect("the model was loaded with its head"))
    }
}

impl<B: Tape<Base = B>, V: VisionTower<B>> Decoder<B> for TowersDecoder<'_, B, V> {
    fn follow(&mut self, ids: &[u32]) -> Result<Tensor<B, 2>, PassError> {
        let position_ids: Vec<u32> = self.next.repeat(3);
        self.next.iter_mut().for_each(|position| *position += 1);
        self.valid.iter_mut().for_each(|row| row.end += 1);
        // A single query sees every key of its row.
        let mask = AttentionMask::Keys(Arc::from(&self.valid[..]));
        let scope = ParamScope::<B>::frozen(self.trainables).holding(self.retention.activations);
        let context =
            TextContext { mask, ..self.model.text.context(&position_ids, Rows::Padded(&self.valid)) };
        self.run(self.model.embed_tokens(&scope, ids), &context, None)
    }
}
