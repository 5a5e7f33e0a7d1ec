//! What the model reads of a chat: ids and patches, with the processor of its checkpoint.

use coxswain_data::DataError;
use coxswain_models::{
    Shelf,
    pretrained::{
        directory,
        pictures::{ImageProcessor, PixelBounds, decode},
    },
    vision_language::{ChatEncoder, EncodedChat},
};
use coxswain_nn::kernels::sizes::Sizes;

use super::{batch::ChatSample, spelling::Chat};
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

    fn pictures(&self, images: &[String], read: ReadImage<'_>) -> Result<ChatSample, String> {
        let (mut sample, mut pixels) = (ChatSample::default(), Vec::new());
        for image in images {
            let input = decode(&read(image)?).and_then(|decoded| self.images.process(decoded));
            let input = input.map_err(|fault| format!("{image}: {fault}"))?;
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
