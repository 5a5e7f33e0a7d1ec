//! From pictures and text to the model's input: patches of pixels, and token ids in the chat template.
//!
//! ```text
//! preprocessor   the checkpoint's own settings for images
//! fit            letterbox, crop: what comes before the resize
//! vision         encoded image -> smart_resize -> normalised patches      resize   bicubic, as Pillow's
//! tokenizer      text -> token ids
//! prompt         task text and image placeholders -> token ids          chat   the same for chats
//! ```

mod chat;
mod fit;
mod preprocessor;
mod prompt;
mod resize;
mod shape;
#[cfg(test)]
mod tests;
mod tokenizer;
mod vision;

pub use chat::{ChatEncoder, EncodedChat, Message, Piece, Role};
pub use coxswain_data::pictures::image_size;
pub use fit::Fit;
pub use prompt::{PromptEncoder, PromptForm};
pub use resize::Rgb;
pub use shape::PatchShape;
pub use tokenizer::ModelFacts;
pub use vision::{DEFAULT_MAX_PIXELS, ImageProcessor, Patches, PixelBounds, decode_sized, smart_resize};
