//! How large a run's samples are, without opening images beyond their headers: what a memory prediction needs
//! to know of the data.
//!
//! Sizes are those of the *longest* chat: the largest micro-batch is what has to fit.

use std::{collections::HashMap, path::Path};

use coxswain_data::DataError;
use coxswain_models::{
    directory,
    qwen2_5_vl::processor::{
        ChatEncoder, ImageProcessor, Message, ModelFacts, PatchShape, Piece, image_size,
    },
};
use coxswain_proto::run_spec::RunSpec;

use super::{images::ChatImage, opening::open, reader, source::ChatSource};
use crate::{
    settings::checked,
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
    /// Of the images of the chat with most patches, `(t, h, w)`.
    pub grids: Vec<[u32; 3]>,
    /// Whether tokens are an estimate.
    pub estimated: bool,
    /// Chats.
    pub chats: u64,
    /// Bytes of the tokenizer's file; 0 if there is none.
    pub tokenizer_bytes: u64,
}

impl ChatOutline {
    /// Reads the run's chats, the headers of their images, and of its checkpoint what sizes depend on.
    pub fn read(spec: &RunSpec) -> Result<Self, DataError> {
        let settings = checked(SftSettings::of(spec))?;
        let (path, model) = (Path::new(&spec.data.path), &directory::outline(&settings.model.path)?);
        let source = open(path, &settings.data)?;
        let facts = ModelFacts::read(model)?;
        let tokenizer_bytes = std::fs::metadata(model.join("tokenizer.json")).map_or(0, |file| file.len());
        let small = (1..=SMALL_TOKENIZER).contains(&tokenizer_bytes);
        let encoder = small.then(|| ChatEncoder::open(model, facts)).transpose()?;
        let images = ImageProcessor::open(model, facts.patches, reader::bounds(&settings.data))?;
        let (shape, known) = (facts.patches, HashMap::new());
        let mut sizes = ImageSizes { source: &*source, images, shape, known };
        let mut outline =
            Self { chats: source.len(), tokenizer_bytes, estimated: encoder.is_none(), ..Self::default() };
        let looked_at = looked_at(outline.chats);
        outline.estimated |= (looked_at.len() as u64) < outline.chats;
        for index in looked_at {
            let refuse = |fault| source.fault(index, fault);
            let chat = source.chat(index)?;
            let grids =
                chat.images.iter().map(|image| sizes.grid(index, image)).collect::<Result<Vec<_>, _>>();
            let grids = grids.map_err(refuse)?;
            let (tokens, learned) = match &encoder {
                Some(encoder) => {
                    let encoded = encoder.encode(&chat.messages, &grids).map_err(refuse)?;
                    (encoded.ids.len(), encoded.learned.iter().filter(|learned| **learned).count())
                }
                None => {
                    let images = grids.iter().map(|grid| facts.patches.tokens(*grid) + IMAGE_TOKENS);
                    let tokens = images.sum::<usize>() + in_texts(&chat.messages);
                    (tokens, tokens)
                }
            };
            let most = settings.data.max_tokens;
            outline.tokens = outline.tokens.max(tokens.min(most));
            outline.learned = outline.learned.max(learned.min(most));
            if patches(&grids) > outline.patches() {
                outline.grids = grids;
            }
        }
        Ok(outline)
    }

    /// Most patches of a chat.
    pub fn patches(&self) -> usize {
        patches(&self.grids)
    }
}

fn patches(grids: &[[u32; 3]]) -> usize {
    grids.iter().map(|grid| grid.iter().map(|&side| side as usize).product::<usize>()).sum()
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

/// Grids of images, each file's header read once.
struct ImageSizes<'a> {
    source: &'a dyn ChatSource,
    images: ImageProcessor,
    shape: PatchShape,
    /// Height and width, by what tells an image from those of all chats.
    known: HashMap<String, (usize, usize)>,
}

impl ImageSizes<'_> {
    fn grid(&mut self, index: u64, ChatImage { path, size }: &ChatImage) -> Result<[u32; 3], String> {
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
        size.grid(&self.images, self.shape, stored).map_err(|fault| format!("{path}: {fault}"))
    }
}
