//! Shows what a child writes to its log, as it grows.
//!
//! The child has the file itself. So it never waits for us, nor for a reader of the console, and its log is
//! whole whatever becomes of this process; the console comes a moment later.

use std::{io::SeekFrom, path::PathBuf, time::Duration};

use tokio::{
    fs::File,
    io::{AsyncReadExt, AsyncSeekExt},
    sync::watch,
};

use super::pump::{ConsolePrefix, Lines};

/// Between two looks at a file that has not grown: shorter than a reader notices.
const LOOK: Duration = Duration::from_millis(50);

/// A part of a file, which another process writes.
#[derive(Debug)]
pub struct Tail {
    /// Which file.
    pub path: PathBuf,
    /// Where the part begins.
    pub from: u64,
}

impl Tail {
    /// Shows the part until `writing` is dropped and the end of the file is reached.
    pub async fn show(self, shown: ConsolePrefix, mut writing: watch::Receiver<()>) {
        let path = self.path.clone();
        if let Err(error) = self.follow(shown, &mut writing).await {
            tracing::warn!(path = %path.display(), %error, "a log cannot be read and is no longer shown");
        }
    }

    async fn follow(self, shown: ConsolePrefix, writing: &mut watch::Receiver<()>) -> std::io::Result<()> {
        let mut file = File::open(&self.path).await?;
        file.seek(SeekFrom::Start(self.from)).await?;
        let (mut lines, mut buffer, mut ended) = (Lines::new(shown), vec![0; 8 << 10], false);
        loop {
            match file.read(&mut buffer).await? {
                0 if ended => break,
                0 => ended = tokio::time::timeout(LOOK, writing.changed()).await.is_ok(),
                length => lines.add_bytes(&buffer[..length]),
            }
        }
        lines.finish();
        Ok(())
    }
}
