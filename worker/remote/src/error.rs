//! What went wrong with an object, and what helps.

use std::path::PathBuf;

/// Why an object, or a bucket, cannot be read. The object's address is for the caller to name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteError {
    /// Not the address of anything that is read here.
    #[error(
        "not an address that can be read: {0}; write s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or https://HOST/PATH"
    )]
    Address(String),
    /// There is no such object.
    #[error("there is no such object; correct the address, or upload the object")]
    Missing,
    /// There is no such bucket.
    #[error(
        "there is no bucket `{0}`; correct the address (and the endpoint and region in the environment, \
         if set)"
    )]
    NoBucket(String),
    /// The server does not let these credentials, or nobody without any, read.
    #[error("access is refused ({message}); {remedy}")]
    Denied {
        /// What the server said.
        message: String,
        /// Which variables of the environment hold credentials.
        remedy: &'static str,
    },
    /// No client can be made of what the environment says.
    #[error("the environment's credentials cannot be used ({message}); {remedy}")]
    Environment {
        /// What is wrong with them.
        message: String,
        /// Which variables hold credentials.
        remedy: &'static str,
    },
    /// No answer that is of use, after all attempts until the deadline.
    #[error(
        "no answer within {seconds} s (attempts: {attempts}, last error: {message}); check the network, the address and the server, then start again"
    )]
    Unreachable {
        /// The deadline.
        seconds: u64,
        /// Attempts that were made.
        attempts: u32,
        /// What the last one met.
        message: String,
    },
    /// The object is another one than it was at first.
    #[error(
        "is no longer the same object: {0}; restore it, or start again with the new one (a run needs another run.output_dir then)"
    )]
    Changed(String),
    /// The server's answer is of no use, and no other is to be expected.
    #[error("cannot be accessed: {0}")]
    Refused(String),
    /// The disk of a file that is written to a bucket, or brought from one.
    #[error("its file on the local disk cannot be read or written: {0}")]
    Local(String),
    /// The local disk refused.
    #[error("{}: the cache of buckets cannot be used: {message}; make room there, or name another directory (data.bucket_cache.dir)", path.display())]
    Cache {
        /// Which file or directory.
        path: PathBuf,
        /// What the system said.
        message: String,
    },
}
