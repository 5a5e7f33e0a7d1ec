//! The prefix: images and prompt through the language model's layers, of which the keys and values are
//! kept, as policies attend to them.
//!
//! Every token of a prefix sees every other, and none sees what follows it. Layers below the first that
//! trains run without a tape. From there on a layer is a segment, `[b * s, d]` to one row in which what the
//! next layer reads is followed by keys and by values, whose gradients come from what attends to them. Of the
//! last layer nothing is needed but keys and values. Where all of them were kept, no layer runs.

use std::ops::Range;

use burn::tensor::{Int, Tensor, TensorData};
use coxswain_models::{
    joint::{JointModel, StreamLayer},
    pretrained::{error::TokenError, prompts::Rows},
};
use coxswain_nn::{
    kernels::{AttentionMask, AttentionOps, DropoutRows, ModelBackend, Tape, flat::Lookups},
    lora::LoraLinear,
    memory,
    params::{GradientSums, ParamScope, Trainables},
    recompute::segment::{Input, RecordedSegment, Segment},
};
use coxswain_proto::run_spec::Recompute;

use crate::{
    batch::PolicyObservation,
    kept::KeptSegment,
    kept_tokens::KeptTokens,
    rotary::{Rotary, placed},
};

/// What the prefix of a micro-batch is made of.
pub(crate) struct PrefixPass<'a, 'o, B: Tape<Base = B>> {
    pub model: &'a dyn JointModel<B>,
    pub trainables: &'a Trainables<B>,
    pub observed: PolicyObservation<'o>,
    pub device: &'a B::Device,
    /// What embeddings and features are multiplied by.
    pub scale: f32,
    /// Rows of the prefix's tokens, as dropout of adapters knows them.
    pub dropout: Option<DropoutRows<B>>,
}

/// Keys, rotated, and values of each layer, `[b * s, kv]`, and which of the `s` tokens are a row's.
pub(crate) struct Prefix<'a, B: Tape<Base = B>> {
    pub layers: Vec<[Tensor<B, 2>; 2]>,
    pub valid: Vec<Range<u32>>,
    pub seq: usize,
    /// The first layer that trains, or has something below it that does.
    first: usize,
    /// Segments of the layers from there on.
    kept: Vec<KeptSegment<'a, B>>,
    embedding: Option<Embedding<'a, B>>,
    context: PrefixContext<B>,
}

/// What all layers share.
struct PrefixContext<B: Tape<Base = B>> {
    batch: usize,
    rotary: Rotary<B>,
    mask: AttentionMask,
    dropout: Option<DropoutRows<B>>,
}

/// What trains below the first layer.
struct Embedding<'a, B: Tape<Base = B>> {
    connector: Option<RecordedSegment<'a, B>>,
    /// Where tokens of images are.
    images: Vec<usize>,
    /// Where the table is read, if it trains.
    lookups: Option<Lookups>,
}

impl<'a, B: Tape<Base = B>> PrefixPass<'a, '_, B> {
    /// Runs it, keeping nothing for a backward pass.
    pub fn run(&self) -> Result<Prefix<'a, B>, TokenError> {
        self.through(None)
    }

    /// Runs it, keeping what `recompute` says of what trains.
    pub fn forward(&self, recompute: Recompute) -> Result<Prefix<'a, B>, TokenError> {
        self.through(Some(recompute))
    }

    fn through(&self, recompute: Option<Recompute>) -> Result<Prefix<'a, B>, TokenError> {
        let Self { model, trainables, observed, device, .. } = *self;
        let prompts = observed.prompts;
        let Rows::Padded(valid) = prompts.rows else {
            unreachable!("rows of a policy are padded: its batches are made so")
        };
        let [batch, seq] = prompts.rows.axes(prompts.input_ids.len());
        let positions: Vec<u32> =
            prompts.rows.places(prompts.input_ids.len()).map(|(_, place)| place.max(0) as u32).collect();
        let context = PrefixContext {
            batch,
            rotary: Rotary::<B>::new(&positions, batch, model.outline().layer.head_dim, device),
            mask: AttentionMask::Keys(valid.into()),
            dropout: self.dropout.clone(),
        };
        let count = model.layers().len();
        if let Some(known) = observed.features.filter(|kept| kept.of == KeptTokens::KeysValues) {
            let (layers, kept, valid) = (self.known(known.values)?, Vec::new(), valid.to_vec());
            return Ok(Prefix { layers, valid, seq, first: count, kept, embedding: None, context });
        }
        let (mut x_nd, embedding) = self.embedded(recompute.is_some())?;
        let trains = |number: &usize| model.layers()[*number].trains();
        let first = match (recompute, &embedding) {
            (None, _) => count,
            (_, Some(_)) => 0,
            _ => (0..count).find(trains).unwrap_or(count),
        };
        let (mut layers, mut kept) = (Vec::with_capacity(count), Vec::with_capacity(count - first));
        for (number, layer) in model.layers().iter().enumerate() {
            memory::check();
            let segment = PrefixSegment { layer, context: &context, last: number + 1 == count };
            let Some(recompute) = recompute.filter(|_| number >= first) else {
                let (next, keys_values) = segment.through(&ParamScope::<B>::frozen(trainables), x_nd);
                layers.push(keys_values);
                let Some(next) = next else { break };
                x_nd = next;
                continue;
            };
            let input = Input { value: x_nd, tracked: number > first || embedding.is_some() };
            let (out, of_layer) =
                KeptSegment::run(&segment, trainables, recompute, vec![input], context.dropout.clone());
            kept.push(of_layer);
            let [tokens, d, kv] = [batch * seq, layer.shape.width, layer.shape.kv_width()];
            let before = if segment.last { 0 } else { tokens * d };
            let part = |start, width| out.clone().narrow(1, start, tokens * width).reshape([tokens, width]);
            layers.push([0, 1].map(|number| part(before + number * tokens * kv, kv)));
            if segment.last {
                break;
            }
            x_nd = part(0, d);
        }
        Ok(Prefix { layers, valid: valid.to_vec(), seq, first, kept, embedding, context })
    }

    /// Embeddings of tokens with features of images in their places, times the scale.
    fn embedded(&self, training: bool) -> Result<(Tensor<B, 2>, Option<Embedding<'a, B>>), TokenError> {
        let Self { model, trainables, observed, device, .. } = *self;
        let outline = model.outline();
        let (vocab, ids) = (outline.vocab_size, observed.prompts.input_ids);
        let [_, seq] = observed.prompts.rows.axes(ids.len());
        if let Some(at) = ids.iter().position(|&id| id as usize >= vocab && id != observed.image) {
            let (row, position) = (at / seq.max(1), at % seq.max(1));
            return Err(TokenError::Vocabulary { row, position, id: ids[at].into(), vocab });
        }
        // The place of an image's token is looked up as well: as any token, since its own may be none.
        let of_text = ids.iter().map(|&id| if id == observed.image { 0 } else { id }).collect::<Vec<_>>();
        let x_nd = model.token_embeddings(trainables, &of_text);
        let images: Vec<usize> = (0..ids.len()).filter(|&at| ids[at] == observed.image).collect();
        let lookups = model
            .trained_table()
            .filter(|_| training)
            .map(|_| Lookups::new((0..).zip(ids.iter().copied()).filter(|(_, id)| *id != observed.image)));
        let (x_nd, connector) = if images.is_empty() {
            (x_nd, None)
        } else {
            let (features_md, connector) = self.features(images.len(), training)?;
            let mut sources: Vec<i32> = (0..ids.len() as i32).collect();
            images.iter().enumerate().for_each(|(feature, &at)| sources[at] = (ids.len() + feature) as i32);
            (Tensor::cat(vec![x_nd, features_md], 0).select(0, places(sources, device)), connector)
        };
        let trains = connector.is_some() || lookups.is_some();
        Ok((x_nd * self.scale, trains.then_some(Embedding { connector, images, lookups })))
    }

    /// Features of so many tokens of images: those that were kept, or the tower's and the connector's. With
    /// the connector's graph, if that trains.
    fn features(
        &self,
        tokens: usize,
        training: bool,
    ) -> Result<(Tensor<B, 2>, Option<RecordedSegment<'a, B>>), TokenError> {
        let Self { model, trainables, observed, device, .. } = *self;
        let outline = model.outline();
        if let Some(kept) = observed.features {
            let width = outline.layer.width;
            return Ok((kept_rows(kept.values, [tokens, width], device)?, None));
        }
        let squares_mo = self.squares(tokens)?;
        let segment = ConnectorSegment(model.connector());
        if training && model.connector().trains() {
            let rows = self.dropout.as_ref().map(|rows| {
                let ids = observed.prompts.input_ids;
                rows.select((0..ids.len()).filter(|&at| ids[at] == observed.image))
            });
            let params = ParamScope::tracked(trainables).dropping(rows);
            let graph = RecordedSegment::run_in(params, &segment, vec![Input::constant(squares_mo)]);
            return Ok((graph.output(), Some(graph)));
        }
        Ok((segment.run(&ParamScope::<B>::frozen(trainables), &[squares_mo]), None))
    }

    /// What the tower makes of the images, for so many tokens.
    fn squares(&self, tokens: usize) -> Result<Tensor<B, 2>, TokenError> {
        let Self { model, trainables, observed, device, .. } = *self;
        let (outline, prompts) = (model.outline(), observed.prompts);
        let wanted = tokens / outline.image_tokens().max(1);
        let values = outline.patches.columns();
        let patches = wanted * outline.image_tokens() * outline.patches.merge * outline.patches.merge;
        let found: usize = prompts.pixel_values.iter().map(|piece| piece.len()).sum();
        if B::VALUES && (found != patches * values || wanted * outline.image_tokens() != tokens) {
            return Err(TokenError::Pixels { found, patches, width: values });
        }
        let pixels = if B::VALUES { prompts.pieces().concat() } else { Vec::new() };
        Ok(model.tower(trainables, placed(pixels, [patches, values], device)))
    }

    /// Keys and values of every layer, `[b * s, kv]`, of those `[tokens, layers * 2 * kv]` of the rows' own
    /// tokens that were kept. Padding has those of the first: nothing attends to it.
    fn known(&self, values: &[f32]) -> Result<Vec<[Tensor<B, 2>; 2]>, TokenError> {
        let outline = self.model.outline();
        let (kv, cells) = (outline.layer.kv_width(), self.cells());
        let shape = [cells.len(), KeptTokens::KeysValues.width(outline)];
        let kept_tw = kept_rows::<B>(values, shape, self.device)?;
        let mut sources = vec![0; self.observed.prompts.input_ids.len()];
        cells.into_iter().zip(0..).for_each(|(cell, token)| sources[cell] = token);
        let sources = places::<B>(sources, self.device);
        let part = |number| kept_tw.clone().narrow(1, number * kv, kv).select(0, sources.clone());
        Ok((0..outline.layers).map(|layer| [2 * layer, 2 * layer + 1].map(part)).collect())
    }

    /// The tokens that are a row's, among those of all rows.
    fn cells(&self) -> Vec<usize> {
        let prompts = self.observed.prompts;
        prompts.rows.cells(prompts.input_ids.len()).into_iter().flatten().collect()
    }

    /// Keys and values of every layer, `[tokens, layers * 2 * kv]`, to be kept.
    pub fn keys_values(&self) -> Result<Tensor<B, 2>, TokenError> {
        let cells = self.cells().into_iter().map(|cell| cell as i32).collect();
        let layers = self.run()?.layers.into_iter().flatten().collect();
        Ok(Tensor::cat(layers, 1).select(0, places(cells, self.device)))
    }

    /// Features of all images, `[tokens, d]`, to be kept.
    pub fn image_features(&self) -> Result<Tensor<B, 2>, TokenError> {
        let PolicyObservation { prompts, image, .. } = self.observed;
        let tokens = prompts.input_ids.iter().filter(|id| **id == image).count();
        Ok(self.features(tokens, false)?.0)
    }

    /// Carries the gradients of a layer's keys and values back through it, beside that of what the layer
    /// above reads; that of what it reads itself, if anything below it trains. Layers are asked for from the
    /// last one on.
    pub fn backward(
        &self,
        prefix: &mut Prefix<'a, B>,
        dx_nd: Option<Tensor<B, 2>>,
        dkeys_values: Vec<Tensor<B, 2>>,
        grads: &mut dyn GradientSums<B>,
    ) -> Option<Tensor<B, 2>> {
        let kept = prefix.kept.pop()?;
        let (number, layers) = (prefix.first + prefix.kept.len(), self.model.layers());
        let last = number + 1 == layers.len();
        let segment = PrefixSegment { layer: &layers[number], context: &prefix.context, last };
        let graph = kept.again(&segment, self.trainables, prefix.context.dropout.clone());
        let dy = dx_nd.into_iter().chain(dkeys_values).map(in_a_row).collect();
        graph.backward(Tensor::cat(dy, 1), grads).into_iter().next().flatten()
    }

    /// Carries the gradient of what the first layer reads back.
    pub fn backward_of_embedding(
        &self,
        prefix: Prefix<'a, B>,
        dx_nd: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) {
        let Some(Embedding { connector, images, lookups }) = prefix.embedding else { return };
        let dx_nd = dx_nd * self.scale;
        if let Some(connector) = connector {
            let images = images.into_iter().map(|at| at as i32).collect();
            connector.backward(dx_nd.clone().select(0, places(images, self.device)), grads);
        }
        if let (Some(table), Some(lookups)) = (self.model.trained_table(), lookups) {
            grads.add_rows(self.trainables.layout().get(table), &lookups, dx_nd);
        }
    }
}

impl<B: Tape<Base = B>> Prefix<'_, B> {
    /// Whether keys and values of this layer have gradients to carry on.
    pub fn trains(&self, number: usize) -> bool {
        number >= self.first
    }
}

/// A layer on the tokens of a prefix.
struct PrefixSegment<'a, B: Tape<Base = B>> {
    layer: &'a StreamLayer<B>,
    context: &'a PrefixContext<B>,
    last: bool,
}

impl<B: Tape<Base = B>> PrefixSegment<'_, B> {
    /// What the next layer reads, if there is one, and keys and values.
    fn through<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
    ) -> (Option<Tensor<T, 2>>, [Tensor<T, 2>; 2]) {
        let Self { layer, context: PrefixContext { batch, rotary, mask, .. }, last } = self;
        let [n, _] = x_nd.dims();
        let rows = |x_bshk: Tensor<T, 4>| x_bshk.reshape([n, layer.shape.kv_width()]);
        let y_nd = layer.normed(params, x_nd.clone());
        let [k_bshk, v_bshk] = layer.keys_values(params, [y_nd.clone(), y_nd.clone()], *batch);
        let k_bshk = rotary.rotate(k_bshk);
        let keys_values = [k_bshk.clone(), v_bshk.clone()].map(rows);
        if *last {
            return (None, keys_values);
        }
        let q_bshk = rotary.rotate(layer.queries(params, y_nd, *batch));
        let scale = (layer.shape.head_dim as f64).powf(-0.5);
        let heads = <T as AttentionOps>::attention(q_bshk, k_bshk, v_bshk, mask, scale);
        (Some(layer.close(params, x_nd, heads)), keys_values)
    }
}

impl<B: Tape<Base = B>> Segment<B> for PrefixSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let (next, keys_values) = self.through(params, inputs[0].clone());
        Tensor::cat(next.into_iter().chain(keys_values).map(in_a_row).collect(), 1)
    }
}

/// `[n, d]` as one row.
fn in_a_row<B: ModelBackend>(x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
    let values = x_nd.shape().num_elements();
    x_nd.reshape([1, values])
}

/// What the tower makes of images to features.
struct ConnectorSegment<'a, B: ModelBackend>(&'a LoraLinear<B>);

impl<B: Tape<Base = B>> Segment<B> for ConnectorSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.forward(params, inputs[0].clone())
    }
}

/// What was kept, in this shape.
fn kept_rows<B: ModelBackend>(
    values: &[f32],
    [tokens, width]: [usize; 2],
    device: &B::Device,
) -> Result<Tensor<B, 2>, TokenError> {
    if B::VALUES && values.len() != tokens * width {
        return Err(TokenError::Pixels { found: values.len(), patches: tokens, width });
    }
    Ok(placed(values.to_vec(), [tokens, width], device))
}

fn places<B: ModelBackend>(places: Vec<i32>, device: &B::Device) -> Tensor<B, 1, Int> {
    let count = places.len();
    Tensor::from_data(TensorData::new(places, [count]), device)
}
