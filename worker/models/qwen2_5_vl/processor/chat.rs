//! From a chat to token ids, and which of them are learned.
//!
//! ```text
//! [<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n]      where the chat begins otherwise
//! <|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>TEXT<|im_end|>\n
//! <|im_start|>assistant\nTEXT<|im_end|>\n
//!                        ^^^^^^^^^^^^^^ learned
//! ```
//!
//! The whole chat is encoded at once, as Transformers does: what a tokenizer makes of an answer depends on
//! the line break before it. An answer is a turn of the assistant that is not switched off. A token is learned if any of its characters belongs to an answer or to the
//! `<|im_end|>` behind it, which is what `return_assistant_tokens_mask` gives for a template that marks them.

use std::{ops::Range, path::Path};

use coxswain_data::DataError;

use super::tokenizer::{IMAGE, ModelFacts, QwenTokenizer};

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sets the scene.
    System,
    /// Asks.
    User,
    /// Answers: what is learned.
    Assistant,
    /// What a tool that the assistant has called says.
    Tool,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A piece of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text.
    Text(String),
    /// The chat's next image.
    Image,
}

/// One turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said, in order.
    pub pieces: Vec<Piece>,
    /// Whether it is learned.
    pub learned: bool,
}

impl Message {
    /// A turn that is learned if it is the assistant's.
    pub fn of(role: Role, pieces: Vec<Piece>) -> Self {
        Self { role, pieces, learned: role == Role::Assistant }
    }
}

/// A chat as the model reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedChat {
    /// One id per token, image placeholders expanded.
    pub ids: Vec<u32>,
    /// Of each token, whether predicting it is learned.
    pub learned: Vec<bool>,
}

/// A chat's text with one placeholder for each image.
struct Rendered {
    text: String,
    /// The bytes of its answers in it.
    answers: Vec<Range<usize>>,
}

/// Renders and encodes chats.
pub struct ChatEncoder(QwenTokenizer);

impl ChatEncoder {
    /// Loads tokenizer and chat template of the checkpoint at `model`.
    pub fn open(model: &Path, facts: ModelFacts) -> Result<Self, DataError> {
        QwenTokenizer::open(model, facts).map(Self)
    }

    /// The id that fills up shorter rows of a batch.
    pub fn pad(&self) -> u32 {
        self.0.pad()
    }

    /// The id that stands for a token of an image.
    pub fn image_token(&self) -> u32 {
        self.0.image_token()
    }

    /// The id that begins a turn.
    pub fn begin(&self) -> u32 {
        self.0.begin()
    }

    /// What an answer may end with.
    pub fn ends(&self) -> Vec<u32> {
        self.0.ends()
    }

    /// Text of an answer's ids, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String, String> {
        self.0.decode(ids)
    }

    /// Ids of a chat with images of these grids, in order of their pieces.
    pub fn encode(&self, chat: &[Message], grids: &[[u32; 3]]) -> Result<EncodedChat, String> {
        self.encode_rendered(chat, &self.render(chat), grids)
    }

    /// Ids of a chat and of the beginning of the assistant's next turn, which is to be written.
    pub fn encode_question(&self, chat: &[Message], grids: &[[u32; 3]]) -> Result<Vec<u32>, String> {
        let mut rendered = self.render(chat);
        rendered.text.push_str("<|im_start|>assistant\n");
        Ok(self.encode_rendered(chat, &rendered, grids)?.ids)
    }

    fn encode_rendered(
        &self,
        chat: &[Message],
        rendered: &Rendered,
        grids: &[[u32; 3]],
    ) -> Result<EncodedChat, String> {
        let encoding = self.0.encode(rendered.text.clone())?;
        let repeats = self.0.repeats(encoding.get_ids(), grids, written(chat))?;
        let mut encoded = EncodedChat::default();
        let mut answers = &rendered.answers[..];
        for ((&id, &(start, end)), count) in
            encoding.get_ids().iter().zip(encoding.get_offsets()).zip(repeats)
        {
            // A token without characters of its own (trimmed white space) stands where it begins.
            let end = end.max(start + 1);
            while answers.first().is_some_and(|answer| answer.end <= start) {
                answers = &answers[1..];
            }
            let learned = answers.first().is_some_and(|answer| answer.start < end);
            encoded.ids.extend(std::iter::repeat_n(id, count));
            encoded.learned.extend(std::iter::repeat_n(learned, count));
        }
        Ok(encoded)
    }

    fn render(&self, chat: &[Message]) -> Rendered {
        let mut answers = Vec::new();
        let mut text = match chat.first() {
            Some(Message { role: Role::System, .. }) | None => String::new(),
            Some(_) => self.0.system().to_owned(),
        };
        for Message { role, pieces, learned } in chat {
            text.push_str("<|im_start|>");
            text.push_str(role.name());
            text.push('\n');
            let begin = text.len();
            for piece in pieces {
                text.push_str(match piece {
                    Piece::Text(text) => text,
                    Piece::Image => IMAGE,
                });
            }
            text.push_str("<|im_end|>");
            if *learned {
                answers.push(begin..text.len());
            }
            text.push('\n');
        }
        Rendered { text, answers }
    }
}

/// The text that holds a placeholder which stands for no image, for errors; empty if none does.
fn written(chat: &[Message]) -> &str {
    let mut texts = chat.iter().flat_map(|message| &message.pieces).filter_map(|piece| match piece {
        Piece::Text(text) => Some(text.as_str()),
        Piece::Image => None,
    });
    texts.find(|text| text.contains("<|image_pad|>")).unwrap_or_default()
}
