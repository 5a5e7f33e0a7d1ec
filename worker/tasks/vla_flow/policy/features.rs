//! Features at the policy's tap: computed to be kept, and taken instead of pixels.
//!
//! Kept features have no padding, the model's tensors have: `[b * s, d]`, a row's tokens at its valid range.
//! Here the one is made of the other. What lies at padding is zero where features are taken from the cache,
//! and whatever the model computes where not; no token attends to it and no gradient comes from it, so losses
//! and gradients are the same to the bit.
//!
//! A feature's value depends on its own sample alone, bit for bit: not on which samples share the
//! micro-batch, nor on how far they are padded (`kernels::flex`). So it does not matter in which batch it was
//! computed.
//!
//! What this file does not do: know where features are kept, or how they are rounded there.

use burn::tensor::{Tensor, TensorData};
use coxswain_proto::run_spec::Recompute;

use super::{
    error::{StepError, failed},
    parts::{Policy, VlFeatures, download, keys_mask},
    tap::{Adapted, Tap},
};
use coxswain_models::qwen2_5_vl::{
    Trains,
    pass::{Entry, Until, VlContext, VlRun},
};
use coxswain_nn::{kernels::Tape, params::Trainables, recompute::Retention};
use coxswain_task::CachedFeatures;

use crate::vla_flow::data::batch::MicroBatch;

impl<B: Tape<Base = B>> Policy<B> {
    /// Where features are taken; none if the run's cache is off.
    pub fn tap(&self) -> Option<Tap> {
        self.tap
    }

    /// For the log: where features are taken, what is skipped, what trains when.
    pub fn describe_tap(&self) -> Option<[String; 3]> {
        let trains = Trains { lora: self.lora(), full: Some(&self.full) };
        let adapted = Adapted::new(&self.model.config, trains);
        self.tap.map(|tap| tap.describe(self.settings.cache, &adapted))
    }

    /// Values of a token at any tap.
    pub fn tap_width(&self) -> usize {
        self.model.config.text.hidden_size
    }

    /// Tokens that each row of a micro-batch has at the tap: of its images at [`Tap::Vision`], else all that
    /// are valid. Empty without a tap.
    pub fn tap_tokens(&self, batch: &MicroBatch) -> Vec<usize> {
        match self.tap {
            None => Vec::new(),
            Some(Tap::Vision) => {
                let unit = self.model.config.vision.merge_unit();
                let mut grids = batch.image_grids.iter();
                let row = |&images: &u32| {
                    let grids = grids.by_ref().take(images as usize);
                    grids.map(|grid| grid.iter().map(|&side| side as usize).product::<usize>() / unit).sum()
                };
                batch.images_per_row.iter().map(row).collect()
            }
            Some(_) => batch.valid.iter().map(ExactSizeIterator::len).collect(),
        }
    }

    /// The features of a micro-batch of pixels at the tap; of no tokens without a tap. For `periodic` the
    /// adapters are those of `trainables`, which need not hold anything else
    /// ([`AdapterSnapshot`](super::AdapterSnapshot)).
    pub fn features_below(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
    ) -> Result<CachedFeatures, StepError> {
        let width = self.tap_width();
        let Some(tap) = self.tap.filter(|_| !batch.is_empty()) else {
            return Ok(CachedFeatures { width, values: Vec::new() });
        };
        let values = download(self.until(trainables, batch, Entry::Pixels, tap)?);
        let padded = tap != Tap::Vision && values.len() > width * batch.tokens() as usize;
        let values = if padded { without_padding(batch, width, &values) } else { values };
        Ok(CachedFeatures { width, values })
    }

    /// The hidden states that the expert attends to, without a trace.
    pub fn vl_features(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
    ) -> Result<VlFeatures<B>, StepError> {
        let hidden_nd = self.until(trainables, batch, self.entry(batch)?, Tap::Final)?;
        Ok(VlFeatures { hidden_nd, mask: keys_mask(batch) })
    }

    /// Nothing is kept for a backward pass, and every value is the one that a training pass computes.
    fn without_trace(&self) -> Retention {
        Retention { recompute: Recompute::None, ..self.settings.retention }
    }

    fn until(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
        entry: Entry<B>,
        until: Tap,
    ) -> Result<Tensor<B, 2>, StepError> {
        let context =
            VlContext::new(&self.model, batch.prompts(), &entry).map_err(|broken| failed(batch, broken))?;
        let vl = VlRun {
            model: &self.model,
            context: &context,
            trainables,
            retention: self.without_trace(),
            dropout: None,
        };
        vl.features(batch.prompts(), entry, end(until)).map_err(|broken| failed(batch, broken))
    }

    /// What a pass over this micro-batch begins with.
    pub(super) fn entry(&self, batch: &MicroBatch) -> Result<Entry<B>, StepError> {
        let Some(features) = &batch.features else { return Ok(Entry::Pixels) };
        let wrong = |problem| {
            Err(StepError::Features { step: batch.step, samples: batch.sample_indices.clone(), problem })
        };
        let Some(tap) = self.tap else {
            return wrong("this policy has no tap: its run's cache is off".into());
        };
        let (width, count) = (self.tap_width(), self.tap_tokens(batch).into_iter().sum::<usize>());
        if features.width != width || features.values.len() != width * count {
            return wrong(format!(
                "{} values of {} a token; expected {count} tokens of {width} at {tap}",
                features.values.len(),
                features.width
            ));
        }
        Ok(match tap {
            Tap::Vision => Entry::Images(self.upload(&features.values, width)),
            Tap::Layer(layer) => Entry::Layer(layer, self.placed(batch, features)),
            Tap::Final => Entry::Hidden(self.placed(batch, features)),
        })
    }

    /// Features in their rows' valid ranges, `[b * s, d]`.
    fn placed(&self, batch: &MicroBatch, CachedFeatures { width, values }: &CachedFeatures) -> Tensor<B, 2> {
        let rows = batch.len() * batch.seq_len;
        if values.len() == rows * width {
            return self.upload(values, *width);
        }
        let mut padded = vec![0.0; rows * width];
        let mut rest = &values[..];
        for (row, valid) in padded.chunks_exact_mut(batch.seq_len * width).zip(&batch.valid) {
            let row = &mut row[valid.start as usize * width..valid.end as usize * width];
            let (own, others) = rest.split_at(row.len());
            row.copy_from_slice(own);
            rest = others;
        }
        Tensor::from_data(TensorData::new(padded, [rows, *width]), &self.device)
    }
}

/// Where a pass ends whose features are those of a tap.
fn end(tap: Tap) -> Until {
    match tap {
        Tap::Vision => Until::Images,
        Tap::Layer(layer) => Until::Layer(layer),
        Tap::Final => Until::Hidden,
    }
}

/// The valid tokens of `[b * s, width]` values, one after the other.
fn without_padding(batch: &MicroBatch, width: usize, values: &[f32]) -> Vec<f32> {
    let mut kept = Vec::with_capacity(width * batch.tokens() as usize);
    for (row, valid) in values.chunks_exact(batch.seq_len * width).zip(&batch.valid) {
        kept.extend_from_slice(&row[valid.start as usize * width..valid.end as usize * width]);
    }
    kept
}
