//! Chats: one JSON object a line and images by path, or both in tar shards.
//!
//! ```text
//! spelling  JSON as a chat: `messages`, `conversations`, `<image>`       images  their places and sizes
//! source    where chats and their images lie, as a trait
//! lines     a file of lines, and images by path
//! shards    tar shards of both
//! opening   which of the two a run has
//! reader    a chat as ids and patches
//! chats     the opened data: checked, and its samples one by one
//! batch     a sample, a micro-batch, and the one from the other
//! outline   sizes of samples, for the prediction of memory
//! ```

mod batch;
mod chats;
mod images;
mod lines;
mod opening;
mod outline;
mod reader;
mod shards;
mod source;
mod spelling;

pub use batch::{ChatBatch, ChatSample};
pub use chats::Chats;
pub(super) use images::ChatImage;
pub(super) use lines::read_file;
pub(super) use opening::faults;
pub use outline::ChatOutline;
pub use reader::ChatReader;
pub(super) use shards::has_turns;

pub use spelling::Chat;
