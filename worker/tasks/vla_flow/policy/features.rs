//! Features at the policy's tap: computed to be kept, and taken instead of pixels.
//!
//! A feature's value depends on its own sample alone, bit for bit: not on which samples share the
//! micro-batch, nor on how far they are padded (`kernels::flex`). So it does not matter in which batch it was
//! computed.
//!
//! What this file does not do: know where features are kept, or how they are rounded there.

use burn::tensor::Tensor;
use coxswain_models::{
    pretrained::trains::Trains,
    vision_language::{KeptInput, Tap, VlPass, VlRun},
};
use coxswain_nn::{kernels::Tape, params::Trainables, recompute::Retention};
use coxswain_proto::run_spec::Recompute;
use coxswain_task::CachedFeatures;

use super::{
    error::{StepError, failed},
    parts::{Policy, VlFeatures, keys_mask},
    tap::{TrainedParts, describe},
};
use crate::vla_flow::data::batch::MicroBatch;

impl<B: Tape<Base = B>> Policy<B> {
    /// Where features are taken; none if the run's cache is off.
    pub fn tap(&self) -> Option<Tap> {
        self.tap
    }

    /// For the log: where features are taken, what is skipped, what trains when.
    pub fn describe_tap(&self) -> Option<[String; 3]> {
        let trains = Trains { lora: self.lora(), full: Some(&self.full) };
        let adapted = TrainedParts::new(self.model.outline(), trains);
        self.tap.map(|tap| describe(tap, self.settings.cache, &adapted))
    }

    /// Values of a token at any tap.
    pub fn tap_width(&self) -> usize {
        self.model.outline().hidden_size
    }

    /// Rows of features that each row of a micro-batch has at the tap. Empty without a tap.
    pub fn tap_tokens(&self, batch: &MicroBatch) -> Vec<usize> {
        let Some(tap) = self.tap else { return Vec::new() };
        let mut images = &batch.image_shapes[..];
        let rows = batch.images_per_row.iter().zip(&batch.valid).map(|(&count, valid)| {
            let (own, others) = images.split_at(count as usize);
            images = others;
            self.model.outline().rows_at(tap, valid.len(), own)
        });
        rows.collect()
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
        let run = self.without_trace(trainables, batch, None)?;
        let values = run.features(tap).map_err(|broken| failed(batch, broken))?;
        Ok(CachedFeatures { width, values })
    }

    /// What the head reads, without a trace, `[b * s, d]` each.
    pub(super) fn hidden_states(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
    ) -> Result<Vec<Tensor<B, 2>>, StepError> {
        let run = self.without_trace(trainables, batch, self.kept(batch)?)?;
        let read = match self.reads[..] {
            [tap] => run.until(tap).map(|only| vec![only]),
            _ => run.forward(&self.reads, &mut |_| {}).map(|(read, _)| read),
        };
        read.map_err(|broken| failed(batch, broken))
    }

    /// The final hidden states, without a trace.
    pub fn vl_features(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
    ) -> Result<VlFeatures<B>, StepError> {
        let run = self.without_trace(trainables, batch, self.kept(batch)?)?;
        let hidden_nd = run.until(Tap::Final).map_err(|broken| failed(batch, broken))?;
        Ok(VlFeatures { hidden_nd, mask: keys_mask(batch) })
    }

    /// As little as there is is kept for a backward pass, and every value is the one that a training pass
    /// computes.
    fn without_trace<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        batch: &'a MicroBatch,
        kept: Option<KeptInput<'a>>,
    ) -> Result<Box<dyn VlRun<B> + 'a>, StepError> {
        let retention = Retention { recompute: Recompute::Full, ..self.settings.retention };
        let pass = VlPass { prompts: batch.prompts(), kept, trainables, retention, dropout: None };
        self.model.run(pass).map_err(|broken| failed(batch, broken))
    }

    /// The features that a pass over this micro-batch begins with; none where it begins with pixels.
    pub(super) fn kept<'b>(&self, batch: &'b MicroBatch) -> Result<Option<KeptInput<'b>>, StepError> {
        let Some(features) = &batch.features else { return Ok(None) };
        let wrong = |problem| {
            Err(StepError::Features { step: batch.step, samples: batch.sample_indices.clone(), problem })
        };
        let Some(tap) = self.tap else {
            return wrong("found, but the run's cache is off (cache.mode)".into());
        };
        let (width, count) = (self.tap_width(), self.tap_tokens(batch).into_iter().sum::<usize>());
        if features.width != width || features.values.len() != width * count {
            return wrong(format!(
                "{} values, {} per token; expected {count} tokens of {width} values at {tap}",
                features.values.len(),
                features.width
            ));
        }
        Ok(Some(KeptInput { tap, values: &features.values }))
    }
}
