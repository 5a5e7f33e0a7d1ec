//! Lines of a file that another process writes, as it grows.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

/// Most bytes that are read at once.
const PIECE: u64 = 8 << 20;
/// Longest line; a program that never ends its line must not fill our memory.
const LONGEST: usize = 64 << 10;

/// How far a file has been read.
#[derive(Debug)]
pub struct LogTail {
    path: PathBuf,
    read: u64,
    half: Vec<u8>,
}

impl LogTail {
    /// Nothing was read yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), read: 0, half: Vec::new() }
    }

    /// Which file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lines that are whole now and were not told before; a line that is being written waits for its end. A
    /// file that has become shorter is another one. Empty at the end of what there is.
    pub fn lines(&mut self) -> io::Result<Vec<String>> {
        let mut file = File::open(&self.path)?;
        if file.metadata()?.len() < self.read {
            (self.read, self.half) = (0, Vec::new());
        }
        file.seek(SeekFrom::Start(self.read))?;
        let mut bytes = Vec::new();
        self.read += file.take(PIECE).read_to_end(&mut bytes)? as u64;
        let mut lines = Vec::new();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.half.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.half.len() >= LONGEST {
                lines.extend(self.rest());
            }
        }
        Ok(lines)
    }

    /// A last line without an end, if there is one.
    pub fn rest(&mut self) -> Option<String> {
        let bytes = std::mem::take(&mut self.half);
        let line = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned();
        (!bytes.is_empty()).then_some(line)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_are_told_once_and_when_they_are_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.log");
        let mut tail = LogTail::new(&path);
        assert!(tail.lines().is_err(), "there is no file yet");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one\r\n\ntw").unwrap();
        assert_eq!(tail.lines().unwrap(), ["one", ""]);
        assert!(tail.lines().unwrap().is_empty());
        file.write_all(b"o \xff\nthree").unwrap();
        assert_eq!(tail.lines().unwrap(), ["two \u{fffd}"]);
        assert_eq!((tail.rest().as_deref(), tail.rest()), (Some("three"), None));
        std::fs::write(&path, "new\n").unwrap();
        assert_eq!(tail.lines().unwrap(), ["new"], "a shorter file is another one");
    }
}
