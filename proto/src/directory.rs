//! Directories whose entries are to be on disk.

use std::{fs::File, io, path::Path};

/// Brings a directory's entries to the disk: what was renamed there is found again after a crash of the
/// machine. Some file systems (FUSE, SMB, object stores mounted as directories) have no such call for
/// directories and say so, as POSIX lets them: there it is theirs to keep the order of what they are told.
pub fn sync(path: &Path) -> io::Result<()> {
    settled(File::open(path).and_then(|directory| directory.sync_all()))
}

fn settled(synced: io::Result<()>) -> io::Result<()> {
    use io::ErrorKind::{InvalidInput, Unsupported};
    match synced {
        Err(error) if matches!(error.kind(), InvalidInput | Unsupported) => Ok(()),
        synced => synced,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_cannot_sync_directories_is_no_failure_and_a_disk_that_fails_is_one() {
        let dir = tempfile::tempdir().unwrap();
        sync(dir.path()).unwrap();
        assert_eq!(sync(&dir.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        // EINVAL, ENOSYS and EOPNOTSUPP; EIO and ENOSPC.
        for code in [22, 38, 95] {
            settled(Err(io::Error::from_raw_os_error(code))).unwrap();
        }
        for code in [5, 28] {
            settled(Err(io::Error::from_raw_os_error(code))).unwrap_err();
        }
    }
}
