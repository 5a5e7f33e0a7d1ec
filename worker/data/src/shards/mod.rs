//! WebDataset shards: samples in tar files, read where they lie. Nothing is ever extracted, and no name in a
//! shard is ever a path on this machine.
//!
//! ```text
//! 000122.jpg  000122.json | 000123.jpg  000123.json | ...       shards-0000.tar
//! ```
//!
//! Members that follow each other and have one key are a sample. As in the package `webdataset`, the key is
//! everything up to the first dot of a file's name, folders included, and the ending what stands behind it,
//! in lower case.
//!
//! ```text
//! pattern   `shards-{0000..0012}.tar`, `*.tar`: which files
//! scan      the members of one file, header by header
//! set       samples of all files by number
//! section   a member as a file of its own
//! ```

mod pattern;
mod scan;
mod section;
mod set;

pub use self::{
    pattern::{expand, names_shards},
    section::Section,
    set::{MemberId, Shards},
};
