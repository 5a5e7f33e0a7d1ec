//! Chats: one JSON object a line, images by path.
//!
//! ```text
//! spelling  a line as a chat: `messages`, `conversations`, `<image>`
//! reader    a chat as ids and patches
//! chats     the opened file: checked, and its samples one by one
//! batch     a sample, a micro-batch, and the one from the other
//! outline   sizes of samples, for the prediction of memory
//! ```

mod batch;
mod chats;
mod outline;
mod reader;
mod spelling;

pub use batch::{ChatBatch, ChatSample};
pub use chats::Chats;
pub use outline::ChatOutline;
pub use reader::ChatReader;
pub use spelling::Chat;
