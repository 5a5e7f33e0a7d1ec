//! How large a run's samples are, without opening images beyond their headers: what a memory prediction needs
//! to know of the data.
//!
//! Sizes are those of the *longest* chat: the largest micro-batch is what has to fit.

use std::{collections::HashMap, path::Path};

use coxswain_data::DataError;
use coxswain_models::{
    Shelf,
    pretrained::{
        directory,
        pictures::{ImageProcessor, ImageShape, image_size},
    },
    vision_language::{Message, Piece},
};
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_proto::run_spec::RunSpec;

use super::{images::ChatImage, opening::open, reader, source::ChatSource};
use crate::{
    settings::unread,
    sft::config::SftSettings,
    tokens::outline::{SMALL_TOKENIZER, estimated, looked_at},
};

/// Tokens around a turn: its marks, role and line breaks.
const TURN_TOKENS: usize = 6;
/// Tokens around one image.
const IMAGE_TOKENS: usize = 2;
/// Bytes of an image's file that hold its size.
pub(super) const HEADER: u64 = 256 << 10;

/// Sizes of a run's samples.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatOutline {
    /// Tokens of the longest chat, images included.
    pub tokens: usize,
    /// Most tokens of a chat that are learned.
    pub learned: usize,
    /// Shapes of the images of the chat with most patches.
    pub images: Vec<ImageShape>,
    /// Most patches of a chat.
    pub patches: usize,
    /// Whether tokens are an estimate.
    pub estimated: bool,
    /// Chats.
    pub chats: u64,
    /// Bytes of the tokenizer's file; 0 if there is none.
    pub tokenizer_bytes: u64,
}

impl ChatOutline {
    /// Reads the run's chats, the headers of their images, and of its checkpoint what sizes depend on. A chat
    /// of which an image cannot be read does not count, unless there is no other.
    pub fn from_settings(
        spec: &RunSpec,
        settings: &SftSettings,
        models: Shelf<Sizes>,
    ) -> Result<Self, DataError> {
        let (path, model) = (Path::new(&spec.data.path), &directory::outline(&settings.model.path)?);
        let source = open(path, &settings.data)?;
        let family = models.vision_language.of(model).map_err(unread)?;
        let tokenizer_bytes = std::fs::metadata(model.join("tokenizer.json")).map_or(0, |file| file.len());
        let small = (1..=SMALL_TOKENIZER).contains(&tokenizer_bytes);
        let encoder = small.then(|| family.chats(model)).transpose()?;
        let processor = family.images(model, reader::bounds(&settings.data))?;
        let patches = processor.patches();
        let mut sizes = ImageSizes { source: &*source, processor, known: HashMap::new() };
        let mut outline =
            Self { chats: source.len(), tokenizer_bytes, estimated: encoder.is_none(), ..Self::default() };
        let looked_at = looked_at(outline.chats);
        outline.estimated |= (looked_at.len() as u64) < outline.chats;
        let mut unusable = None;
        for index in looked_at {
            let refuse = |fault| source.fault(index, fault);
            let chat = source.chat(index)?;
            let images =
                chat.images.iter().map(|image| sizes.shape(index, image)).collect::<Result<Vec<_>, _>>();
            // A run leaves such a chat out, as long as they are few.
            let images = match images {
                Ok(images) => images,
                Err(fault) => {
                    unusable.get_or_insert(refuse(fault));
                    continue;
                }
            };
            let (tokens, learned) = match &encoder {
                Some(encoder) => {
                    let messages = reader::shortened(&chat.messages, settings.data.max_tokens);
                    let encoded = encoder.encode(&messages, &images).map_err(refuse)?;
                    (encoded.ids.len(), encoded.learned.iter().filter(|learned| **learned).count())
                }
                None => {
                    let seen = images.iter().map(|shape| patches.tokens(*shape) + IMAGE_TOKENS);
                    let tokens = seen.sum::<usize>() + in_texts(&chat.messages);
                    (tokens, tokens)
                }
            };
            let most = settings.data.max_tokens;
            outline.tokens = outline.tokens.max(tokens.min(most));
            outline.learned = outline.learned.max(learned.min(most));
            let seen = images.iter().map(|shape| patches.count(*shape)).sum();
            if seen > outline.patches {
                (outline.images, outline.patches) = (images, seen);
            }
        }
        unusable.filter(|_| outline.tokens == 0).map_or(Ok(outline), Err)
    }
}

/// Tokens of a chat's text, estimated.
fn in_texts(messages: &[Message]) -> usize {
    let bytes = |message: &Message| -> usize {
        let texts = message.pieces.iter().map(|piece| match piece {
            Piece::Text(text) => text.len(),
            Piece::Image => 0,
        });
        texts.sum()
    };
    messages.iter().map(|message| TURN_TOKENS + estimated(bytes(message))).sum()
}

/// Shapes of images, each file's header read once.
struct ImageSizes<'a> {
    source: &'a dyn ChatSource,
    processor: Box<dyn ImageProcessor>,
    /// Height and width, by what tells an image from those of all chats.
    known: HashMap<String, (usize, usize)>,
}

impl ImageSizes<'_> {
    fn shape(&mut self, index: u64, ChatImage { path, size }: &ChatImage) -> Result<ImageShape, String> {
        let key = self.source.image_key(index, path);
        let stored = match self.known.get(&key) {
            Some(stored) => *stored,
            None => {
                let header = self.source.image(index, path, HEADER)?;
                let stored = image_size(&header);
                stored.ok_or_else(|| format!("{path}: is neither PNG nor JPEG; convert the image"))?
            }
        };
        self.known.insert(key, stored);
        size.shape(&*self.processor, stored).map_err(|fault| format!("{path}: {fault}"))
    }
}
