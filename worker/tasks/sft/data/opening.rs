//! Which source a run's chats have.

use std::path::Path;

use coxswain_data::{DataError, Fingerprint, shards::names_shards};

use super::{lines::ChatLines, shards::ChatShards, source::ChatSource, spelling::Chat};
use crate::sft::config::ChatData;

/// The chats at `data.path`, none of them read.
pub fn open(path: &Path, data: &ChatData) -> Result<Box<dyn ChatSource>, DataError> {
    refuse_folder(path)?;
    Ok(match names_shards(path) {
        true => Box::new(ChatShards::in_files(path, data)?),
        false => Box::new(ChatLines::in_file(path, data)?),
    })
}

/// The chats at `data.path`, each of them read, which `see` gets with its place, and its images looked for;
/// and what names their content.
pub fn open_checked(
    path: &Path,
    data: &ChatData,
    see: &mut dyn FnMut(u64, &Chat),
) -> Result<(Box<dyn ChatSource>, Fingerprint), DataError> {
    refuse_folder(path)?;
    if names_shards(path) {
        let shards = ChatShards::in_files(path, data)?;
        let fingerprint = shards.check(see)?;
        return Ok((Box::new(shards), fingerprint));
    }
    let (lines, fingerprint) = ChatLines::checked(path, data, see)?;
    Ok((Box::new(lines), fingerprint))
}

fn refuse_folder(path: &Path) -> Result<(), DataError> {
    let remedy = "name the JSONL file in it, or its tar shards (`FOLDER/*.tar`)";
    match path.is_dir() {
        true => Err(DataError::invalid(path, "data.path", "is a folder", remedy)),
        false => Ok(()),
    }
}

/// Every chat that [`open_checked`] refuses, where it would name the first alone.
pub fn faults(path: &Path, data: &ChatData) -> Vec<DataError> {
    match names_shards(path) {
        true => Vec::new(),
        false => ChatLines::faults(path, data),
    }
}
