//! The prefix: images and prompt through the language model's layers, of which the keys and values are
//! kept.
//!
//! Every token of a prefix sees every other, and none sees what follows it. It does not train, so it runs
//! without a tape; of the last layer nothing is needed but keys and values.

use std::ops::Range;

use burn::tensor::{Int, Tensor, TensorData};
use coxswain_models::{
    joint::JointModel,
    pretrained::{
        error::TokenError,
        prompts::{Prompts, Rows},
    },
};
use coxswain_nn::{
    kernels::{AttentionMask, AttentionOps, Tape},
    memory,
    params::{ParamScope, Trainables},
};

use super::rotary::{Rotary, placed};

/// Keys, rotated, and values of each layer, `[b, s, kv_heads, k]`, and which of the `s` tokens are a row's.
pub(super) struct Prefix<B: Tape<Base = B>> {
    pub layers: Vec<[Tensor<B, 4>; 2]>,
    pub valid: Vec<Range<u32>>,
    pub seq: usize,
}

impl<B: Tape<Base = B>> Prefix<B> {
    /// Runs prompts in which the id `image` stands for a token of an image.
    pub fn run(
        model: &dyn JointModel<B>,
        trainables: &Trainables<B>,
        prompts: Prompts<'_>,
        image: u32,
        device: &B::Device,
    ) -> Result<Self, TokenError> {
        let Rows::Padded(valid) = prompts.rows else {
            unreachable!("rows of a policy are padded: its batches are made so")
        };
        let [batch, seq] = prompts.rows.axes(prompts.input_ids.len());
        let params = ParamScope::<B>::frozen(trainables);
        let positions: Vec<u32> =
            prompts.rows.places(prompts.input_ids.len()).map(|(_, place)| place.max(0) as u32).collect();
        let shape = model.outline().layer;
        let rotary = Rotary::<B>::new(&positions, batch, shape.head_dim, device);
        let mask = AttentionMask::Keys(valid.into());
        let scale = (shape.head_dim as f64).powf(-0.5);
        let mut x_nd = embedded(model, trainables, prompts, image, device)?;
        let count = model.layers().len();
        let mut layers = Vec::with_capacity(count);
        for (number, layer) in model.layers().iter().enumerate() {
            memory::check();
            let y_nd = layer.normed(&params, x_nd.clone());
            let [k_bshk, v_bshk] = layer.keys_values(&params, [y_nd.clone(), y_nd.clone()], batch);
            let k_bshk = rotary.rotate::<B>(k_bshk);
            layers.push([k_bshk.clone(), v_bshk.clone()]);
            if number + 1 == count {
                break;
            }
            let q_bshk = rotary.rotate::<B>(layer.queries(&params, y_nd, batch));
            let heads = <B as AttentionOps>::attention(q_bshk, k_bshk, v_bshk, &mask, scale);
            x_nd = layer.close(&params, x_nd, heads);
        }
        Ok(Self { layers, valid: valid.to_vec(), seq })
    }
}

/// Embeddings of tokens with features of images in their places, times the root of their width.
fn embedded<B: Tape<Base = B>>(
    model: &dyn JointModel<B>,
    trainables: &Trainables<B>,
    prompts: Prompts<'_>,
    image: u32,
    device: &B::Device,
) -> Result<Tensor<B, 2>, TokenError> {
    let outline = model.outline();
    let (vocab, ids) = (outline.vocab_size, prompts.input_ids);
    let [_, seq] = prompts.rows.axes(ids.len());
    if let Some(at) = ids.iter().position(|&id| id as usize >= vocab) {
        let (row, position) = (at / seq.max(1), at % seq.max(1));
        return Err(TokenError::Vocabulary { row, position, id: ids[at].into(), vocab });
    }
    let scale = (outline.layer.width as f32).sqrt();
    let x_nd = model.token_embeddings(trainables, ids);
    let images: Vec<usize> = (0..ids.len()).filter(|&at| ids[at] == image).collect();
    let wanted = images.len() / outline.image_tokens().max(1);
    let values = outline.patches.columns();
    let patches = wanted * outline.image_tokens() * outline.patches.merge * outline.patches.merge;
    let found: usize = prompts.pixel_values.iter().map(|piece| piece.len()).sum();
    if B::VALUES && (found != patches * values || wanted * outline.image_tokens() != images.len()) {
        return Err(TokenError::Pixels { found, patches, width: values });
    }
    if images.is_empty() {
        return Ok(x_nd * scale);
    }
    let pixels = if B::VALUES { prompts.pieces().concat() } else { Vec::new() };
    let features_md = model.image_features(trainables, placed(pixels, [patches, values], device));
    let mut sources: Vec<i32> = (0..ids.len() as i32).collect();
    images.iter().enumerate().for_each(|(feature, &at)| sources[at] = (ids.len() + feature) as i32);
    let sources: Tensor<B, 1, Int> = Tensor::from_data(TensorData::new(sources, [ids.len()]), device);
    Ok(Tensor::cat(vec![x_nd, features_md], 0).select(0, sources) * scale)
}
