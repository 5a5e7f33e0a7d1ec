//! Whose a file is.

use std::{
    fs::{self, Metadata},
    os::unix::fs::MetadataExt,
};

/// Whether a file is this user's, or root's: nobody else can have written it whom its owner did not let.
pub fn is_ours(file: &Metadata) -> bool {
    // A process's own directory is its user's.
    let is_this_users = || fs::metadata("/proc/self").is_ok_and(|process| process.uid() == file.uid());
    file.uid() == 0 || is_this_users()
}
