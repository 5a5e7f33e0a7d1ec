//! From text to token ids in turns of ChatML, with placeholders for images, as Qwen's models have them.
//!
//! ```text
//! facts          what of it differs by family and by checkpoint
//! tokenizer      text -> token ids
//! prompt         task text and image placeholders -> token ids          chat   the same for chats
//! ```

mod chat;
mod facts;
mod prompt;
mod tokenizer;

pub(crate) use self::facts::TOKEN_IDS;
pub use self::{
    chat::ChatMlChats,
    facts::{ChatMlForm, ModelFacts, ToolTurns},
    prompt::ChatMlPrompts,
    tokenizer::ChatMlTokenizer,
};
