//! What the model reads of a chat: ids and patches, with the processor of its checkpoint.

use coxswain_data::DataError;
use coxswain_models::{
    directory,
    qwen2_5_vl::processor::{ChatEncoder, EncodedChat, ImageProcessor, ModelFacts, PixelBounds},
};

use super::{batch::ChatSample, spelling::Chat};
use crate::sft::config::{ChatData, SftSettings};

/// Reads an image's file by the name that its chat has for it, or says what is wrong with it.
pub type ReadImage<'a> = &'a dyn Fn(&str) -> Result<Vec<u8>, String>;

/// Reads chats, and questions that are to be answered. Shared between threads.
pub struct ChatReader {
    encoder: ChatEncoder,
    images: ImageProcessor,
}

impl ChatReader {
    /// With tokenizer and image settings of the run's checkpoint.
    pub fn open(settings: &SftSettings) -> Result<Self, DataError> {
        let model = &directory::outline(&settings.model.path)?;
        let facts = ModelFacts::read(model)?;
        Ok(Self {
            encoder: ChatEncoder::open(model, facts)?,
            images: ImageProcessor::open(model, facts.patches, bounds(&settings.data))?,
        })
    }

    /// Its tokenizer.
    pub fn encoder(&self) -> &ChatEncoder {
        &self.encoder
    }

    /// A whole chat.
    pub fn chat(&self, index: u64, chat: &Chat, read: ReadImage<'_>) -> Result<ChatSample, String> {
        let mut sample = self.pictures(&chat.images, read)?;
        let EncodedChat { ids, learned } = self.encoder.encode(&chat.messages, &sample.image_grids)?;
        (sample.index, sample.input_ids, sample.learned) = (index, ids, learned);
        Ok(sample)
    }

    /// A chat up to where the assistant's answer begins; nothing of it is learned.
    pub fn question(&self, chat: &Chat, read: ReadImage<'_>) -> Result<ChatSample, String> {
        let mut sample = self.pictures(&chat.images, read)?;
        sample.input_ids = self.encoder.encode_question(&chat.messages, &sample.image_grids)?;
        Ok(sample)
    }

    fn pictures(&self, images: &[String], read: ReadImage<'_>) -> Result<ChatSample, String> {
        let (mut sample, mut pixels) = (ChatSample::default(), Vec::new());
        for image in images {
            let patches = self.images.process_encoded(&read(image)?);
            let patches = patches.map_err(|fault| format!("{image}: {fault}"))?;
            sample.image_grids.push(patches.grid);
            pixels.extend_from_slice(&patches.pixel_values);
        }
        sample.pixel_values = pixels.into();
        Ok(sample)
    }
}

/// The run's own bounds of an image's pixels.
pub(super) fn bounds(data: &ChatData) -> PixelBounds {
    PixelBounds { min: data.min_pixels, max: data.max_pixels, ..PixelBounds::default() }
}
