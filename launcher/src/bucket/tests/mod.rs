//! Launches, a bucket in memory that fails where a test says so, and the order of writes.

mod bringing;
mod owning;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Write},
    os::unix::fs::FileExt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use coxswain_proto::run_spec::RunSpec;
use coxswain_remote::{Storage, StorageError, Version};
use coxswain_worker::train::checkpoint::FileEntry;

use super::{
    index::{INDEX, Index},
    owner::{OpenFile, Owner},
};

const AT: &str = "s3://bucket/run";

/// Objects of a bucket, for all who have a clone.
#[derive(Clone, Default)]
struct Fake(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    objects: BTreeMap<String, (Vec<u8>, u64)>,
    versions: u64,
    /// Writes and removals that are carried out before all of them fail.
    writes: Option<usize>,
    /// Whether a conditional write is carried out, and tried again because its answer was lost.
    loses_answers: bool,
    /// Whether a conditional write is carried out, and its answer never comes.
    is_cut_off: bool,
    /// Whether conditions of writes are read over.
    heedless: bool,
}

impl Fake {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failing_after(writes: usize) -> Self {
        let fake = Self::default();
        fake.state().writes = Some(writes);
        fake
    }

    fn names(&self) -> Vec<String> {
        self.state().objects.keys().cloned().collect()
    }

    fn index(&self) -> Option<Index> {
        let (bytes, _) = self.state().objects.get(INDEX)?.clone();
        Some(Index::parse(&bytes).unwrap())
    }

    fn damage(&self, name: &str) {
        self.state().objects.get_mut(name).unwrap().0[0] ^= 1;
    }

    /// Every object that the index names is there, and what was written.
    fn assert_whole(&self) {
        let Some(index) = self.index() else { return };
        for kept in index.sets.iter().flat_map(|set| &set.files).chain(&index.results) {
            let state = self.state();
            let (bytes, _) = state.objects.get(&kept.object).unwrap_or_else(|| panic!("{kept:?} is gone"));
            assert_eq!(entry(bytes), kept.entry, "{kept:?}");
        }
    }
}

impl State {
    fn write(&mut self, name: &str) -> Result<(), StorageError> {
        match &mut self.writes {
            Some(0) => Err(error(name, "no answer", false)),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn put(&mut self, name: &str, bytes: Vec<u8>) -> Version {
        self.versions += 1;
        self.objects.insert(name.to_owned(), (bytes, self.versions));
        version(self.versions)
    }
}

fn version(number: u64) -> Version {
    Version { tag: Some(number.to_string()), number: None }
}

fn error(name: &str, fault: &str, of_object: bool) -> StorageError {
    StorageError { object: format!("{AT}/{name}"), fault: fault.to_owned(), of_object }
}

impl Storage for Fake {
    fn get(&self, name: &str) -> Result<Option<(Vec<u8>, Version)>, StorageError> {
        Ok(self.state().objects.get(name).map(|(bytes, number)| (bytes.clone(), version(*number))))
    }

    fn swap(
        &self,
        name: &str,
        bytes: &[u8],
        before: Option<&Version>,
    ) -> Result<Option<Version>, StorageError> {
        let mut state = self.state();
        state.write(name)?;
        let now = state.objects.get(name).map(|(_, number)| version(*number));
        if now.as_ref() != before && !state.heedless {
            return Ok(None);
        }
        let version = state.put(name, bytes.to_vec());
        if state.is_cut_off {
            return Err(error(name, "no answer", false));
        }
        Ok((!state.loses_answers).then_some(version))
    }

    fn upload(&self, name: &str, mut file: &File, bytes: u64) -> Result<(), StorageError> {
        let mut state = self.state();
        state.write(name)?;
        let mut content = Vec::new();
        file.read_to_end(&mut content).unwrap();
        assert_eq!(content.len() as u64, bytes);
        state.put(name, content);
        Ok(())
    }

    fn download(&self, name: &str, bytes: u64, file: &File) -> Result<(), StorageError> {
        let state = self.state();
        let (content, _) =
            state.objects.get(name).ok_or_else(|| error(name, "there is no such object", true))?;
        assert_eq!(content.len() as u64, bytes);
        file.write_all_at(content, 0).unwrap();
        Ok(())
    }

    fn list(&self, below: &str) -> Result<Vec<String>, StorageError> {
        Ok(self.names().into_iter().filter(|name| name.starts_with(below)).collect())
    }

    fn remove(&self, name: &str) -> Result<(), StorageError> {
        let mut state = self.state();
        state.write(name)?;
        state.objects.remove(name);
        Ok(())
    }
}

fn spec(seed: u64) -> RunSpec {
    serde_json::from_value(serde_json::json!({
        "run": {"name": "quick", "output_dir": "out", "seed": seed, "bucket": AT},
        "model": {"path": "models/tiny"},
        "data": {"path": "data/tiny", "cameras": ["front"]},
        "train": {"steps": 100, "global_batch": 8, "micro_batch": 2},
    }))
    .expect("the specification is complete")
}

fn entry(bytes: &[u8]) -> FileEntry {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    FileEntry::describe(file.path()).unwrap()
}

fn source(path: &str, content: &str) -> OpenFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(content.as_bytes()).unwrap();
    let entry = FileEntry::describe(file.path()).unwrap();
    OpenFile { path: path.to_owned(), file: file.reopen().unwrap(), entry }
}

/// A checkpoint with its journal.
fn set(step: u64) -> Vec<OpenFile> {
    let dir = format!("checkpoints/step-{step:08}");
    vec![
        source(&format!("{dir}/trainables.safetensors"), &format!("weights after {step}")),
        source(&format!("{dir}/optimizer-rank0000-of-0001.safetensors"), &format!("moments after {step}")),
        source(&format!("{dir}/manifest.json"), &format!("manifest of {step}")),
        source("coordinator/journal.redb", &format!("steps before {step}")),
    ]
}

fn take(fake: &Fake, launcher: &str) -> Owner {
    Owner::claim(Box::new(fake.clone()), AT, &spec(7), launcher).unwrap()
}
