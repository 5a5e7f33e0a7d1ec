//! Files of a directory where somebody else may have put a symbolic link in the place of one: it is not
//! followed, so that what a run writes lands in its own directory. One in the place of a directory is: people
//! keep checkpoints or logs on another disk so.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use nix::libc::{ELOOP, O_NOFOLLOW};

/// Opens a file in the way that `how` says, unless a link is in its place; where one leads nowhere, nothing
/// is made there either.
pub fn open_by(how: &mut OpenOptions, path: &Path) -> io::Result<File> {
    how.custom_flags(O_NOFOLLOW).open(path).map_err(|error| match error.raw_os_error() {
        Some(ELOOP) if path.is_symlink() => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let problem = format!("`{name}` is a symbolic link, which is not followed here: remove it");
            io::Error::new(ErrorKind::InvalidInput, problem)
        }
        _ => error,
    })
}

/// Opens a file to be written, unless a link is in its place. What is there stays as it is.
pub fn open(path: &Path) -> io::Result<File> {
    open_by(OpenOptions::new().create(true).truncate(false).write(true), path)
}

/// Opens a file to be written at its end, unless a link is in its place.
pub fn append(path: &Path) -> io::Result<File> {
    open_by(OpenOptions::new().create(true).append(true), path)
}

/// Makes a file that is new. What has its name goes, a link too: it was left by a process that was killed, or
/// put there.
pub fn make_anew(path: &Path) -> io::Result<File> {
    vacate(path)?;
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// Removes what has this name, for a file that is about to be made; nothing may be there.
pub fn vacate(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Writes a file anew, by rename: a reader has the one before or this one. A link in its place is replaced.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".tmp");
    let draft = path.with_file_name(name);
    let written = make_anew(&draft)
        .and_then(|mut file| file.write_all(content))
        .and_then(|()| fs::rename(&draft, path));
    written.inspect_err(|_| {
        let _ = fs::remove_file(&draft);
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_a_link_points_to_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (target, path) = (dir.path().join("target"), dir.path().join("log"));
        fs::write(&target, "precious").unwrap();
        for name in ["log", ".log.tmp"] {
            symlink(&target, dir.path().join(name)).unwrap();
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

    #[test]
    fn what_a_link_points_to_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let (target, path) = (dir.path().join("target"), dir.path().join("log"));
        symlink(&target, &path).unwrap();
        for refused in [open(&path).unwrap_err(), append(&path).unwrap_err()] {
            assert!(refused.to_string().contains("symbolic link"), "{refused}");
        }
        make_anew(&path).unwrap().write_all(b"ours").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "ours");
        assert!(!target.exists());
    }
}
