//! Files in buckets (`s3://`, `gs://`, `az://`) and on web servers (`https://`), read by range through a
//! bounded cache on the local disk.
//!
//! ```text
//! place     objects as the files of data sets: what `worker/data` asks for
//! remotes   what a process knows: buckets, objects as they were first seen, the cache, the listing
//! object    one object: its bytes by block, brought by several requests at once, then read from the disk
//! bucket    requests: connecting with the environment's credentials, attempts until a deadline
//! folder    objects as files of the local disk, for those who map them: models
//! pinned    objects as a run saw them first, for the processes that it starts later
//! storage   a folder that is written: what keeps a run beside its disk
//! written   the same in a bucket
//! waiting   the few threads that make requests
//! cache     blocks on the local disk, bounded, checked, shared by processes
//! clock     the only file that reads one
//! error     what went wrong, and what helps
//! ```
//!
//! An object is what it was when the process first saw it: its length and entity tag. Every request says so
//! (`If-Match`), and an object that is another one meanwhile is refused by name.
//!
//! All of it but [`install`] and [`storage`] is there with the feature `buckets` alone.
//!
//! Calls block; nothing here is to be called by a thread of another runtime that must not wait. What this
//! crate does not do: know what files hold.

#[cfg(feature = "buckets")]
mod bucket;
#[cfg(feature = "buckets")]
mod cache;
#[cfg(feature = "buckets")]
mod clock;
#[cfg(feature = "buckets")]
mod error;
#[cfg(feature = "buckets")]
mod folder;
#[cfg(feature = "buckets")]
mod object;
#[cfg(feature = "buckets")]
mod pinned;
#[cfg_attr(not(feature = "buckets"), path = "no_buckets.rs")]
mod place;
#[cfg(feature = "buckets")]
mod remotes;
mod storage;
#[cfg(feature = "buckets")]
mod waiting;
#[cfg_attr(not(feature = "buckets"), path = "no_written.rs")]
mod written;

#[cfg(feature = "buckets")]
pub use error::RemoteError;
#[cfg(feature = "buckets")]
pub use object::{BLOCK_BYTES, Object};
pub use place::install;
#[cfg(feature = "buckets")]
pub use remotes::{BlockCache, keep, open};
pub use storage::{Storage, StorageError, Version};
pub use written::storage;
