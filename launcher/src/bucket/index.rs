//! What a bucket has of a run: the one object that says so, and what it says.
//!
//! ```text
//! ADDRESS/index.json                      which launch the run belongs to, and its complete sets
//! ADDRESS/sets/000003-000002/..           files of the second set that the run's third launch has kept
//! ADDRESS/adapter/.., summary.json, ..    results, under the names that they have on the disk
//! ```
//!
//! A set is a checkpoint, the journal that belongs to it, and what little else of the output directory a run
//! goes on from. It is there once the index names it: objects that the index does not name are of nobody.

use coxswain_proto::{document, run_spec::RunSpec};
use coxswain_worker::train::checkpoint::FileEntry;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The index's name.
pub const INDEX: &str = "index.json";
/// Where the objects of sets are.
pub const SETS: &str = "sets";

/// The only layout there is.
const FORMAT: u32 = 1;

/// `index.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Index {
    format: u32,
    /// `run.name`, for people.
    pub run: String,
    /// The run as it was launched last.
    spec: Value,
    /// Launches that have taken the run so far: the last one's number.
    pub launch: u64,
    /// The id of that launcher.
    pub launcher: String,
    /// When it took the run, in seconds since 1970.
    pub since: u64,
    /// Complete sets, the newest last.
    pub sets: Vec<Set>,
    /// What the run has left at its end.
    #[serde(default)]
    pub results: Vec<Upload>,
}

/// What a run goes on from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Set {
    /// Steps that are done.
    pub step: u64,
    /// Files; the journal is one of them.
    pub files: Vec<Upload>,
}

/// A file that is in the bucket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upload {
    /// Relative to the output directory.
    pub path: String,
    /// Object, below the run's address.
    pub object: String,
    /// Length and digest.
    #[serde(flatten)]
    pub entry: FileEntry,
}

/// Why an index is of no use here.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Foreign {
    /// Not what this version writes.
    #[error("is damaged, or was written by another version ({0})")]
    Unknown(String),
    /// Another run's.
    #[error("holds another run, {run}, after step {step}: {differences}")]
    OtherRun {
        /// Name.
        run: String,
        /// How far it is.
        step: u64,
        /// Where the two differ.
        differences: String,
    },
}

impl Index {
    /// The index of a run that has nothing in the bucket yet.
    pub fn new(spec: &RunSpec) -> Self {
        Self {
            format: FORMAT,
            run: spec.run.name.clone(),
            spec: as_json(spec),
            launch: 0,
            launcher: String::new(),
            since: 0,
            sets: Vec::new(),
            results: Vec::new(),
        }
    }

    /// As it lies in the bucket.
    pub fn parse(bytes: &[u8]) -> Result<Self, Foreign> {
        let unknown = |error: &dyn std::fmt::Display| Foreign::Unknown(error.to_string());
        let index: Self = serde_json::from_slice(bytes).map_err(|error| unknown(&error))?;
        match index.format {
            FORMAT => Ok(index),
            other => Err(unknown(&format_args!("format {other}; this version reads {FORMAT}"))),
        }
    }

    /// As it is written.
    pub fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("an index has text as keys")
    }

    /// The run as it was launched last, if this version can read that.
    pub fn spec(&self) -> Option<RunSpec> {
        serde_json::from_value(self.spec.clone()).ok()
    }

    /// Whether it is the record of this run.
    pub fn must_be_of(&self, spec: &RunSpec) -> Result<(), Foreign> {
        let Some(theirs) = self.spec() else {
            return Err(Foreign::Unknown("its specification is of another version".to_owned()));
        };
        let differences = document::differences(&theirs, spec);
        let told: Vec<_> =
            differences.iter().filter(|of| !of.may_change()).take(4).map(ToString::to_string).collect();
        match told.is_empty() {
            true => Ok(()),
            false => Err(Foreign::OtherRun {
                run: self.run.clone(),
                step: self.newest().map_or(0, |set| set.step),
                differences: told.join(", "),
            }),
        }
    }

    /// What the run goes on from.
    pub fn newest(&self) -> Option<&Set> {
        self.sets.last()
    }

    /// The index after another launch has taken the run.
    pub fn taken(&self, spec: &RunSpec, launcher: &str, now: u64) -> Self {
        Self {
            run: spec.run.name.clone(),
            spec: as_json(spec),
            launch: self.launch + 1,
            launcher: launcher.to_owned(),
            since: now,
            ..self.clone()
        }
    }

    /// The index with a newer set, and no more than `keep` of them. One of the same step gives way: it was
    /// written before a rollback over it, or says less of the same.
    pub fn with(&self, set: Set, keep: usize) -> Self {
        let mut index = self.clone();
        index.sets.retain(|known| known.step != set.step);
        index.sets.push(set);
        let surplus = index.sets.len().saturating_sub(keep.max(1));
        index.sets.drain(..surplus);
        index
    }

    /// The index with what the run has left.
    pub fn leaving(&self, results: Vec<Upload>) -> Self {
        Self { results, ..self.clone() }
    }

    /// The object of a file with this path and content, if a set has it.
    pub fn object_of(&self, path: &str, entry: &FileEntry) -> Option<&str> {
        let mut files = self.sets.iter().flat_map(|set| &set.files);
        let known = files.find(|kept| kept.path == path && kept.entry == *entry);
        known.map(|kept| kept.object.as_str())
    }

    /// Whether a set or the results need this object.
    pub fn needs(&self, object: &str) -> bool {
        let mut kept = self.sets.iter().flat_map(|set| &set.files).chain(&self.results);
        kept.any(|kept| kept.object == object)
    }
}

impl Set {
    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.entry.bytes))
    }
}

/// Names where the objects of a launch's set go: no other set has ever had that place.
pub fn place(launch: u64, number: u64) -> String {
    format!("{SETS}/{launch:06}-{number:06}")
}

fn as_json(spec: &RunSpec) -> Value {
    serde_json::to_value(spec).expect("a run specification has text as keys")
}
