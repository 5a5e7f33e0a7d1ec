//! A micro-batch through the model, as tasks see it.

use burn::tensor::{Tensor, TensorData};
use coxswain_nn::{
    kernels::{DropoutRows, Tape},
    lora::LoraLinear,
    params::{GradientSums, Trainables},
    recompute::Retention,
};

use super::{
    decode::QwenDecoder,
    dropout::ModelRows,
    model::QwenVl,
    pass::{Entry, PassContext, PassTrace, QwenPass},
};
use crate::{
    pretrained::{
        blocks::{InMemory, TablePlace},
        error::TokenError,
        job::Lap,
        prompts::Prompts,
        stack::SharedBlocks,
    },
    vision_language::{
        Begun, Broken, KeptInput, ModelOutline, Tap, VisionLanguage, VlPass, VlRun, VlTrace,
        kept::{padded, without_padding},
        model::Forward,
    },
};

impl<B: Tape<Base = B>> VisionLanguage<B> for QwenVl<B> {
    fn outline(&self) -> &ModelOutline {
        &self.outline
    }

    fn in_memory(&self) -> InMemory {
        self.text.layers.in_memory()
    }

    fn most_streamed(&self) -> u64 {
        // Never those of both towers.
        self.vision.blocks.most_streamed().max(self.text.layers.most_streamed())
    }

    fn table_place(&self) -> TablePlace {
        self.embedding_place()
    }

    fn shared_blocks(&self) -> Option<SharedBlocks> {
        let towers = [self.vision.blocks.shared(), self.text.layers.shared()];
        Some(SharedBlocks::new(towers.into_iter().collect::<Option<_>>()?))
    }

    fn head(&self) -> Option<&LoraLinear<B>> {
        QwenVl::head(self)
    }

    fn run<'a>(&'a self, pass: VlPass<'a, B>) -> Result<Box<dyn VlRun<B> + 'a>, TokenError> {
        let context = PassContext::new(self, pass.prompts, pass.kept.map(|kept| kept.tap))?;
        let device = self.text.device();
        let dropout = pass.dropout.map(|of| ModelRows::new(&self.config, of, pass.prompts, device));
        Ok(Box::new(QwenRun { model: self, pass, context, dropout }))
    }

    fn decode<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        retention: Retention,
        prompts: Prompts<'_>,
    ) -> Result<Begun<'a, B>, Broken> {
        let (decoder, logits_bv) = QwenDecoder::begin(self, trainables, retention, prompts)?;
        Ok((Box::new(decoder), logits_bv))
    }
}

/// A model with one micro-batch's context.
struct QwenRun<'a, B: Tape<Base = B>> {
    model: &'a QwenVl<B>,
    pass: VlPass<'a, B>,
    context: PassContext<B>,
    dropout: Option<ModelRows<B>>,
}

impl<'a, B: Tape<Base = B>> QwenRun<'a, B> {
    fn vl<'r>(&'r self) -> QwenPass<'r, B> {
        let VlPass { trainables, retention, .. } = self.pass;
        QwenPass {
            model: self.model,
            context: &self.context,
            trainables,
            retention,
            dropout: self.dropout.as_ref(),
        }
    }

    /// What the pass begins with, on the device.
    fn entry(&self) -> Entry<B> {
        let Some(KeptInput { tap, values }) = self.pass.kept else { return Entry::Pixels };
        let Prompts { input_ids, rows, .. } = self.pass.prompts;
        let width = self.model.config.text.hidden_size;
        let placed = || {
            // Kept features are megabytes a sample; where nothing is computed, nothing is copied.
            if !B::VALUES {
                return Tensor::zeros([input_ids.len(), width], self.model.text.device());
            }
            match padded(rows, input_ids.len(), width, values) {
                Some(padded) => self.uploaded(padded, width),
                None => self.uploaded(values.to_vec(), width),
            }
        };
        match tap {
            Tap::Vision if !B::VALUES => {
                Entry::Images(Tensor::zeros([values.len() / width, width], self.model.text.device()))
            }
            Tap::Vision => Entry::Images(self.uploaded(values.to_vec(), width)),
            Tap::Layer(layer) => Entry::Layer(layer, placed()),
            Tap::Final => Entry::Hidden(placed()),
        }
    }

    fn uploaded(&self, values: Vec<f32>, width: usize) -> Tensor<B, 2> {
        let shape = [values.len() / width, width];
        Tensor::from_data(TensorData::new(values, shape), self.model.text.device())
    }
}

impl<B: Tape<Base = B>> VlRun<B> for QwenRun<'_, B> {
    fn forward(&self, reads: &[Tap], lap: Lap<'_>) -> Result<Forward<'_, B>, Broken> {
        let vl = self.vl();
        let (read, trace) = vl.forward(self.pass.prompts, self.entry(), reads, lap)?;
        Ok((read, Box::new(QwenTrace { vl, prompts: self.pass.prompts, trace })))
    }

    fn until(&self, tap: Tap) -> Result<Tensor<B, 2>, Broken> {
        self.vl().features(self.pass.prompts, self.entry(), tap)
    }

    fn features(&self, tap: Tap) -> Result<Vec<f32>, Broken> {
        let features = self.until(tap)?;
        let [_, width] = features.dims();
        let values = match B::VALUES {
            true => features.into_data().convert::<f32>().into_vec().expect("converted to f32"),
            false => vec![0.0; features.shape().num_elements()],
        };
        let Prompts { input_ids, rows, .. } = self.pass.prompts;
        Ok(match tap {
            Tap::Vision => values,
            Tap::Layer(_) | Tap::Final => without_padding(rows, input_ids.len(), width, values),
        })
    }

    fn token_rows(&self) -> Option<&DropoutRows<B>> {
        self.dropout.as_ref().map(|rows| &rows.tokens)
    }
}

struct QwenTrace<'r, B: Tape<Base = B>> {
    vl: QwenPass<'r, B>,
    prompts: Prompts<'r>,
    trace: PassTrace<'r, B>,
}

impl<B: Tape<Base = B>> VlTrace<B> for QwenTrace<'_, B> {
    fn trains(&self) -> bool {
        self.trace.trains()
    }

    fn backward(
        self: Box<Self>,
        gradients: Vec<Tensor<B, 2>>,
        grads: &mut dyn GradientSums<B>,
        lap: Lap<'_>,
    ) -> Result<(), Broken> {
        let Self { vl, prompts, trace } = *self;
        vl.backward(prompts, trace, gradients, grads, lap)
    }
}
