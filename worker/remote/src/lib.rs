//! Files in buckets (`s3://`, `gs://`, `az://`) and on web servers (`https://`), read by range through a
//! bounded cache on the local disk.
//!
//! ```text
//! remotes   what a process knows: buckets, objects as they were first seen, the cache, one small runtime
//! object    one object: its bytes by block, brought by several requests at once, then read from the disk
//! bucket    requests: connecting with the environment's credentials, attempts until a deadline
//! pinned    objects as a run saw them first, for the processes that it starts later
//! cache     blocks on the local disk, bounded, checked, shared by processes
//! error     what went wrong, and what helps
//! ```
//!
//! An object is what it was when the process first saw it: its length and entity tag. Every request says so
//! (`If-Match`), and an object that is another one meanwhile is refused by name.
//!
//! Calls block; nothing here is to be called by a thread of another runtime that must not wait. What this
//! crate does not do: write to buckets, or know what files hold.

mod bucket;
mod cache;
mod error;
mod object;
mod pinned;
mod remotes;

pub use error::RemoteError;
pub use object::{BLOCK_BYTES, Object};
pub use pinned::pin;
pub use remotes::{Kept, bytes, enter, entries, keep, open};
