//! The feature store: what lies below a tap of the model, computed once, found again by content.
//!
//! ```text
//! <dir>/store.json                  format of the whole store
//! <dir>/evict.lock                  held by a process that makes room
//! <dir>/keys/                       digests of files that were read before (data keys, weights), by path,
//!                                   size and times
//! <dir>/<32 hex digits>/            a namespace: all records that share weights, preprocessing, prompt, tap,
//!                                   dtype
//!        space.json                 its ingredients, readable
//!        in-use.lock                shared lock of every process that has it open; its time is when that was
//!                                   last so
//!        adapter.safetensors        the adapter it was made with, if one lies below the tap
//!        coverage-<run>.json        how much of a run's data set is stored, as that run last knew
//!        part-<unique>.vlc          records; never changed after it has got this name, replaced only by a
//!                                   repair
//!        open-<unique>.tmp          a shard being written, locked by its writer
//! ```
//!
//! A *record* is one sample's features with its token ids and shapes of images; its key is the content of the
//! sample. The store is a memo: a record that is missing, damaged or evicted is a miss and costs time, never
//! a wrong value. So every fault here is a value that says what happened, and none needs to end a training
//! run.
//!
//! Safe between threads, ranks and runs on one file system: shards have unique names and appear by rename, so
//! writers never meet; a record stored twice is harmless; namespaces that a living process has open are never
//! evicted. Locks are `flock`'s.
//!
//! What it does not do: compute features, decide when they are stale, or know tensors. It knows files and
//! bytes.

mod adapter;
mod care;
mod clock;
mod codec;
mod coverage;
mod digest;
mod directory;
mod error;
mod map;
mod memo;
mod memo_file;
mod namespace;
mod namespace_file;
mod repair;
mod shard;
mod stamp;
mod store;
mod usage;
mod writer;

pub use adapter::{AdapterTensor, adapter_digest};
pub use care::{Garbage, NamespaceReport, VerifyReport};
pub use codec::round_trip;
pub use coverage::Coverage;
pub use digest::{Digest, NamespaceKey, SampleKey};
pub use error::{DamagedRecord, StoreError};
pub use memo::Memo;
pub use namespace::{Namespace, RecordRef, index_bytes};
pub use namespace_file::{Ingredients, NamespaceDescription};
pub use repair::Repair;
pub use shard::SHARD_BYTES;
pub use stamp::Stamp;
pub use store::Store;
pub use usage::FORMAT;
pub use writer::{Record, ShardWriter};

#[cfg(test)]
mod tests;
