//! A LeRobot data set's metadata and rows, as they lie on disk: no normalisation, no images decoded, no text
//! encoded.
//!
//! [`Catalog`] is everything known before a data file is read; [`rows::RowStore`] reads rows out of data
//! files, and [`frames::FrameStore`] frames out of videos.

mod cache;
mod catalog;
mod columns;
pub mod episodes;
pub mod feature;
pub mod frames;
pub mod info;
pub mod rows;
pub mod stats;
mod tables;
pub mod tasks;
mod template;
mod thrift;
pub mod videos;

pub use self::catalog::{Catalog, Fingerprint};
