//! What of a run's output directory goes to its bucket, and what that directory says of the bucket.
//!
//! Files are opened before anything is uploaded: a checkpoint that is pruned meanwhile stays what it is.

use std::{
    fmt,
    fs::{self, File},
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use coxswain_coordinator::journal::copies;
use coxswain_proto::{checkpoint::MANIFEST, human, ids::Step, in_place};
use coxswain_worker::train::{
    Best,
    checkpoint::{Checkpoint, FileEntry, Store},
};
use serde::{Deserialize, Serialize};

use super::{
    error::{BucketError, disk},
    owner::OpenFile,
};
use crate::endpoint::SPEC_FILE;

/// Where a run's journal is, and in a set.
const JOURNAL: &str = "coordinator/journal.redb";
/// See [`Record`].
const RECORD: &str = "bucket.json";
/// Results that the manifest of a run's artifacts does not name.
const RESULTS: [&str; 10] = [
    "manifest.json",
    "run.json",
    SPEC_FILE,
    "summary.json",
    "samples.json",
    "report.html",
    Best::FILE,
    Best::ARTIFACTS,
    "ema",
    "tensorboard",
];

/// A checkpoint with what belongs to it, on this machine's disk.
pub struct Local {
    /// Steps that are done.
    pub step: u64,
    /// Where its journal is.
    pub journal: PathBuf,
    output: PathBuf,
}

/// The newest checkpoint whose journal has been copied, while the coordinator goes on.
pub fn newest_copied(output: &Path) -> Option<Local> {
    let (Step(step), journal) = copies::newest(&output.join("coordinator"))?;
    Some(Local { step, journal, output: output.to_owned() })
}

/// The newest checkpoint, once the coordinator has ended.
pub fn newest(output: &Path) -> Option<Local> {
    let step = Store::new(output).newest().ok()?.manifest.step;
    let journal = copies::original(&output.join("coordinator"));
    journal.exists().then(|| Local { step, journal, output: output.to_owned() })
}

impl Local {
    /// Files, opened. None if a newer one has taken its place, which may also be why a file is missing.
    pub fn open(&self) -> Result<Option<Vec<OpenFile>>, BucketError> {
        let store = Store::new(&self.output);
        let Ok(checkpoint) = store.checkpoint(self.step) else { return Ok(None) };
        let best = Best::load(&self.output);
        let mut sources = Vec::new();
        open_checkpoint(&checkpoint, &mut sources)?;
        sources.push(source(JOURNAL, &self.journal)?);
        if let Some(best) = &best {
            if best.step != self.step
                && let Ok(of_best) = store.checkpoint(best.step)
            {
                open_checkpoint(&of_best, &mut sources)?;
            }
            open_below(&self.output, Best::ARTIFACTS, &mut sources)?;
            sources.push(source(Best::FILE, &self.output.join(Best::FILE))?);
        }
        for name in beside(&self.output).map_err(disk(&self.output))? {
            sources.push(source(&name, &self.output.join(&name))?);
        }
        Ok((Best::load(&self.output) == best).then_some(sources))
    }
}

fn open_checkpoint(checkpoint: &Checkpoint, sources: &mut Vec<OpenFile>) -> Result<(), BucketError> {
    let dir = format!("checkpoints/{}", Step(checkpoint.manifest.step).checkpoint_dir());
    for (name, entry) in &checkpoint.manifest.files {
        let path = checkpoint.path.join(name);
        let file = File::open(&path).map_err(disk(&path))?;
        sources.push(OpenFile { path: format!("{dir}/{name}"), file, entry: entry.clone() });
    }
    sources.push(source(&format!("{dir}/{MANIFEST}"), &checkpoint.path.join(MANIFEST))?);
    Ok(())
}

/// Small files that a run goes on with: how it was launched, and which objects its data were.
fn beside(output: &Path) -> io::Result<Vec<String>> {
    let names = fs::read_dir(output)?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names
        .filter(|name| name == SPEC_FILE || (name.starts_with("objects-") && name.ends_with(".txt")))
        .collect())
}

/// What the run has left at its end: the artifacts that its manifest names, and what is there beside them.
pub fn results(output: &Path) -> Result<Vec<OpenFile>, BucketError> {
    #[derive(Deserialize)]
    struct Artifacts {
        files: Vec<Artifact>,
    }
    #[derive(Deserialize)]
    struct Artifact {
        path: String,
    }
    let manifest = fs::read(output.join("manifest.json")).ok();
    let manifest = manifest.and_then(|text| serde_json::from_slice::<Artifacts>(&text).ok());
    let artifacts = manifest.into_iter().flat_map(|manifest| manifest.files).map(|file| file.path);
    let mut names: Vec<_> = artifacts.chain(RESULTS.map(str::to_owned)).collect();
    names.sort();
    names.dedup();
    let mut sources = Vec::new();
    for name in names {
        match open_below(output, &name, &mut sources) {
            Err(error) if !error.is_missing() => return Err(error),
            _ => {}
        }
    }
    Ok(sources)
}

/// A file, or all files of a directory.
fn open_below(output: &Path, name: &str, sources: &mut Vec<OpenFile>) -> Result<(), BucketError> {
    let path = output.join(name);
    if !path.is_dir() {
        sources.push(source(name, &path)?);
        return Ok(());
    }
    for entry in fs::read_dir(&path).map_err(disk(&path))? {
        let entry = entry.map_err(disk(&path))?.file_name();
        open_below(output, &format!("{name}/{}", entry.to_string_lossy()), sources)?;
    }
    Ok(())
}

fn source(path: &str, at: &Path) -> Result<OpenFile, BucketError> {
    let file = File::open(at).map_err(disk(at))?;
    // The file that is open, whatever has taken its name meanwhile.
    let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
    let entry = FileEntry::describe(Path::new(&opened)).map_err(disk(at))?;
    Ok(OpenFile { path: path.to_owned(), file, entry })
}

/// `bucket.json`: what a launch of this directory had in the bucket last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The run's address.
    pub address: String,
    /// The launcher that took the run, or was about to.
    pub launcher: String,
    /// The one before it.
    pub before: String,
    /// The set that is there, if there is one: steps that are done.
    pub step: Option<u64>,
    /// Bytes.
    pub bytes: u64,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, step, bytes, .. } = self;
        match step {
            Some(step) => {
                write!(f, "in its bucket: checkpoint {step} · {} · {address}", human::bytes(*bytes))
            }
            None => write!(f, "in its bucket: no checkpoint yet · {address}"),
        }
    }
}

impl Record {
    /// The record of an output directory.
    pub fn load(output: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(output.join(RECORD)).ok()?).ok()
    }

    /// Leaves it for the next launch and for people.
    pub fn write(&self, output: &Path) -> Result<(), BucketError> {
        let path = output.join(RECORD);
        let text = serde_json::to_vec_pretty(self).expect("a record has text as keys");
        fs::create_dir_all(output).and_then(|()| in_place::replace(&path, &text)).map_err(disk(&path))
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::checkpoint;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_missing_file_of_a_checkpoint_is_named_and_a_checkpoint_that_is_gone_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (output, journal) = (dir.path().to_owned(), dir.path().join(JOURNAL));
        fs::create_dir_all(output.join("coordinator")).unwrap();
        fs::write(&journal, b"steps").unwrap();
        let staging = Store::new(&output).stage(10).unwrap();
        let names = ["optimizer.safetensors", "trainables.safetensors"];
        names.iter().for_each(|name| fs::write(staging.file(name), name).unwrap());
        let manifest = json!({
            "format": checkpoint::FORMAT, "step": 10, "epoch": 0, "world_size": 1, "spec_digest": "d", "version": "v",
            "dataset_fingerprint": "f", "micro_batch": 1, "files": {},
        });
        let manifest = serde_json::from_value(manifest).unwrap();
        let found = staging.publish(manifest, &names.map(str::to_owned)).unwrap();
        let local = Local { step: 10, journal, output };
        let mut there: Vec<_> = local.open().unwrap().unwrap().into_iter().map(|file| file.path).collect();
        there.sort();
        let at = |name: &str| format!("checkpoints/step-00000010/{name}");
        assert_eq!(there, [&at("manifest.json"), &at(names[0]), &at(names[1]), JOURNAL]);
        fs::remove_file(found.path.join(names[0])).unwrap();
        let missing = local.open().err().unwrap();
        assert!(missing.is_missing() && missing.to_string().contains(names[0]), "{missing}");
        fs::remove_dir_all(&found.path).unwrap();
        assert!(local.open().unwrap().is_none());
    }
}
