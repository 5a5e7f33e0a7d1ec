//! Why a checkpoint cannot be written or read, and what to do about it.

use std::{
    io,
    path::{Path, PathBuf},
};

use nix::errno::Errno;

use crate::memory::OutOfMemory;

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system refused.
    #[error("{action} {path}: {source}{}", remedy(source))]
    Io {
        /// What was tried: `write`, `publish`, ...
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// A file is not what the manifest says.
    #[error("checkpoint file {path} is damaged: {detail}; restore it from a copy, or remove {} to resume from an older checkpoint if there is one", path.parent().unwrap_or(path).display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// How.
        detail: String,
    },
    /// Ranks have found it damaged before, and have given it another name.
    #[error("checkpoint {path} was damaged, and is kept as {}; there is no older checkpoint to resume from", aside.display())]
    SetAside {
        /// Where it was.
        path: PathBuf,
        /// Where it is.
        aside: PathBuf,
    },
    /// The checkpoint belongs to something else.
    #[error("{path}: {detail}")]
    Foreign {
        /// Which.
        path: PathBuf,
        /// What differs, and what to do.
        detail: String,
    },
    /// Another rank could not write its part.
    #[error(
        "checkpoint of step {step} given up: another rank could not write its part (its own log says why)"
    )]
    OtherRank {
        /// Which checkpoint.
        step: u64,
    },
    /// Training cannot go on from the state, so that it is no checkpoint.
    #[error("the weights or moments after step {step} are not finite or too large")]
    Unsound {
        /// Steps done.
        step: u64,
    },
    /// Memory ran out while this rank wrote its part.
    #[error("checkpoint of step {step} given up: {source}; the next one is tried as usual")]
    DoesNotFit {
        /// Which checkpoint.
        step: u64,
        /// What was wanted, and what held the rest.
        source: Box<OutOfMemory>,
    },
}

impl CheckpointError {
    /// Whether the checkpoint itself is at fault, so that an older one may serve: a file is not what was
    /// written, is not there, or lies where the disk cannot read.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } | Self::SetAside { .. } => true,
            Self::Io { action: "read", source, .. } => {
                source.kind() == io::ErrorKind::NotFound || source.raw_os_error() == Some(Errno::EIO as i32)
            }
            _ => false,
        }
    }
}

/// What to do about it, after the system's words.
pub(in crate::train) fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free space, lower train.keep_checkpoints, or move run.output_dir"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; choose another run.output_dir"
        }
        io::ErrorKind::FileTooLarge => "; raise the limit on the size of files (`ulimit -f unlimited`)",
        _ => "",
    }
}

pub(in crate::train) fn io_error<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> CheckpointError + 'a {
    move |source| CheckpointError::Io { action, path: path.to_path_buf(), source }
}
