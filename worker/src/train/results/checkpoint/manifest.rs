//! The description of one checkpoint.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::Path,
};

use coxswain_proto::{cache_plan::CacheDecision, ids::Step, report::Skip};
use serde::{Deserialize, Serialize};

use crate::train::features::Mark;
use coxswain_nn::pulse;

/// Bytes of a file that are read at a time.
const PIECE: usize = 128 << 10;

/// `manifest.json`: written last, so that its presence means the checkpoint is whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Layout of the directory; readers refuse numbers they do not know.
    pub format: u32,
    /// Committed steps; training resumes with this step.
    pub step: u64,
    /// Epoch of the last committed step.
    pub epoch: u64,
    /// Ranks that wrote it. Any number of ranks can read it.
    pub world_size: usize,
    /// Digest of the run spec, as in `run.json`.
    pub spec_digest: String,
    /// The digest without what may change where a run goes on; absent from those that earlier versions wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core_digest: Option<String>,
    /// Steps that the run was to have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned_steps: Option<u64>,
    /// Version of the program that wrote it.
    pub version: String,
    /// Fingerprint of the data set whose order the position refers to.
    pub dataset_fingerprint: String,
    /// Samples per forward pass in force, which an out-of-memory may have lowered.
    pub micro_batch: usize,
    /// The generation of kept features that served, or had served last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Mark>,
    /// What was decided last about kept features, where no coordinator's journal has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "turn")]
    pub cache_phase: Option<CacheDecision>,
    /// The newest steps before this one that were left out, as the rank knows that wrote this: where their
    /// reports are lost, nothing else says so.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped: BTreeMap<Step, Skip>,
    /// Mean losses of the newest steps before this one that were not.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub losses: BTreeMap<Step, f64>,
    /// Every other file of the directory.
    pub files: BTreeMap<String, FileEntry>,
}

/// Size and checksum of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Length.
    pub bytes: u64,
    /// Lower-case hex.
    pub blake3: String,
}

impl FileEntry {
    /// Reads a file through and describes it.
    pub fn describe(path: &Path) -> io::Result<Self> {
        let (mut file, mut hasher) = (File::open(path)?, blake3::Hasher::new());
        let (mut piece, mut bytes) = (vec![0; PIECE], 0);
        loop {
            pulse::beat();
            match file.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => {
                    hasher.update(&piece[..count]);
                    bytes += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self { bytes, blake3: hasher.finalize().to_hex().to_string() })
    }
}
