//! Pretrained models: what all of them stand on, the seams to tasks, and the families, a folder each.
//!
//! ```text
//! pretrained        checkpoints, loading, adapters, streamed blocks, images: whatever the family
//! vision_language   what tasks ask of a vision-language model
//! text_to_text      what tasks ask of an encoder and a decoder of text
//! joint             what policies ask of a model beside whose layers their own streams attend
//! two_towers        what families of a vision tower and decoder layers share
//! chatml            their prompts and chats
//! families          Qwen2.5-VL; Qwen3-VL; T5 and mT5; SmolVLM2; PaliGemma
//! shelf             the families of a program, by device
//! ```
//!
//! A model knows no task, no engine and no data set.

pub mod chatml;
pub mod families;
pub mod joint;
pub mod pretrained;
pub mod shelf;
pub mod text_to_text;
pub mod two_towers;
pub mod vision_language;

pub use self::shelf::{Shelf, Shelves};
