//! What every family of pretrained models stands on. Nothing here knows a family.
//!
//! ```text
//! directory · content · config_file   a model's directory; its name by content; its config.json
//! family · fields                     families by `model_type`; fields of JSON files, checked
//! checkpoint · mapping · reading      safetensors: files, tensors, their bytes
//! rules · frozen                      what names mean; frozen tensors, known from sizes alone
//! loader · location · blocks · stack  tensors to layers; where in a file; repeated blocks held, streamed or
//!                                     shared out
//! settings · trains · adapters        the section `model` of run files; what trains, and what it starts from
//! merge · synthetic · tokens          checkpoints written: merged, or of random weights
//! prompts · pictures · tokenizer_file a micro-batch as models read it; images; tokenizers
//! job · results · error               `cox model forward`, and what it leaves; what can be wrong
//! ```

pub mod adapters;
pub mod blocks;
pub mod checkpoint;
pub mod config_file;
pub mod content;
pub mod directory;
pub mod error;
pub mod family;
pub mod fields;
pub mod frozen;
pub mod job;
pub mod loader;
pub mod location;
mod mapping;
pub mod merge;
pub mod pictures;
pub mod prompts;
mod reading;
pub mod results;
pub mod rules;
pub mod settings;
pub mod stack;
pub mod synthetic;
pub mod tokenizer_file;
pub mod tokens;
pub mod trains;
