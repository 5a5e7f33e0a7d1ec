//! From a chat to token ids, and which of them are learned.
//!
//! ```text
//! [<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n]      where the chat begins otherwise
//! <|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>TEXT<|im_end|>\n
//! <|im_start|>assistant\nTEXT<|im_end|>\n
//!                        ^^^^^^^^^^^^^^ learned
//! ```
//!
//! Turns of tools may be the user's, which depends on the family ([`ToolTurns`]).
//!
//! The whole chat is encoded at once, as Transformers does: what a tokenizer makes of an answer depends on
//! the line break before it. An answer is a turn of the assistant that is not switched off. A token is
//! learned if any of its characters belongs to an answer or to the `<|im_end|>` behind it, which is what
//! `return_assistant_tokens_mask` gives for a template that marks them.

use std::{ops::Range, path::Path};

use coxswain_data::DataError;

use super::{
    facts::{ModelFacts, ToolTurns},
    tokenizer::{ChatMlTokenizer, IMAGE},
};
use crate::{
    pretrained::pictures::ImageShape,
    vision_language::{ChatEncoder, EncodedChat, Message, Piece, Role},
};

/// A chat's text with one placeholder for each image.
struct RenderedChat {
    text: String,
    /// The bytes of its answers in it.
    answers: Vec<Range<usize>>,
}

/// Renders and encodes chats.
pub struct ChatMlChats(ChatMlTokenizer);

impl ChatMlChats {
    /// Loads tokenizer and chat template of the checkpoint at `model`.
    pub fn from_checkpoint(model: &Path, facts: ModelFacts) -> Result<Self, DataError> {
        ChatMlTokenizer::from_checkpoint(model, facts).map(Self)
    }

    fn encode_rendered(
        &self,
        chat: &[Message],
        rendered: &RenderedChat,
        grids: &[ImageShape],
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

    fn render(&self, chat: &[Message]) -> RenderedChat {
        let mut answers = Vec::new();
        let mut text = match chat.first() {
            Some(Message { role: Role::System, .. }) | None => String::new(),
            Some(_) => self.0.system().to_owned(),
        };
        let mut rest = chat;
        while let Some(Message { role, pieces, learned }) = rest.first() {
            if (*role, self.0.tool_turns()) == (Role::Tool, ToolTurns::AsTheUsers) {
                let others = rest.iter().position(|message| message.role != Role::Tool);
                let (tools, behind) = rest.split_at(others.unwrap_or(rest.len()));
                push_tools(tools, &mut text);
                rest = behind;
                continue;
            }
            text.push_str("<|im_start|>");
            text.push_str(role.name());
            text.push('\n');
            let begin = text.len();
            push_pieces(pieces, &mut text);
            text.push_str("<|im_end|>");
            if *learned {
                push_answers(begin, &text, &mut answers);
            }
            text.push('\n');
            rest = &rest[1..];
        }
        RenderedChat { text, answers }
    }
}

impl ChatEncoder for ChatMlChats {
    fn pad(&self) -> u32 {
        self.0.pad()
    }

    fn image_token(&self) -> u32 {
        self.0.image_token()
    }

    fn begin(&self) -> u32 {
        self.0.begin()
    }

    fn ends(&self) -> Vec<u32> {
        self.0.ends()
    }

    fn decode(&self, ids: &[u32]) -> Result<String, String> {
        self.0.decode(ids)
    }

    fn encode(&self, chat: &[Message], grids: &[ImageShape]) -> Result<EncodedChat, String> {
        self.encode_rendered(chat, &self.render(chat), grids)
    }

    fn encode_question(&self, chat: &[Message], grids: &[ImageShape]) -> Result<Vec<u32>, String> {
        let mut rendered = self.render(chat);
        rendered.text.push_str("<|im_start|>assistant\n");
        Ok(self.encode_rendered(chat, &rendered, grids)?.ids)
    }
}

/// The answer from `begin` to the end of `text`, without the images in it: those are shown, not written.
fn push_answers(begin: usize, text: &str, answers: &mut Vec<Range<usize>>) {
    let mut from = begin;
    for (image, _) in text[begin..].match_indices(IMAGE) {
        answers.push(from..begin + image);
        from = begin + image + IMAGE.len();
    }
    answers.push(from..text.len());
}

fn push_pieces(pieces: &[Piece], text: &mut String) {
    for piece in pieces {
        text.push_str(match piece {
            Piece::Text(text) => text,
            Piece::Image => IMAGE,
        });
    }
}

/// What tools say one after another, as one turn of the user's.
fn push_tools(tools: &[Message], text: &mut String) {
    text.push_str("<|im_start|>user");
    for Message { pieces, .. } in tools {
        text.push_str("\n<tool_response>\n");
        push_pieces(pieces, text);
        text.push_str("\n</tool_response>");
    }
    text.push_str("<|im_end|>\n");
}

/// The text that holds a placeholder which stands for no image, for errors; empty if none does.
fn written(chat: &[Message]) -> &str {
    let mut texts = chat.iter().flat_map(|message| &message.pieces).filter_map(|piece| match piece {
        Piece::Text(text) => Some(text.as_str()),
        Piece::Image => None,
    });
    texts.find(|text| text.contains("<|image_pad|>")).unwrap_or_default()
}
