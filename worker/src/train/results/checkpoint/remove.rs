//! How a checkpoint goes away: out of sight by one rename, then file by file.
//!
//! Removing a directory takes as long as its files do, may be broken off by a crash, and may be refused:
//! network file systems keep a directory of which a file is open. What has been renamed is no
//! checkpoint any more, whatever becomes of its files, and what is left of it is removed by a later save.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_proto::{checkpoint::MANIFEST, ids::Step};

/// Directories of this prefix are no checkpoints: being written, or on their way out.
pub(super) const HIDDEN: &str = ".tmp-";

/// Takes a directory out of sight, then removes it. An error means that it is still in sight.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    hide(path)?.iter().for_each(|hidden| remove_hidden(hidden));
    Ok(())
}

/// Takes a directory out of sight, and says where it is then; none if there is no such directory.
pub(super) fn hide(path: &Path) -> io::Result<Option<PathBuf>> {
    let hidden = hidden_name(path);
    match fs::rename(path, &hidden) {
        Ok(()) => Ok(Some(hidden)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes what is out of sight. What stays is found by [`leftovers`] later.
pub(super) fn remove_hidden(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::debug!(path = %path.display(), %error, "cannot remove this directory yet; a later save tries again");
    }
}

/// A name beside `path` that nothing has.
fn hidden_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let candidate = |number: u32| path.with_file_name(format!("{HIDDEN}gone-{number}-{name}"));
    (0..).map(candidate).find(|hidden| !hidden.exists()).expect("some number is free")
}

/// What crashes have left below `root`: everything out of sight, and checkpoints without a manifest. A
/// manifest that is there and cannot be read is left for people to look at.
pub(super) fn leftovers(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let torn = || matches!(fs::exists(path.join(MANIFEST)), Ok(false));
        if name.starts_with(HIDDEN) || (step_of(&path).is_some() && path.is_dir() && torn()) {
            found.push(path);
        }
    }
    Ok(found)
}

/// The step whose checkpoint a directory is by its name, if it is one's.
pub(super) fn step_of(path: &Path) -> Option<Step> {
    Step::of_checkpoint_dir(path.file_name()?.to_str()?)
}

/// Puts `new` where `old` is, and `old` where `new` was, at once. File systems that cannot do that (NFS) say
/// so.
pub(super) fn exchange(new: &Path, old: &Path) -> io::Result<()> {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    Ok(renameat2(AT_FDCWD, new, AT_FDCWD, old, RenameFlags::RENAME_EXCHANGE)?)
}
