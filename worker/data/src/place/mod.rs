//! Where files of data sets lie: on a disk, in a bucket, on a web server.
//!
//! A path that begins with a scheme (`s3://bucket/set/meta/info.json`) is an address; paths are joined and
//! shown alike. Whoever reads a data set opens its files here, so that nobody else need know the difference.
//!
//! ```text
//! disk      files
//! remote    addresses, in a build with the feature `buckets`; without it they are refused
//! ```

mod disk;
#[cfg(feature = "buckets")]
mod remote;
#[cfg(not(feature = "buckets"))]
#[path = "no_remote.rs"]
mod remote;

use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

pub use remote::keep;

use crate::error::DataError;

/// The bytes of a file.
pub trait Content: Send + Sync {
    /// Their number, as it was when the file was opened.
    fn len(&self) -> u64;

    /// Fills `buffer` from `offset`. Short reads are errors.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Makes these ranges quick to read, side by side: brings what is far away. What fails here is the
    /// network's fault, or the object's, and no sample's.
    fn bring(&self, _ranges: &[Range<u64>]) -> Result<(), DataError> {
        Ok(())
    }

    /// Whether there is nothing to read.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Whether a path is the address of something that is not on a disk of this machine.
pub fn is_remote(path: &Path) -> bool {
    let scheme = |text: &str| {
        let (scheme, _) = text.split_once("://")?;
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
        (!scheme.is_empty() && scheme.chars().all(legal)).then_some(())
    };
    path.to_str().and_then(scheme).is_some()
}

/// Looks once at all that lies below a data set's root, where that saves asking for each file. Credentials
/// and addresses that are wrong fail here.
pub fn enter(root: &Path) -> Result<(), DataError> {
    if is_remote(root) { remote::enter(root) } else { Ok(()) }
}

/// Whether all that lies below a data set's root is what `file`, which is written the first time, says it was.
/// Files of this machine are taken as they are.
pub fn pin(root: &Path, file: &Path) -> Result<(), DataError> {
    if is_remote(root) { remote::pin(root, file) } else { Ok(()) }
}

/// A file to be read.
pub fn open(path: &Path) -> Result<Arc<dyn Content>, DataError> {
    if is_remote(path) { remote::open(path) } else { disk::open(path) }
}

/// How many bytes a file has; `None` if it is not there.
pub fn bytes(path: &Path) -> Result<Option<u64>, DataError> {
    match is_remote(path) {
        true => remote::bytes(path),
        false => Ok(std::fs::metadata(path).ok().map(|file| file.len())),
    }
}

/// What lies right below a directory, in order of names; `None` where that cannot be asked.
pub fn entries(dir: &Path) -> Result<Option<Vec<PathBuf>>, DataError> {
    if is_remote(dir) { remote::entries(dir) } else { disk::entries(dir).map(Some) }
}

/// All of a file that has at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, DataError> {
    if !is_remote(path) {
        return coxswain_proto::bounded::read(path, limit).map_err(DataError::io(path, "read"));
    }
    let content = open(path)?;
    if content.len() > limit {
        let problem = format!("it has more than {limit} bytes, which no file of this kind has");
        let error = io::Error::new(io::ErrorKind::FileTooLarge, problem);
        return Err(DataError::io(path, "read")(error));
    }
    content.bring(&[0..content.len()])?;
    let mut bytes = vec![0; content.len() as usize];
    content.read_at(0, &mut bytes).map_err(DataError::io(path, "read"))?;
    Ok(bytes)
}

/// A file read from its beginning to its end.
pub struct Reader {
    content: Arc<dyn Content>,
    at: u64,
}

impl Reader {
    /// From `at` on.
    pub fn new(content: Arc<dyn Content>, at: u64) -> Self {
        Self { content, at }
    }
}

impl io::Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.content.len().saturating_sub(self.at);
        let count = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        self.content.read_at(self.at, &mut buffer[..count])?;
        self.at += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_told_from_a_path() {
        for address in ["s3://bucket/set", "https://host/set", "nonsense://x"] {
            assert!(is_remote(Path::new(address)), "{address}");
            assert!(is_remote(&Path::new(address).join("meta/info.json")), "{address}");
        }
        for path in ["/data/set", "set", "./s3:/x", "/data/a://b", "://x"] {
            assert!(!is_remote(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn an_unknown_scheme_is_refused_with_the_address() {
        let error = open(Path::new("ftp://host/set/meta/info.json")).map(drop).unwrap_err().to_string();
        assert!(error.starts_with("ftp://host/set/meta/info.json: ") && error.contains("s3://"), "{error}");
    }
}
