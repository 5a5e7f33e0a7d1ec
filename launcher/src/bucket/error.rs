//! Why a run cannot be kept in a bucket, or brought from there, and what to do about it.

use std::{io, path::Path};

use coxswain_remote::StorageError;

use super::index::Foreign;
use crate::exit::{CliError, Exit};

/// See the variants.
#[derive(Debug, thiserror::Error)]
pub enum BucketError {
    /// The bucket, or one of its objects.
    #[error("run.bucket: {0}")]
    Storage(#[from] StorageError),
    /// What lies there is of another run, or of another version.
    #[error("run.bucket: {address} {foreign}; give this run an address of its own")]
    Foreign {
        /// The run's address.
        address: String,
        /// What it is.
        foreign: Foreign,
    },
    /// What lies there is damaged, all of it.
    #[error(
        "run.bucket: {address}: no complete checkpoint of the run: {damage}; restore the object, or name another bucket to start over"
    )]
    Damaged {
        /// The run's address.
        address: String,
        /// The object that the newest set misses.
        damage: String,
    },
    /// The run would begin anew over one that is there.
    #[error(
        "run.bucket: {address} already holds this run up to step {step}, and train.resume=false would \
         overwrite it: remove train.resume=false to resume, or name another bucket path"
    )]
    Anew {
        /// The run's address.
        address: String,
        /// How far it is.
        step: u64,
    },
    /// The run has come further than it is to go.
    #[error(
        "run.bucket: {address} already holds this run up to step {step}, but this launch would end \
         after step {steps}: raise train.steps or train.epochs, or name another bucket path"
    )]
    BeyondItsEnd {
        /// The run's address.
        address: String,
        /// How far it is.
        step: u64,
        /// How far it is to go.
        steps: u64,
    },
    /// Another launch has taken the run.
    #[error(
        "another launch of this run has taken over {address} ({launcher}, {ago} s ago): this launch stops uploading and exits"
    )]
    Superseded {
        /// The run's address.
        address: String,
        /// Launcher.
        launcher: String,
        /// How long it has had the run.
        ago: u64,
    },
    /// The thread that keeps the run has ended before its time.
    #[error("run.bucket: the upload thread has failed; see the log")]
    Thread,
    /// The disk of this machine.
    #[error("{path}: {source}")]
    Disk {
        /// Which file or directory.
        path: String,
        /// What the system said.
        source: io::Error,
    },
}

impl BucketError {
    /// Whether a file is not there.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Disk { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

impl From<BucketError> for CliError {
    fn from(error: BucketError) -> Self {
        let exit = match &error {
            BucketError::Foreign { .. } | BucketError::Damaged { .. } => Exit::BadInput,
            BucketError::Superseded { .. } => Exit::Rendezvous,
            BucketError::Thread => Exit::Internal,
            BucketError::Storage(_) | BucketError::Disk { .. } => Exit::Usage,
            BucketError::Anew { .. } | BucketError::BeyondItsEnd { .. } => Exit::Usage,
        };
        Self::new(exit, error)
    }
}

/// For what the system says of a path.
pub fn disk(path: &Path) -> impl FnOnce(io::Error) -> BucketError + '_ {
    move |source| BucketError::Disk { path: path.display().to_string(), source }
}
