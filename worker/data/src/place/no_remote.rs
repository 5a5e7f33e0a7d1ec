//! Addresses in a build that cannot read them: refused, with the remedy.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use super::Content;
use crate::error::DataError;

fn refused<T>(path: &Path) -> Result<T, DataError> {
    let known = ["s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https"];
    let scheme = path.to_str().and_then(|text| text.split_once("://")).map_or("", |(scheme, _)| scheme);
    let fault = match known.contains(&scheme) {
        true => "this program was built without buckets; build it with `cargo build --release --features buckets`, or copy the files to a disk".to_owned(),
        false => format!("{scheme}:// is not an address that can be read; name a directory, or s3://, gs://, az:// or https:// in a build with the feature `buckets`"),
    };
    Err(DataError::Remote { path: path.to_path_buf(), fault })
}

/// There is nothing to keep.
pub fn keep(_dir: Option<PathBuf>, _bytes: u64) {}

pub fn enter(root: &Path) -> Result<(), DataError> {
    refused(root)
}

pub fn pin(root: &Path, _file: &Path) -> Result<(), DataError> {
    refused(root)
}

pub fn open(path: &Path) -> Result<Arc<dyn Content>, DataError> {
    refused(path)
}

pub fn bytes(path: &Path) -> Result<Option<u64>, DataError> {
    refused(path)
}

pub fn entries(dir: &Path) -> Result<Option<Vec<PathBuf>>, DataError> {
    refused(dir)
}
