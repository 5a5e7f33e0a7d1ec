//! A model that was read, and a micro-batch through it, as tasks see them.

use burn::tensor::Tensor;
use coxswain_models::{
    pretrained::{
        blocks::{InMemory, TablePlace},
        error::TokenError,
        job::Lap,
        prompts::Prompts,
        stack::SharedBlocks,
    },
    vision_language::{
        ModelOutline, PassError, Prefill, Tap, VisionLanguage, VlPass, VlRun, VlTrace, kept::without_padding,
        model::Forward,
    },
};
use coxswain_nn::{
    kernels::{DropoutRows, Tape},
    lora::LoraLinear,
    params::{GradientSums, Trainables},
    recompute::Retention,
};

use super::{
    decode::Continuation,
    model::Quilt,
    pass::{Pass, PassTrace},
};

impl<B: Tape<Base = B>> VisionLanguage<B> for Quilt<B> {
    fn outline(&self) -> &ModelOutline {
        &self.outline
    }

    fn in_memory(&self) -> InMemory {
        self.blocks.in_memory()
    }

    fn most_streamed(&self) -> u64 {
        self.blocks.most_streamed()
    }

    fn table_place(&self) -> TablePlace {
        TablePlace::Device
    }

    fn shared_blocks(&self) -> Option<SharedBlocks> {
        Some(SharedBlocks::new(vec![self.blocks.shared()?]))
    }

    fn head(&self) -> Option<&LoraLinear<B>> {
        self.head.as_ref()
    }

    fn run<'a>(&'a self, pass: VlPass<'a, B>) -> Result<Box<dyn VlRun<B> + 'a>, TokenError> {
        Ok(Box::new(Pass::new(self, pass)?))
    }

    fn decode<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        retention: Retention,
        prompts: Prompts<'_>,
    ) -> Result<Prefill<'a, B>, PassError> {
        let (rows, logits_bv) = Continuation::begin(self, trainables, retention, prompts)?;
        Ok((Box::new(rows), logits_bv))
    }
}

impl<B: Tape<Base = B>> VlRun<B> for Pass<'_, B> {
    fn forward(&self, reads: &[Tap], lap: Lap<'_>) -> Result<Forward<'_, B>, PassError> {
        let (read, kept) = Pass::forward(self, reads, lap)?;
        Ok((read, Box::new(TracedPass { pass: self, kept })))
    }

    fn until(&self, tap: Tap) -> Result<Tensor<B, 2>, PassError> {
        Pass::until(self, tap)
    }

    fn features(&self, tap: Tap) -> Result<Vec<f32>, PassError> {
        let (features, Prompts { rows, input_ids, .. }) = (self.until(tap)?, self.of.prompts);
        let [count, width] = features.dims();
        let values = match B::VALUES {
            true => features.into_data().convert::<f32>().into_vec().expect("converted to f32"),
            false => vec![0.0; count * width],
        };
        Ok(if tap == Tap::Vision { values } else { without_padding(rows, input_ids.len(), width, values) })
    }

    fn token_rows(&self) -> Option<&DropoutRows<B>> {
        self.dropped.as_ref().map(|dropped| &dropped.tokens)
    }
}

/// A pass that has run forward.
struct TracedPass<'r, B: Tape<Base = B>> {
    pass: &'r Pass<'r, B>,
    kept: PassTrace<'r, B>,
}

impl<B: Tape<Base = B>> VlTrace<B> for TracedPass<'_, B> {
    fn trains(&self) -> bool {
        self.kept.wanted
    }

    fn backward(
        self: Box<Self>,
        gradients: Vec<Tensor<B, 2>>,
        grads: &mut dyn GradientSums<B>,
        lap: Lap<'_>,
    ) -> Result<(), PassError> {
        self.pass.backward(self.kept, gradients, grads, lap)
    }
}
