//! Micro-batches of images and text for a checkpoint, the same prompt in every row, and the flags that size
//! them.

use anyhow::{Context, Result};
use coxswain_models::vision_language::ModelOutline;
use coxswain_nn::rng::{Draws, Key, Purpose};
use coxswain_proto::ids::Step;
use coxswain_tasks::vla_flow::data::{MicroBatch, SampleDims};

/// Sizes of a sample: state and actions.
pub const DIMS: SampleDims =
    SampleDims { state: 8, sensor_window: 0, sensor_channels: 0, horizon: 16, action: 7 };

/// `--name value` pairs of the command line.
pub struct Flags(pub Vec<String>);

impl Flags {
    /// The flag's value, or the default.
    pub fn text(&self, name: &str, default: &str) -> String {
        let at = self.0.iter().position(|arg| arg == name).and_then(|at| self.0.get(at + 1));
        at.map_or(default, String::as_str).to_owned()
    }

    /// The flag's value as a number, or the default.
    pub fn number(&self, name: &str, default: usize) -> Result<usize> {
        self.text(name, &default.to_string()).parse().with_context(|| format!("{name} wants a number"))
    }
}

/// Sizes of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Prompts {
    /// Rows.
    pub rows: usize,
    /// Images of each.
    pub images: usize,
    /// Side of an image in patches.
    pub side: usize,
    /// Tokens of text in each.
    pub text: usize,
}

impl Prompts {
    /// `--batch 2 --images 2 --size 224 --text 60`.
    pub fn from_flags(flags: &Flags, model: &ModelOutline) -> Result<Self> {
        Ok(Self {
            rows: flags.number("--batch", 2)?,
            images: flags.number("--images", 2)?,
            side: flags.number("--size", 224)? / model.patches.patch,
            text: flags.number("--text", 60)?,
        })
    }

    /// Images first, then text; random words, pixels and actions.
    pub fn batch(&self, model: &ModelOutline, step: Step) -> MicroBatch {
        let Self { rows, images, side, .. } = *self;
        let mut draws = Key { seed: 1, purpose: Purpose::Init, step: step.0, sample: 1, repeat: 0 }.draws();
        let values = rows * images * side * side * model.patches.columns();
        MicroBatch {
            pixel_values: vec![normal(&mut draws, values).into()],
            ..self.without_pixels(model, step)
        }
    }

    /// A batch with features to come in place of the pixels.
    pub fn without_pixels(&self, model: &ModelOutline, step: Step) -> MicroBatch {
        let Self { rows, images, side, text } = *self;
        let mut draws = Key { seed: 0, purpose: Purpose::Init, step: step.0, sample: 1, repeat: 0 }.draws();
        let unit = model.patches.merge.pow(2);
        let mut prompt = Vec::new();
        for _ in 0..images {
            prompt.push(model.tokens.around[0]);
            prompt.extend(std::iter::repeat_n(model.tokens.image, side * side / unit));
            prompt.push(model.tokens.around[1]);
        }
        let ordinary = model.vocab_size as u64 - 16;
        prompt.extend((0..text).map(|_| (draws.word() % ordinary) as u32));
        MicroBatch {
            step,
            sample_indices: (0..rows as u64).collect(),
            input_ids: prompt.repeat(rows),
            valid: vec![0..prompt.len() as u32; rows],
            seq_len: prompt.len(),
            pixel_values: vec![],
            image_shapes: vec![[1, side as u32, side as u32]; rows * images],
            images_per_row: vec![images as u32; rows],
            state: normal(&mut draws, rows * DIMS.state),
            sensor: vec![],
            actions: normal(&mut draws, rows * DIMS.horizon * DIMS.action),
            action_widths: vec![DIMS.action; rows],
            action_valid: vec![1.0; rows * DIMS.horizon],
            features: None,
        }
    }
}

fn normal(draws: &mut Draws, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    draws.normal(&mut values);
    values
}
