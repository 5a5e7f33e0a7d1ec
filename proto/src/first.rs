//! Files that the first of several processes makes, whole or not at all: claims to a role, fresh tokens, what
//! a run has found of its data.
//!
//! A draft is written beside the place and linked there: a link is refused where there is a file. Some file
//! systems have no links (SMB, FAT, buckets mounted as directories). There the file is made in its place, and
//! removed if it cannot be written; only a process that is killed in between leaves a part of it, which those
//! who read it tell from the whole.

use std::{
    fs::{self, File},
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, ErrorKind, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// Makes a file of these permissions (as far as the umask leaves them) with this content, unless there is one
/// already; true if it was made.
pub fn make(path: &Path, mode: u32, content: &[u8]) -> io::Result<bool> {
    let write = |file: &mut File| file.write_all(content).and_then(|()| file.sync_all());
    make_by(path, mode, write, |draft, path| fs::hard_link(draft, path))
}

fn make_by(
    path: &Path,
    mode: u32,
    write: impl Fn(&mut File) -> io::Result<()>,
    link: impl Fn(&Path, &Path) -> io::Result<()>,
) -> io::Result<bool> {
    // Random in every process, in containers with equal process numbers, too.
    let suffix = RandomState::new().build_hasher().finish();
    let draft = path.with_extension(format!("{suffix:016x}"));
    make_here(&draft, mode, &write)?;
    let made = match link(&draft, path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => make_here(path, mode, &write),
        linked => linked,
    };
    // Gone, or of no use: nobody looks for it.
    let _ = fs::remove_file(&draft);
    match made {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        made => made.map(|()| true),
    }
}

/// Makes a file in its place; removed where it cannot be written.
fn make_here(path: &Path, mode: u32, write: impl Fn(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    write(&mut file).inspect_err(|_| {
        let _ = fs::remove_file(path);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Link = fn(&Path, &Path) -> io::Result<()>;

    /// How links are made on a file system that has them, and on one that has none.
    const LINKS: [Link; 2] =
        [|draft, path| fs::hard_link(draft, path), |_, _| Err(ErrorKind::Unsupported.into())];

    /// A disk with room for half of it.
    fn full(file: &mut File) -> io::Result<()> {
        file.write_all(b"ha").and_then(|()| Err(ErrorKind::StorageFull.into()))
    }

    #[test]
    fn the_first_one_stays_with_links_and_without() {
        for link in LINKS {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("file");
            let make =
                |content: &'static [u8]| make_by(&path, 0o600, |file| file.write_all(content), link).unwrap();
            assert_eq!((make(b"first"), make(b"second")), (true, false));
            assert_eq!(fs::read(&path).unwrap(), b"first");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "drafts are gone");
        }
    }

    #[test]
    fn what_cannot_be_written_leaves_the_place_free() {
        for link in LINKS {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("file");
            let error = make_by(&path, 0o600, full, link).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::StorageFull);
            // A disk that was filled between the draft and its place.
            let later = |file: &mut File| match path.exists() {
                true => full(file),
                false => file.write_all(b"whole"),
            };
            let late = make_by(&path, 0o600, later, LINKS[1]);
            assert_eq!(late.unwrap_err().kind(), ErrorKind::StorageFull);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
            assert!(make(&path, 0o600, b"whole").unwrap());
        }
    }
}
