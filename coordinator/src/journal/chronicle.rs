//! A run's records, read from the journal that its coordinator left behind.

use std::path::Path;

use coxswain_proto::{order::DamagedRow, plan::Plan, run_spec::RunSpec};

use super::{History, Identity, JournalError, LedgerEntry, copies, durable, reading::Contents};
use crate::core::event::DataSet;

/// Everything that a run has committed, and what it survived.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chronicle {
    /// Names the run among runs.
    pub run_id: String,
    /// `run.name`.
    pub run_name: String,
    /// Whose it is, as it was written; absent if no coordinator ever began.
    pub identity: Option<Identity>,
    /// What it trains on; absent if no worker ever opened it.
    pub dataset: Option<DataSet>,
    /// The specification of the newest launch; absent if it is of another version.
    pub spec: Option<RunSpec>,
    /// Samples in an epoch; 0 if no worker ever opened the data set.
    pub training_samples: u64,
    /// Samples in a step that is not an epoch's last.
    pub global_batch: u64,
    /// Steps of the whole run; absent if the data set is not known.
    pub total_steps: Option<u64>,
    /// Committed steps, in order, without a gap.
    pub steps: Vec<LedgerEntry>,
    /// Memberships, faults, and the end.
    pub history: History,
    /// Rows of the data set that are left out, because their samples failed again and again.
    pub quarantined: Vec<DamagedRow>,
}

/// Whether there is a journal in a state directory.
pub fn exists(directory: &Path) -> bool {
    directory.join(copies::FILE).is_file()
}

/// Reads the journal in a state directory, and leaves it as it is.
///
/// Refuses a directory without a journal, one that a living coordinator holds (ask that one), and a damaged
/// journal, with the row.
pub fn read(directory: &Path) -> Result<Chronicle, JournalError> {
    let failed =
        |reason: String| JournalError::Store { action: "read", directory: directory.to_path_buf(), reason };
    let path = directory.join(copies::FILE);
    if !exists(directory) {
        return Err(failed(format!("there is no {}", copies::FILE)));
    }
    // Held by a coordinator: its own lock says so.
    drop(lock(&path, directory)?);
    // A journal whose coordinator was killed has to be repaired to be read: on a copy.
    let copy =
        std::env::temp_dir().join(format!("coxswain-journal-{}-{:016x}", std::process::id(), random()));
    std::fs::create_dir(&copy).map_err(|error| failed(format!("{}: {error}", copy.display())))?;
    let copied = std::fs::copy(&path, copy.join(copies::FILE)).map_err(|error| failed(error.to_string()));
    let contents = copied.map(|_| durable::open_whole(&copy.as_path().into()));
    // What is left of a copy in the temporary directory does no harm.
    let _ = std::fs::remove_dir_all(&copy);
    match contents? {
        Ok((_, contents)) => Ok(chronicle(contents)),
        Err(JournalError::Damaged { table, row, reason, .. }) => {
            Err(JournalError::Damaged { directory: directory.to_path_buf(), table, row, reason })
        }
        Err(JournalError::Store { reason, .. }) => {
            Err(JournalError::Unreadable { directory: directory.to_path_buf(), reason })
        }
        Err(other) => Err(other),
    }
}

fn lock(path: &Path, directory: &Path) -> Result<std::fs::File, JournalError> {
    let failed =
        |reason: String| JournalError::Store { action: "open", directory: directory.to_path_buf(), reason };
    let file = std::fs::File::open(path).map_err(|error| failed(error.to_string()))?;
    match file.try_lock_shared() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => {
            Err(JournalError::InUse { directory: directory.to_path_buf() })
        }
        Err(std::fs::TryLockError::Error(error)) => Err(failed(error.to_string())),
    }
}

fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

fn chronicle(contents: Contents) -> Chronicle {
    let spec =
        contents.identity.as_ref().and_then(|identity| serde_json::from_str::<RunSpec>(&identity.spec).ok());
    let past = contents.past;
    let samples = past.dataset.as_ref().map_or(0, |dataset| dataset.training_samples);
    let plan = spec.as_ref().and_then(|spec| Plan::new(&spec.train, samples).ok());
    let identity = contents.identity;
    Chronicle {
        run_id: identity.as_ref().map_or_else(String::new, |identity| identity.run_id.clone()),
        run_name: identity.as_ref().map_or_else(String::new, |identity| identity.run_name.clone()),
        identity,
        dataset: past.dataset,
        spec,
        training_samples: samples,
        global_batch: plan.map_or(0, |plan| plan.global_batch()),
        total_steps: plan.map(|plan| plan.total_steps()),
        steps: contents.steps,
        history: History {
            changes: contents.changes,
            ..History::new(past.end.as_ref(), past.generations, contents.failures)
        },
        quarantined: past.quarantine.left_out().copied().collect(),
    }
}
