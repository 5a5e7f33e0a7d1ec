//! Where files of data sets lie: on a disk, in a bucket, on a web server.
//!
//! A path that begins with a scheme (`s3://bucket/set/meta/info.json`) is an address; paths are joined and
//! shown alike. Files of data sets are opened here, so that no other code need know the difference.
//!
//! ```text
//! content   the bytes of a file, by range or one after the other
//! disk      files
//! hub       directories that are named as on Hugging Face's hub
//! Remote    addresses: `worker/remote`, which a program installs. Where none does, they are refused
//! ```

mod content;
mod disk;
pub mod hub;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

pub use content::{Content, Reader};

use coxswain_proto::run_spec::BucketCache;

use crate::error::DataError;

/// Reads what is not on a disk of this machine. Paths are addresses here.
pub trait Remote: Send + Sync {
    /// See [`keep`].
    fn keep(&self, dir: Option<PathBuf>, bytes: u64);

    /// See [`enter`].
    fn enter(&self, root: &Path) -> Result<(), DataError>;

    /// See [`open`].
    fn open(&self, path: &Path) -> Result<Arc<dyn Content>, DataError>;

    /// See [`bytes`].
    fn bytes(&self, path: &Path) -> Result<Option<u64>, DataError>;

    /// See [`entries`].
    fn entries(&self, dir: &Path) -> Result<Option<Vec<PathBuf>>, DataError>;

    /// See [`pin`].
    fn pin(&self, root: &Path, file: &Path) -> Result<(), DataError>;

    /// See [`folder`].
    fn folder(&self, root: &Path, pieces: &[Piece]) -> Result<PathBuf, DataError>;

    /// See [`version`].
    fn version(&self, path: &Path) -> Result<[u8; 16], DataError>;
}

/// What is wanted of a file that is to lie on the disk of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Name, right below the address.
    pub name: String,
    /// So many bytes from its beginning, and of the rest its length alone; all of it if absent.
    pub head: Option<u64>,
}

/// One for the whole process, as its file system is.
static REMOTE: OnceLock<&'static dyn Remote> = OnceLock::new();

/// Who reads addresses in this process; the first that is said stays.
pub fn reach(remote: &'static dyn Remote) {
    let _ = REMOTE.set(remote);
}

fn remote(path: &Path) -> Result<&'static dyn Remote, DataError> {
    let known = ["s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https"];
    let scheme = path.to_str().and_then(|text| text.split_once("://")).map_or("", |(scheme, _)| scheme);
    let fault = match known.contains(&scheme) {
        true => "this program was built without buckets; build it with `cargo build --release --features buckets`, or copy the files to a disk".to_owned(),
        false => format!("{scheme}:// addresses are not supported; name a directory, or s3://, gs://, az:// or https://"),
    };
    let refused = || DataError::Remote { path: path.to_path_buf(), fault, passes: false };
    REMOTE.get().copied().filter(|_| known.contains(&scheme)).ok_or_else(refused)
}

/// Where what is brought is kept from now on, and how many bytes of it.
pub fn keep(cache: &BucketCache) {
    if let Some(remote) = REMOTE.get() {
        remote.keep(cache.dir.as_ref().map(PathBuf::from), cache.budget);
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
    if is_remote(root) { remote(root)?.enter(root) } else { Ok(()) }
}

/// Whether all below a data set's root is what `file` says it was, which is written the first time. Files of
/// this machine are taken as they are.
pub fn pin(root: &Path, file: &Path) -> Result<(), DataError> {
    if is_remote(root) { remote(root)?.pin(root, file) } else { Ok(()) }
}

/// A directory of this machine that has these files of an address, after bringing them where they are not
/// there yet: for what is mapped into memory.
pub fn folder(root: &Path, pieces: &[Piece]) -> Result<PathBuf, DataError> {
    if is_remote(root) { remote(root)?.folder(root, pieces) } else { Ok(root.to_path_buf()) }
}

/// Names the content of an object by its address and its version there: nothing of it is read. None for a
/// file of this machine, which tells no more of itself than when it was written.
pub fn version(path: &Path) -> Result<Option<[u8; 16]>, DataError> {
    if is_remote(path) { remote(path)?.version(path).map(Some) } else { Ok(None) }
}

/// A file to be read.
pub fn open(path: &Path) -> Result<Arc<dyn Content>, DataError> {
    if is_remote(path) { remote(path)?.open(path) } else { disk::open(path) }
}

/// How many bytes a file has; `None` if it is not there.
pub fn bytes(path: &Path) -> Result<Option<u64>, DataError> {
    match is_remote(path) {
        true => remote(path)?.bytes(path),
        false => Ok(std::fs::metadata(path).ok().map(|file| file.len())),
    }
}

/// Refuses a data set that lacks a part of its metadata.
pub fn require(path: &Path) -> Result<(), DataError> {
    let remedy = "restore the data set's folder `meta`, or download it again";
    bytes(path)?.map(drop).ok_or_else(|| DataError::invalid(path, "(file)", "missing", remedy))
}

/// What lies right below a directory, in order of names; `None` where that cannot be asked.
pub fn entries(dir: &Path) -> Result<Option<Vec<PathBuf>>, DataError> {
    if is_remote(dir) { remote(dir)?.entries(dir) } else { disk::entries(dir).map(Some) }
}

/// All of a file that has at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, DataError> {
    if !is_remote(path) {
        return coxswain_proto::bounded::read(path, limit).map_err(DataError::io(path, "read"));
    }
    let content = open(path)?;
    if content.len() > limit {
        let problem = format!("it has more than {limit} bytes, the maximum for a file of this kind");
        let error = io::Error::new(io::ErrorKind::FileTooLarge, problem);
        return Err(DataError::io(path, "read")(error));
    }
    content.bring(&[0..content.len()])?;
    let mut bytes = vec![0; content.len() as usize];
    content.read_at(0, &mut bytes).map_err(DataError::io(path, "read"))?;
    Ok(bytes)
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

    #[test]
    fn without_buckets_an_address_is_refused_with_what_to_build() {
        let error = enter(Path::new("s3://bucket/set")).unwrap_err().to_string();
        assert!(error.starts_with("s3://bucket/set: ") && error.contains("--features buckets"), "{error}");
    }
}
