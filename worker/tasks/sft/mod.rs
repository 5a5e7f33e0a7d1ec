//! Supervised fine-tuning of Qwen2.5-VL on chats with images: LoRA on the language model, the loss on what
//! the assistant says.
//!
//! ```text
//! config      its keys in run files
//! data        chats from JSONL, in three spellings; their ids and images; micro-batches of them
//! model       loading, forward and backward, the loss on answers
//! objective   what the engine trains: losses, measures, the adapter at the end
//! generation  answers to prompts
//! examples    held-out chats beside what the model answers
//! memory      what a rank will hold
//! starter     a run file for data that a user has: `cox init`
//! ```

pub mod config;
pub mod data;
mod examples;
mod generation;
pub mod memory;
mod model;
mod objective;
mod starter;
mod task;
#[cfg(test)]
mod tests;

pub use starter::has_chats;
pub use task::Sft;
