//! What a build without the feature `buckets` has instead.

use crate::storage::{Storage, StorageError};

/// None: a user who names one learns what to build.
pub fn storage(address: &str) -> Result<Box<dyn Storage>, StorageError> {
    let fault =
        "this cox was built without bucket support; build it with `cargo build --release --features buckets`";
    Err(StorageError { object: address.to_owned(), fault: fault.to_owned(), of_object: false })
}
