//! Whether a disk takes a small file, durably and in time.

use std::{
    fs, io,
    io::Write,
    path::{Path, PathBuf},
    sync::mpsc,
    time::Duration,
};

use coxswain_proto::in_place;

/// Less than this is free: no checkpoint of any size can be written.
const LITTLE: u64 = 64 << 20;

/// Writes a small file and removes it, on a thread of its own: a file system that hangs keeps that thread and
/// nothing else. What is worth knowing; or, as an error, why the disk is not to be used.
pub(super) fn check(dir: &Path, patience: Duration) -> Result<Vec<String>, String> {
    in_time(dir, patience, write_and_remove)
}

fn in_time(
    dir: &Path,
    patience: Duration,
    work: fn(&Path) -> io::Result<Option<u64>>,
) -> Result<Vec<String>, String> {
    let (tell, told) = mpsc::channel();
    let path = dir.to_path_buf();
    let thread = std::thread::Builder::new().name("disk".into()).spawn(move || {
        // Nobody listens any more after the deadline.
        let _ = tell.send(work(&path));
    });
    if thread.is_err() {
        // The machine's threads are used up, which is no fault of its disk.
        return Ok(Vec::new());
    }
    let at = dir.display();
    match told.recv_timeout(patience) {
        Ok(Ok(free)) => Ok(free
            .filter(|free| *free < LITTLE)
            .map(|free| format!("{at}: only {} MiB are free for checkpoints", free >> 20))
            .into_iter()
            .collect()),
        Ok(Err(error)) if is_of_the_disk(&error) => {
            Err(format!("{at}: a small file cannot be written: {error}"))
        }
        Ok(Err(error)) => Ok(vec![format!("{at}: a small file cannot be written: {error}")]),
        Err(_) => Err(format!(
            "{at}: a small file is not written after {} s: the file system hangs",
            patience.as_secs_f64()
        )),
    }
}

/// Writes, makes durable, removes; bytes that are free, where that is known.
fn write_and_remove(dir: &Path) -> io::Result<Option<u64>> {
    fs::create_dir_all(dir)?;
    let path = ScratchFile(dir.join(format!(".health-{}", std::process::id())));
    let mut file = in_place::make_anew(&path.0)?;
    file.write_all(&[0x5a; 4096])?;
    file.sync_all()?;
    if fs::read(&path.0)? != [0x5a; 4096] {
        return Err(io::Error::from_raw_os_error(nix::libc::EIO));
    }
    Ok(nix::sys::statvfs::statvfs(dir).ok().map(|of| of.blocks_available() * of.fragment_size()))
}

/// Removed when it is dropped.
struct ScratchFile(PathBuf);

impl Drop for ScratchFile {
    fn drop(&mut self) {
        // It may not be there.
        let _ = fs::remove_file(&self.0);
    }
}

/// Whether an error is the hardware's or its server's. A full disk, or one that may not be written, is the
/// same for every worker, and is told in its own words where it matters.
fn is_of_the_disk(error: &io::Error) -> bool {
    use nix::libc::{EIO, ENODEV, ENXIO, ESTALE, ETIMEDOUT, EUCLEAN};
    matches!(error.raw_os_error(), Some(EIO | ENODEV | ENXIO | ESTALE | ETIMEDOUT | EUCLEAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    #[test]
    fn a_disk_that_fails_is_not_used_and_a_full_one_is_told() {
        let dir = Path::new("/data");
        let found = |work| in_time(dir, SOON, work);
        assert_eq!(found(|_| Ok(Some(1 << 40))), Ok(vec![]));
        assert!(found(|_| Ok(Some(1 << 20))).is_ok_and(|told| told[0].contains("only 1 MiB")));
        let failed = found(|_| Err(io::Error::from_raw_os_error(nix::libc::EIO)));
        assert!(failed.is_err_and(|why| why.starts_with("/data: a small file cannot be written")));
        let full = found(|_| Err(io::Error::from_raw_os_error(nix::libc::ENOSPC)));
        let read_only = found(|_| Err(io::Error::from_raw_os_error(nix::libc::EROFS)));
        assert!([full, read_only].into_iter().all(|found| found.is_ok_and(|told| told.len() == 1)));
    }

    #[test]
    fn a_disk_that_hangs_is_not_waited_for() {
        let hangs = |_: &Path| -> io::Result<Option<u64>> {
            std::thread::park();
            Ok(None)
        };
        let found = in_time(Path::new("/data"), Duration::from_millis(1), hangs);
        assert!(found.is_err_and(|why| why.ends_with("the file system hangs")));
    }
}
