//! Objects of a server that fails where it is told to. Of an S3 server: `integration-tests/processes`.
//!
//! What a process knows of buckets is one for all tests here, so each has a server of its own.
#![allow(clippy::unwrap_used, reason = "tests")]

mod data_sets;
mod faults;
mod folders;
mod server;
#[allow(dead_code, reason = "more of it is for the tests that it belongs to")]
#[path = "../../../data/tests/suite/sets.rs"]
mod sets;

use std::{path::Path, sync::OnceLock};

use coxswain_remote::{BlockCache, keep};

/// Bytes that are not alike anywhere.
fn content(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().finalize_xof().fill(&mut bytes);
    bytes
}

/// The cache of all tests.
fn cache() -> &'static Path {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        keep(BlockCache { dir: Some(dir.path().to_owned()), bytes: 1 << 30 });
        dir
    });
    dir.path()
}

fn read(address: &str, offset: u64, len: usize) -> Result<Vec<u8>, String> {
    cache();
    let object = coxswain_remote::open(address).map_err(|error| error.to_string())?;
    let mut bytes = vec![0; len];
    object.read_at(offset, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}
