//! What the model reads of a chat: ids and patches, with the processor of its checkpoint.

use coxswain_data::DataError;
use coxswain_models::{
    Shelf,
    pretrained::{
        directory,
        pictures::{ImageProcessor, ImageShape, PixelBounds, decode, image_size},
    },
    vision_language::{ChatEncoder, EncodedChat},
};
use coxswain_nn::kernels::sizes::Sizes;

use super::{
    batch::ChatSample,
    images::{ChatImage, ImageSize},
    spelling::Chat,
};
use crate::{
    settings::unread,
    sft::config::{ChatData, SftSettings},
};

/// Reads an image's file by the name that its chat has for it, or says what is wrong with it.
pub type ReadImage<'a> = &'a dyn Fn(&str) -> Result<Vec<u8>, String>;

/// Reads chats, and questions that are to be answered. Shared between threads.
pub struct ChatReader {
    encoder: Box<dyn ChatEncoder>,
    images: Box<dyn ImageProcessor>,
}

impl ChatReader {
    /// With tokenizer and image settings of the run's checkpoint.
    pub fn open(settings: &SftSettings, models: Shelf<Sizes>) -> Result<Self, DataError> {
        let model = &directory::outline(&settings.model.path)?;
        let family = models.vision_language.of(model).map_err(unread)?;
        Ok(Self { encoder: family.chats(model)?, images: family.images(model, bounds(&settings.data))? })
    }

    /// Its tokenizer.
    pub fn encoder(&self) -> &dyn ChatEncoder {
        &*self.encoder
    }

    /// A whole chat.
    pub fn chat(&self, index: u64, chat: &Chat, read: ReadImage<'_>) -> Result<ChatSample, String> {
        let mut sample = self.pictures(&chat.images, read)?;
        let EncodedChat { ids, learned } = self.encoder.encode(&chat.messages, &sample.image_shapes)?;
        (sample.index, sample.input_ids, sample.learned) = (index, ids, learned);
        Ok(sample)
    }

    /// A chat up to where the assistant's answer begins; nothing of it is learned.
    pub fn question(&self, chat: &Chat, read: ReadImage<'_>) -> Result<ChatSample, String> {
        let mut sample = self.pictures(&chat.images, read)?;
        sample.input_ids = self.encoder.encode_question(&chat.messages, &sample.image_shapes)?;
        Ok(sample)
    }

    /// Most tokens of an image.
    pub fn image_tokens(&self) -> usize {
        let [_, most] = self.images.pixel_bounds();
        let shape = self.images.patches();
        most / (shape.patch * shape.merge).pow(2)
    }

    /// A chat without its pictures, of whose images only the beginnings are read.
    pub fn outline(
        &self,
        chat: &Chat,
        head: ReadImage<'_>,
    ) -> Result<(EncodedChat, Vec<ImageShape>), String> {
        let shape = |ChatImage { path, size }: &ChatImage| {
            let stored = image_size(&head(path)?).ok_or_else(|| format!("{path}: has no size"))?;
            size.shape(&*self.images, stored)
        };
        let shapes = chat.images.iter().map(shape).collect::<Result<Vec<_>, _>>()?;
        Ok((self.encoder.encode(&chat.messages, &shapes)?, shapes))
    }

    /// Keeps the images of the first `tokens` tokens alone.
    pub fn keep_images(&self, sample: &mut ChatSample, tokens: usize) {
        let mut left =
            sample.input_ids[..tokens].iter().filter(|id| **id == self.encoder.image_token()).count();
        let patches = self.images.patches();
        let is_kept = |shape: &ImageShape| {
            let mine = patches.tokens(*shape);
            let is_whole = left >= mine;
            left -= mine.min(left);
            is_whole
        };
        let kept: Vec<_> = sample.image_shapes.iter().copied().take_while(is_kept).collect();
        if kept.len() < sample.image_shapes.len() {
            let values = kept.iter().map(|shape| patches.values(*shape)).sum::<usize>();
            sample.pixel_values = sample.pixel_values[..values].to_vec().into();
            sample.image_shapes = kept;
        }
    }

    fn pictures(&self, images: &[ChatImage], read: ReadImage<'_>) -> Result<ChatSample, String> {
        let (mut sample, mut pixels) = (ChatSample::default(), Vec::new());
        for ChatImage { path, size } in images {
            let encoded = read(path)?;
            let decoded = decode(&encoded).map_err(|fault| format!("{path}: {fault}"))?;
            let input = match image_size(&encoded) {
                Some(stored) if *size != ImageSize::default() => {
                    size.shape(&*self.images, stored).map(|shape| self.images.process_to(decoded, shape))
                }
                _ => self.images.process(decoded),
            };
            let input = input.map_err(|fault| format!("{path}: {fault}"))?;
            sample.image_shapes.push(input.shape);
            pixels.extend_from_slice(&input.pixel_values);
        }
        sample.pixel_values = pixels.into();
        Ok(sample)
    }
}

/// The run's own bounds of an image's pixels.
pub(super) fn bounds(data: &ChatData) -> PixelBounds {
    PixelBounds { min: data.min_pixels, max: data.max_pixels, ..PixelBounds::default() }
}
