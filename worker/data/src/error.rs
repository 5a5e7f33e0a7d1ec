//! Why data cannot be used: every variant names the file, the field or sample, what was found there, and the
//! remedy.

use std::path::{Path, PathBuf};

use coxswain_proto::order::DamagedRow;
use coxswain_video::Fault;
use parquet::errors::ParquetError;

/// A data set, tokenizer or image that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}{}", path.display(), remedy_of(source))]
    Io {
        /// Which file or directory.
        path: PathBuf,
        /// `read`, `list`, `write`.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A bucket, an object in it or the network refused: no file's content is to blame.
    #[error("{}: {fault}", path.display())]
    Remote {
        /// The object's address.
        path: PathBuf,
        /// What is wrong, and the remedy.
        fault: String,
        /// Whether it may pass by itself, as a network that is away.
        passes: bool,
    },
    /// A file contradicts its format, another file, or itself.
    #[error("{}: {field}: {found}; {remedy}", path.display())]
    Invalid {
        /// Which file.
        path: PathBuf,
        /// Field within the file.
        field: String,
        /// What stands there.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// What the data need of the model, such as its tokenizer, cannot be read: file, field, remedy.
    #[error("{0}")]
    Model(String),
    /// A parquet file is truncated or garbled.
    #[error("{}: cannot be read as parquet: {detail}; copy or download the file again", path.display())]
    Parquet {
        /// Which file.
        path: PathBuf,
        /// What the reader said.
        detail: String,
    },
    /// One data set of several cannot be used.
    #[error("data.sets.{at} (`{name}`): {source}")]
    Set {
        /// Place in the run file's list.
        at: usize,
        /// Name.
        name: String,
        /// What is wrong with it.
        source: Box<DataError>,
    },
    /// The run names a feature that the data set does not have.
    #[error("{}: data.{key} names `{name}`, which the data set does not have{}; suitable features: {available}{}", path.display(),
        suggestion.as_ref().map(|s| format!(" (did you mean `{s}`?)")).unwrap_or_default(),
        if *key == "state" { "; for a policy that sees only images set `data.state: none`" } else { "" })]
    UnknownFeature {
        /// The data set's `info.json`.
        path: PathBuf,
        /// Key of the run file: `cameras`, `state`, ...
        key: &'static str,
        /// As the run file spells it.
        name: String,
        /// Features that would do, comma-separated.
        available: String,
        /// The most similar of them.
        suggestion: Option<String>,
    },
    /// A camera's video file cannot be used, any of its frames.
    #[error("{}: {camera}: {fault}", path.display())]
    Video {
        /// The video.
        path: PathBuf,
        /// The camera.
        camera: String,
        /// What is wrong, and the remedy.
        fault: Fault,
    },
    /// A line of a text file is unusable.
    #[error("{}:{line}: {fault}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What is wrong, and the remedy.
        fault: String,
    },
    /// One sample is unusable.
    #[error("{}: sample {index} (episode {episode}, frame {frame}): {feature}: {fault}", path.display())]
    Sample {
        /// The data file.
        path: PathBuf,
        /// Position in the data set.
        index: u64,
        /// Episode.
        episode: u64,
        /// Frame of the episode.
        frame: u64,
        /// Feature.
        feature: String,
        /// What is wrong, and the remedy.
        fault: String,
    },
    /// What is wrong with a sample, and where in the order of samples it stands.
    #[error("{source} (position {position} of epoch {epoch})")]
    AtPosition {
        /// The epoch.
        epoch: u64,
        /// Position in that epoch's order.
        position: u64,
        /// The row that is to blame, and the samples that need it.
        row: DamagedRow,
        /// The error.
        source: Box<DataError>,
    },
    /// A sample or position beyond the end was asked for.
    #[error("{what} {index} does not exist ({len} in all, numbered from 0)")]
    OutOfRange {
        /// `sample`, `training position`, `episode`.
        what: &'static str,
        /// Which.
        index: u64,
        /// How many there are.
        len: u64,
    },
    /// The prefetch pipeline was used against its protocol, or its thread is gone.
    #[error("data pipeline: {0}")]
    Pipeline(String),
}

impl DataError {
    /// The operating system refused `action`, a verb, on `path`.
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, action, source }
    }

    /// `field` of a file contradicts something; `found` says what stands there, `remedy` what to do.
    pub fn invalid(
        path: &Path,
        field: impl Into<String>,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Invalid {
            path: path.to_path_buf(),
            field: field.into(),
            found: found.into(),
            remedy: remedy.into(),
        }
    }

    /// Whether the network, a bucket or a server of files is to blame, and no file and no sample.
    pub fn is_remote(&self) -> bool {
        match self {
            Self::Remote { .. } => true,
            Self::Io { source, .. } => is_away(source),
            Self::Set { source, .. } | Self::AtPosition { source, .. } => source.is_remote(),
            _ => false,
        }
    }

    /// Whether another try may help, with nothing changed.
    pub fn passes(&self) -> bool {
        match self {
            Self::Remote { passes, .. } => *passes,
            Self::Io { source, .. } => is_away(source),
            Self::Set { source, .. } | Self::AtPosition { source, .. } => source.passes(),
            _ => false,
        }
    }

    /// A parquet file is truncated or garbled, or its server is away.
    pub fn parquet(path: &Path, error: ParquetError) -> Self {
        let path = path.to_path_buf();
        match error {
            ParquetError::External(source) => match source.downcast::<std::io::Error>() {
                Ok(source) if is_away(&source) => Self::Io { path, action: "read", source: *source },
                Ok(source) => Self::Parquet { path, detail: source.to_string() },
                Err(other) => Self::Parquet { path, detail: other.to_string() },
            },
            other => Self::Parquet { path, detail: other.to_string() },
        }
    }
}

/// What helps where a file is not there.
fn remedy_of(error: &std::io::Error) -> &'static str {
    if error.kind() == std::io::ErrorKind::NotFound { "; restore it, or correct the path" } else { "" }
}

/// Whether a server of files does not answer, or has forgotten what was open: what a mounted directory says
/// of it.
fn is_away(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{
        HostUnreachable, NetworkDown, NetworkUnreachable, NotConnected, StaleNetworkFileHandle, TimedOut,
    };
    matches!(
        error.kind(),
        StaleNetworkFileHandle | TimedOut | NotConnected | HostUnreachable | NetworkDown | NetworkUnreachable
    )
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;

    #[test]
    fn a_server_that_is_away_is_told_from_a_file_that_cannot_be_read() {
        let path = Path::new("rows.parquet");
        let read = |kind: ErrorKind| DataError::io(path, "read")(kind.into());
        let parquet = |kind: ErrorKind| DataError::parquet(path, Error::from(kind).into());
        for away in [ErrorKind::StaleNetworkFileHandle, ErrorKind::TimedOut, ErrorKind::NotConnected] {
            assert!(
                [read(away), parquet(away)].iter().all(|error| error.is_remote() && error.passes()),
                "{away}"
            );
        }
        let here =
            [read(ErrorKind::NotFound), parquet(ErrorKind::UnexpectedEof), read(ErrorKind::PermissionDenied)];
        assert!(!here.iter().any(|error| error.is_remote() || error.passes()));
        assert!(matches!(&here[1], DataError::Parquet { .. }));
    }
}
