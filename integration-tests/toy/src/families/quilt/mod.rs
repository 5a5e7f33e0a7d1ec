//! Quilts: the smallest vision-language models. An image is cut into patches, each of which becomes one token
//! by one linear; tokens of images and of text then run through a few blocks that attend causally within
//! their row.
//!
//! ```text
//! family               what tasks find
//! config · modules     config.json, checked; the names that PEFT knows
//! rules · outline      what names mean; the configuration as tasks see it
//! processor            prompts and chats to token ids
//! model · block        all of it, read from its directory; one block
//! run · pass · rows    a micro-batch through it and back
//! decode               prompts, and tokens after them one by one
//! ```
//!
//! Nothing here was published: it stands for what `docs/develop/add-a-model.md` asks of a family. Not here:
//! blocks of vision, positions, `cox model forward`, a table of embeddings beside the device.

mod block;
mod config;
mod decode;
mod family;
mod model;
mod modules;
mod outline;
mod pass;
mod processor;
mod rows;
mod rules;
mod run;

pub use self::family::Family;
