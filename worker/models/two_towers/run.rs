//! A micro-batch through the model, as tasks see it.

use std::borrow::Cow;

use burn::tensor::{Tensor, TensorData};
use coxswain_nn::{
    kernels::{DropoutRows, Tape},
    lora::LoraLinear,
    params::{GradientSums, Trainables},
    recompute::Retention,
};

use super::{
    decode::TowersDecoder,
    dropout::ModelRows,
    images::ImageFeatures,
    kept::SampleRows,
    model::TwoTowers,
    pass::{Entry, PassContext, PassTrace, TowersPass},
    streams::AtTap,
    vision::{VisionStem, VisionTower},
};
use crate::{
    pretrained::{
        blocks::{InMemory, TablePlace},
        error::TokenError,
        job::Lap,
        pictures::ImageShape,
        prompts::Prompts,
        stack::SharedBlocks,
    },
    vision_language::{
        KeptInput, ModelOutline, PassError, Prefill, Tap, VisionLanguage, VlPass, VlRun, VlTrace,
        kept::{padded, without_padding},
        model::Forward,
    },
};

impl<B: Tape<Base = B>, V: VisionTower<B>> VisionLanguage<B> for TwoTowers<B, V> {
    fn outline(&self) -> &ModelOutline {
        &self.outline
    }

    fn in_memory(&self) -> InMemory {
        self.text.layers.in_memory()
    }

    fn most_streamed(&self) -> u64 {
        // Never those of both towers.
        self.vision.stem().blocks().most_streamed().max(self.text.layers.most_streamed())
    }

    fn table_place(&self) -> TablePlace {
        self.embedding_place()
    }

    fn shared_blocks(&self) -> Option<SharedBlocks> {
        let towers = [self.vision.stem().blocks().shared(), self.text.layers.shared()];
        Some(SharedBlocks::new(towers.into_iter().collect::<Option<_>>()?))
    }

    fn head(&self) -> Option<&LoraLinear<B>> {
        TwoTowers::head(self)
    }

    fn run<'a>(&'a self, pass: VlPass<'a, B>) -> Result<Box<dyn VlRun<B> + 'a>, TokenError> {
        let context = PassContext::new(self, pass.prompts, pass.kept.map(|kept| kept.tap))?;
        let device = self.text.device();
        let dropout =
            pass.dropout.map(|of| ModelRows::new(self.sizes.merge.pow(2), of, pass.prompts, device));
        Ok(Box::new(TowersRun { model: self, pass, context, dropout }))
    }

    fn decode<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        retention: Retention,
        prompts: Prompts<'_>,
    ) -> Result<Prefill<'a, B>, PassError> {
        let (decoder, logits_bv) = TowersDecoder::begin(self, trainables, retention, prompts)?;
        Ok((Box::new(decoder), logits_bv))
    }
}

/// A model with one micro-batch's context.
struct TowersRun<'a, B: Tape<Base = B>, V: VisionTower<B>> {
    model: &'a TwoTowers<B, V>,
    pass: VlPass<'a, B>,
    context: PassContext<B, V>,
    dropout: Option<ModelRows<B>>,
}

impl<'a, B: Tape<Base = B>, V: VisionTower<B>> TowersRun<'a, B, V> {
    fn vl<'r>(&'r self) -> TowersPass<'r, B, V> {
        let VlPass { trainables, retention, .. } = self.pass;
        TowersPass {
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
        let (tokens, width) = (input_ids.len(), self.width());
        let mut parts = self.parts(tap, values).into_iter();
        let mut part = || parts.next().unwrap_or_default();
        let values = match (part(), tap) {
            (values, Tap::Layer(_) | Tap::Final) if B::VALUES => {
                let values = padded(rows, tokens, width, &values).unwrap_or_else(|| values.into_owned());
                self.uploaded(values, tokens)
            }
            (_, Tap::Layer(_) | Tap::Final) => self.uploaded(vec![], tokens),
            (values, Tap::Vision) => self.uploaded(values.into_owned(), self.images()),
        };
        let streams = if self.images() == 0 { 0 } else { self.streams_above(tap) };
        let streams_md = (0..streams).map(|_| self.uploaded(part().into_owned(), self.images())).collect();
        match tap {
            Tap::Vision => Entry::Images(ImageFeatures { features_md: values, streams_md }),
            Tap::Layer(layer) => Entry::Layer(layer, AtTap { values, streams_md }),
            Tap::Final => Entry::Hidden(values),
        }
    }

    /// Tokens of images.
    fn images(&self) -> usize {
        self.context.image_rows.len()
    }

    /// Values of a row.
    fn width(&self) -> usize {
        self.model.sizes.text.hidden_size
    }

    /// Streams that are added above a tap.
    fn streams_above(&self, tap: Tap) -> usize {
        self.model.outline.streams_above(tap)
    }

    /// Rows that each sample has at a tap.
    fn sample_rows(&self, tap: Tap) -> SampleRows {
        let Prompts { input_ids, rows, images, .. } = self.pass.prompts;
        let mut images = images.iter();
        let tokens = |shape: &ImageShape| self.model.outline.patches.tokens(*shape);
        let counts = self.context.images_per_row.iter();
        let of_images: Vec<usize> =
            counts.map(|&count| images.by_ref().take(count).map(tokens).sum()).collect();
        match tap {
            Tap::Vision => SampleRows::new(of_images.clone(), of_images),
            Tap::Layer(_) | Tap::Final => {
                SampleRows::new(rows.cells(input_ids.len()).into_iter().map(|cells| cells.len()), of_images)
            }
        }
    }

    /// Kept values, by what they are of: hidden states or features, then each stream. Where nothing is
    /// computed, nothing is copied.
    fn parts<'k>(&self, tap: Tap, values: &'k [f32]) -> Vec<Cow<'k, [f32]>> {
        match self.streams_above(tap) {
            _ if !B::VALUES => vec![],
            0 => vec![Cow::Borrowed(values)],
            streams => {
                let parts = self.sample_rows(tap).apart(values, streams, self.width());
                parts.into_iter().map(Cow::Owned).collect()
            }
        }
    }

    fn uploaded(&self, values: Vec<f32>, rows: usize) -> Tensor<B, 2> {
        let (shape, device) = ([rows, self.width()], self.model.text.device());
        match B::VALUES {
            true => Tensor::from_data(TensorData::new(values, shape), device),
            false => Tensor::zeros(shape, device),
        }
    }
}

impl<B: Tape<Base = B>, V: VisionTower<B>> VlRun<B> for TowersRun<'_, B, V> {
    fn forward(&self, reads: &[Tap], lap: Lap<'_>) -> Result<Forward<'_, B>, PassError> {
        let vl = self.vl();
        let (read, trace) = vl.forward(self.pass.prompts, self.entry(), reads, lap)?;
        Ok((read, Box::new(TowersTrace { vl, prompts: self.pass.prompts, trace })))
    }

    fn until(&self, tap: Tap) -> Result<Tensor<B, 2>, PassError> {
        Ok(self.vl().features(self.pass.prompts, self.entry(), tap)?.values)
    }

    fn features(&self, tap: Tap) -> Result<Vec<f32>, PassError> {
        let AtTap { values, streams_md } = self.vl().features(self.pass.prompts, self.entry(), tap)?;
        let Prompts { input_ids, rows, .. } = self.pass.prompts;
        let values = match tap {
            Tap::Vision => downloaded(values),
            Tap::Layer(_) | Tap::Final => {
                without_padding(rows, input_ids.len(), self.width(), downloaded(values))
            }
        };
        // Below the vision tower's end a batch without images has none either.
        if streams_md.is_empty() {
            return Ok(values);
        }
        let parts: Vec<_> = [values].into_iter().chain(streams_md.into_iter().map(downloaded)).collect();
        Ok(self.sample_rows(tap).together(&parts, self.width()))
    }

    fn token_rows(&self) -> Option<&DropoutRows<B>> {
        self.dropout.as_ref().map(|rows| &rows.tokens)
    }
}

/// Values in host memory; zeros where there are none.
fn downloaded<B: Tape<Base = B>>(x: Tensor<B, 2>) -> Vec<f32> {
    match B::VALUES {
        true => x.into_data().convert::<f32>().into_vec().expect("converted to f32"),
        false => vec![0.0; x.shape().num_elements()],
    }
}

struct TowersTrace<'r, B: Tape<Base = B>, V: VisionTower<B>> {
    vl: TowersPass<'r, B, V>,
    prompts: Prompts<'r>,
    trace: PassTrace<'r, B>,
}

impl<B: Tape<Base = B>, V: VisionTower<B>> VlTrace<B> for TowersTrace<'_, B, V> {
    fn trains(&self) -> bool {
        self.trace.trains()
    }

    fn backward(
        self: Box<Self>,
        gradients: Vec<Tensor<B, 2>>,
        grads: &mut dyn GradientSums<B>,
        lap: Lap<'_>,
    ) -> Result<(), PassError> {
        let Self { vl, prompts, trace } = *self;
        vl.backward(prompts, trace, gradients, grads, lap)
    }
}
