//! Whether the machine under a worker is sound.
//!
//! ```text
//! known   a short computation whose result is known
//! kind    which processors come to the same bits
//! ```

pub mod kind;
pub mod known;
