//! From text to the model's input: token ids in the chat template.
//!
//! ```text
//! tokenizer      text -> token ids
//! prompt         task text and image placeholders -> token ids          chat   the same for chats
//! ```

mod chat;
mod prompt;
#[cfg(test)]
mod tests;
mod tokenizer;

pub use self::{chat::QwenChats, prompt::QwenPrompts, tokenizer::ModelFacts};
