//! Files of a directory where somebody else may have put a symbolic link in the place of one: it is not
//! followed, so that what a run writes lands in its own directory.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    os::unix::fs::MetadataExt,
    path::Path,
};

/// Opens a file to be written, unless a link is in its place. What is there stays as it is.
pub fn open(path: &Path) -> io::Result<File> {
    checked(path, OpenOptions::new().create(true).truncate(false).write(true).open(path)?)
}

/// The same, to be written at its end.
pub fn append(path: &Path) -> io::Result<File> {
    checked(path, OpenOptions::new().create(true).append(true).open(path)?)
}

/// Writes a file anew, by rename: a reader has the one before or this one. A link in its place is replaced.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".tmp");
    let draft = path.with_file_name(name);
    // Left by a process that was killed, or put there.
    let _ = fs::remove_file(&draft);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&draft)
        .and_then(|mut file| file.write_all(content))
        .and_then(|()| fs::rename(&draft, path));
    written.inspect_err(|_| {
        let _ = fs::remove_file(&draft);
    })
}

/// Nothing has been written yet.
fn checked(path: &Path, file: File) -> io::Result<File> {
    let (there, opened) = (fs::symlink_metadata(path)?, file.metadata()?);
    match (there.dev(), there.ino()) == (opened.dev(), opened.ino()) {
        true => Ok(file),
        false => {
            let problem = "it is a symbolic link, which is not followed here: remove it";
            Err(io::Error::new(ErrorKind::InvalidInput, problem))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_link_points_to_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (target, path) = (dir.path().join("target"), dir.path().join("log"));
        fs::write(&target, "precious").unwrap();
        for name in ["log", ".log.tmp"] {
            std::os::unix::fs::symlink(&target, dir.path().join(name)).unwrap();
        }
        for refused in [open(&path).unwrap_err(), append(&path).unwrap_err()] {
            assert!(refused.to_string().contains("symbolic link"), "{refused}");
        }
        replace(&path, b"ours").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
        assert_eq!(fs::read_to_string(&path).unwrap(), "ours");
        append(&path).unwrap().write_all(b" and more").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "ours and more");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "drafts are gone");
    }
}
