//! Pretrained models, a folder each: configuration, weights from Hugging Face directories, forward and
//! backward through their blocks.
//!
//! A model knows no task, no engine and no data set.

pub mod content;
pub mod directory;
pub mod qwen2_5_vl;
pub mod t5;
mod tokenizer_file;
