//! What the model reads of a chat: ids and patches, with the processor of its checkpoint.

use coxswain_data::DataError;
use coxswain_models::{
    directory,
    qwen2_5_vl::processor::{
        ChatEncoder, EncodedChat, ImageProcessor, ModelFacts, PatchShape, PixelBounds, image_size,
    },
};

use super::{
    batch::ChatSample,
    images::{ChatImage, ImageSize},
    spelling::Chat,
};
use crate::sft::config::{ChatData, SftSettings};

/// Reads an image's file by the name that its chat has for it, or says what is wrong with it.
pub type ReadImage<'a> = &'a dyn Fn(&str) -> Result<Vec<u8>, String>;

/// Reads chats, and questions that are to be answered. Shared between threads.
pub struct ChatReader {
    encoder: ChatEncoder,
    images: ImageProcessor,
    shape: PatchShape,
}

impl ChatReader {
    /// With tokenizer and image settings of the run's checkpoint.
    pub fn open(settings: &SftSettings) -> Result<Self, DataError> {
        let model = &directory::outline(&settings.model.path)?;
        let facts = ModelFacts::read(model)?;
        Ok(Self {
            encoder: ChatEncoder::open(model, facts)?,
            images: ImageProcessor::open(model, facts.patches, bounds(&settings.data))?,
            shape: facts.patches,
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

    /// Most tokens of an image.
    pub fn image_tokens(&self) -> usize {
        let [_, most] = self.images.pixel_bounds();
        most / (self.shape.patch * self.shape.merge).pow(2)
    }

    /// A chat without its pictures, of whose images only the beginnings are read.
    pub fn outline(&self, chat: &Chat, head: ReadImage<'_>) -> Result<(EncodedChat, Vec<[u32; 3]>), String> {
        let grid = |ChatImage { path, size }: &ChatImage| {
            let stored = image_size(&head(path)?).ok_or_else(|| format!("{path}: has no size"))?;
            size.grid(&self.images, self.shape, stored)
        };
        let grids = chat.images.iter().map(grid).collect::<Result<Vec<_>, _>>()?;
        Ok((self.encoder.encode(&chat.messages, &grids)?, grids))
    }

    /// Keeps the images of the first `tokens` tokens alone.
    pub fn keep_images(&self, sample: &mut ChatSample, tokens: usize) {
        let mut left =
            sample.input_ids[..tokens].iter().filter(|id| **id == self.encoder.image_token()).count();
        let is_kept = |grid: &[u32; 3]| {
            let mine = self.shape.tokens(*grid);
            let is_whole = left >= mine;
            left -= mine.min(left);
            is_whole
        };
        let kept: Vec<_> = sample.image_grids.iter().copied().take_while(is_kept).collect();
        let patches: usize =
            kept.iter().map(|grid| grid.iter().map(|side| *side as usize).product::<usize>()).sum();
        if kept.len() < sample.image_grids.len() {
            let values = patches * self.images.columns();
            sample.pixel_values = sample.pixel_values[..values].to_vec().into();
            sample.image_grids = kept;
        }
    }

    fn pictures(&self, images: &[ChatImage], read: ReadImage<'_>) -> Result<ChatSample, String> {
        let (mut sample, mut pixels) = (ChatSample::default(), Vec::new());
        for ChatImage { path, size } in images {
            let encoded = read(path)?;
            let patches = match image_size(&encoded) {
                Some(stored) if *size != ImageSize::default() => size
                    .grid(&self.images, self.shape, stored)
                    .and_then(|grid| self.images.process_to(&encoded, grid)),
                _ => self.images.process_encoded(&encoded),
            };
            let patches = patches.map_err(|fault| format!("{path}: {fault}"))?;
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
