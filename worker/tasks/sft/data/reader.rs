//! What the model reads of a chat: ids and patches, with the processor of its checkpoint.

use std::borrow::Cow;

use coxswain_data::DataError;
use coxswain_models::{
    Shelf,
    pretrained::{
        directory,
        pictures::{ImageProcessor, ImageShape, PixelBounds, decode, image_size},
    },
    vision_language::{ChatEncoder, EncodedChat, Message, Piece},
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

/// Bytes of a text that become one token at most: twice the 128 spaces of the longest in Qwen's vocabularies,
/// since normalization may shorten a text.
const TOKEN_BYTES: usize = 256;

/// Reads an image's file by the name that its chat has for it, or says what is wrong with it.
pub type ReadImage<'a> = &'a dyn Fn(&str) -> Result<Vec<u8>, String>;

/// Reads chats, and questions that are to be answered. Shared between threads.
pub struct ChatReader {
    encoder: Box<dyn ChatEncoder>,
    images: Box<dyn ImageProcessor>,
    max_tokens: usize,
}

impl ChatReader {
    /// With tokenizer and image settings of the run's checkpoint.
    pub fn from_settings(settings: &SftSettings, models: Shelf<Sizes>) -> Result<Self, DataError> {
        let model = &directory::outline(&settings.model.path)?;
        let family = models.vision_language.of(model).map_err(unread)?;
        let (encoder, images) = (family.chats(model)?, family.images(model, bounds(&settings.data))?);
        Ok(Self { encoder, images, max_tokens: settings.data.max_tokens })
    }

    /// Tokenizer.
    pub fn encoder(&self) -> &dyn ChatEncoder {
        &*self.encoder
    }

    /// A whole chat.
    pub fn chat(&self, index: u64, chat: &Chat, read: ReadImage<'_>) -> Result<ChatSample, String> {
        let mut sample = self.pictures(&chat.images, read)?;
        let EncodedChat { ids, learned } = self.encoded(chat, &sample.image_shapes)?;
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
        let shapes = self.image_shapes(chat, head)?;
        Ok((self.encoded(chat, &shapes)?, shapes))
    }

    fn encoded(&self, chat: &Chat, shapes: &[ImageShape]) -> Result<EncodedChat, String> {
        self.encoder.encode(&shortened(&chat.messages, self.max_tokens), shapes)
    }

    /// Shapes of a chat's images, of which only the beginnings are read.
    pub fn image_shapes(&self, chat: &Chat, head: ReadImage<'_>) -> Result<Vec<ImageShape>, String> {
        let shape = |ChatImage { path, size }: &ChatImage| {
            let stored =
                image_size(&head(path)?).ok_or_else(|| format!("{path}: is neither PNG nor JPEG"))?;
            size.shape(&*self.images, stored)
        };
        chat.images.iter().map(shape).collect()
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

/// Turns whose texts end where more than `tokens` tokens have come, so that one of megabytes is not encoded
/// for the little that is kept of it. They end between two words: what comes before has the same ids.
pub(super) fn shortened(messages: &[Message], tokens: usize) -> Cow<'_, [Message]> {
    let least = tokens.saturating_mul(TOKEN_BYTES);
    let is_long = |piece: &Piece| matches!(piece, Piece::Text(text) if text.len() > least);
    if !messages.iter().flat_map(|message| &message.pieces).any(is_long) {
        return Cow::Borrowed(messages);
    }
    let is_between =
        |bytes: &[u8]| bytes[0].is_ascii_alphabetic() && bytes[1] == b' ' && bytes[2].is_ascii_alphabetic();
    let mut messages = messages.to_vec();
    for piece in messages.iter_mut().flat_map(|message| &mut message.pieces) {
        if let Piece::Text(text) = piece
            && let Some(at) = text.as_bytes().windows(3).skip(least).position(is_between)
        {
            text.truncate(least + at + 1);
        }
    }
    Cow::Owned(messages)
}

/// The run's own bounds of an image's pixels.
pub(super) fn bounds(data: &ChatData) -> PixelBounds {
    PixelBounds { min: data.min_pixels, max: data.max_pixels, ..PixelBounds::default() }
}

#[cfg(test)]
mod tests {
    use coxswain_models::vision_language::Role;

    use super::*;

    #[test]
    fn a_text_of_megabytes_ends_between_two_words_and_others_stay() {
        let message = |text: &str| Message::new(Role::User, vec![Piece::Image, Piece::Text(text.to_owned())]);
        let (short, glued) = ("word ".repeat(50), "a".repeat(1 << 20));
        let messages = [message(&short), message(&"word ".repeat(1 << 20)), message(&glued), message("end")];
        assert!(matches!(shortened(&messages[..1], 10), Cow::Borrowed(_)));
        let found = shortened(&messages, 10);
        let [Piece::Image, Piece::Text(text)] = &found[1].pieces[..] else { panic!("{:?}", found[1].pieces) };
        let whole = "word ".repeat(10 * TOKEN_BYTES);
        assert!(text.ends_with("word") && whole.starts_with(text.as_str()), "{} bytes", text.len());
        assert!((10 * TOKEN_BYTES..11 * TOKEN_BYTES).contains(&text.len()), "{} bytes", text.len());
        assert_eq!((&found[0], &found[2..]), (&messages[0], &messages[2..]));
    }
}
