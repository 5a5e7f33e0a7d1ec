//! Whose journal it is, and why one cannot be used.

use std::path::{Path, PathBuf};

use coxswain_proto::{
    document::{self, Difference},
    ids::Step,
    run_spec::RunSpec,
};
use serde::{Deserialize, Serialize};

/// Whose journal it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Names the run among runs.
    pub run_id: String,
    /// `run.name`.
    pub run_name: String,
    /// Names what is learned.
    pub spec_digest: String,
    /// The specification as JSON, to say what differs.
    pub spec: String,
}

/// A key that was changed where the run was resumed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Steps below this one were committed.
    pub step: Step,
    /// Dotted key.
    pub key: String,
    /// What it said before, as JSON.
    pub from: String,
    /// What it says from there on.
    pub to: String,
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { step, key, from, to } = self;
        write!(f, "changed at step {step}: {key} from {from} to {to}")
    }
}

impl Identity {
    /// The identity of a run of this specification.
    pub fn new(spec: &RunSpec, run_id: String) -> Self {
        let document = coxswain_proto::v1::RunSpecDocument::from(spec);
        Self { run_id, run_name: spec.run.name.clone(), spec_digest: document.digest, spec: document.json }
    }
}

/// What `spec` says otherwise than the run whose journal lies in a directory, if both are the same run: that
/// goes on at `step`.
pub fn changes(
    directory: &Path,
    theirs: &Identity,
    spec: &RunSpec,
    step: Step,
) -> Result<Vec<Change>, JournalError> {
    let ours = Identity::new(spec, theirs.run_id.clone());
    let difference = match serde_json::from_str::<RunSpec>(&theirs.spec) {
        Ok(other) => {
            let mut differences = document::differences(&other, spec);
            if differences.iter().all(Difference::may_change) {
                differences.extend(document::told_changes(&other, spec));
                differences.sort_by(|one, other| one.key.cmp(&other.key));
                let change =
                    |Difference { key, left, right, .. }| Change { step, key, from: left, to: right };
                return Ok(differences.into_iter().map(change).collect());
            }
            differences.retain(|difference| !difference.may_change());
            let told: Vec<_> = differences.iter().take(4).map(ToString::to_string).collect();
            told.join(", ")
        }
        Err(_) if theirs.spec_digest == ours.spec_digest => return Ok(Vec::new()),
        Err(_) => "its specification was written by another version of cox".to_owned(),
    };
    Err(JournalError::OtherRun {
        directory: directory.to_path_buf(),
        theirs: Box::new(theirs.clone()),
        ours: Box::new(ours),
        difference,
    })
}

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// It belongs to another run.
    #[error(
        "{} {}: {difference}. Give this run another run.output_dir. To start over in the same one, remove the journal's directory and set \
         train.resume=false",
        directory.display(), whose(theirs, ours)
    )]
    OtherRun {
        /// Where it lies.
        directory: PathBuf,
        /// Whose it is.
        theirs: Box<Identity>,
        /// Who asked.
        ours: Box<Identity>,
        /// What differs.
        difference: String,
    },
    /// Another coordinator has it open.
    #[error("state directory {} is in use: a coordinator of this run is already running; stop it first", directory.display())]
    InUse {
        /// Where it lies.
        directory: PathBuf,
    },
    /// It cannot be read or written.
    #[error("cannot {action} the journal in {}: {reason}", directory.display())]
    Store {
        /// `open`, `read`, `write`.
        action: &'static str,
        /// Where it lies.
        directory: PathBuf,
        /// What the store or the operating system said.
        reason: String,
    },
    /// A row cannot be what was written.
    #[error(
        "the journal in {} is damaged: row {row} of table {table}: {reason}. Restore the file from a copy, or give the run another run.output_dir to start over",
        directory.display()
    )]
    Damaged {
        /// Where it lies.
        directory: PathBuf,
        /// Which table.
        table: &'static str,
        /// Which row.
        row: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The store cannot make anything of it.
    #[error("the journal in {} is damaged: {reason}", directory.display())]
    Unreadable {
        /// Where it lies.
        directory: PathBuf,
        /// What the store said.
        reason: String,
    },
    /// A launcher on another machine has started a coordinator in place of this one.
    #[error(
        "another coordinator has replaced this one (number {number} of this run), which writes nothing more"
    )]
    Superseded {
        /// The number of this one's claim.
        number: u64,
    },
    /// The coordinator was stopped while its disk was full.
    #[error("the coordinator was stopped while the disk of the journal in {} was full: unanswered calls are not recorded", directory.display())]
    Stopped {
        /// Where it lies.
        directory: PathBuf,
    },
    /// The journal's thread has ended.
    #[error("the journal's thread has ended")]
    Gone,
}

impl JournalError {
    /// Whether it is the journal that is wrong, and not the disk or another process.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Unreadable { .. })
    }
}

/// Which run's a state directory is that is not ours.
fn whose(theirs: &Identity, ours: &Identity) -> String {
    match theirs.run_id == ours.run_id {
        true => "is the journal of this run with another configuration".to_owned(),
        false => format!("is the journal of run {}, but this is run {}", theirs.run_id, ours.run_id),
    }
}
