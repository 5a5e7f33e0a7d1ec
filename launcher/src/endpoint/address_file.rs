//! The file that says where a run's coordinator is: its place in the output directory, and how it is read
//! while its launcher may be writing it.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

/// The run with every key: in its output directory as it was trained, in its logs as it was launched last.
pub use coxswain_worker::train::checkpoint::SPEC_FILE;
/// Below the run's output directory.
pub(super) const DIR: &str = "logs";
/// See [`DIR`].
const FILE: &str = "endpoint";
/// Where runs lie by default.
pub const RUNS: &str = "runs";

/// The most bytes that the file may have.
pub(super) const MAX_BYTES: u64 = 4096;

/// How often a launcher tries to take its run's lock, and a reader to find the file written, and after which
/// time.
pub(super) const TRIES: usize = 5;
/// See [`TRIES`].
pub(super) const RETRY: Duration = Duration::from_millis(10);

/// Path of the file of the run in `output_dir`.
pub(super) fn file(output_dir: &Path) -> PathBuf {
    output_dir.join(DIR).join(FILE)
}

/// What `look` finds in a file once its line is whole: its launcher writes it in its place, for it holds the
/// lock of that very file, and a reader may come between.
pub(super) fn written(look: impl Fn() -> io::Result<String>) -> io::Result<String> {
    for _ in 1..TRIES {
        let text = look()?;
        if text.ends_with('\n') {
            return Ok(text);
        }
        std::thread::sleep(RETRY);
    }
    look()
}
