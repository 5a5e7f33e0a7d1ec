//! A member of a shard as a file of its own.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::FileExt,
};

/// A stretch of a file that reads and seeks as if there were nothing else.
#[derive(Debug)]
pub struct Section {
    file: File,
    start: u64,
    len: u64,
    at: u64,
}

impl Section {
    /// `len` bytes from `start` on.
    pub fn new(file: File, start: u64, len: u64) -> Self {
        Self { file, start, len, at: 0 }
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Read for Section {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.len.saturating_sub(self.at).min(buffer.len() as u64) as usize;
        let read = self.file.read_at(&mut buffer[..left], self.start + self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Section {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let to = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.len.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = to.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_is_ever_read() {
        let mut file = tempfile::tempfile().expect("a file");
        io::Write::write_all(&mut file, b"before|inside|after").expect("room");
        let mut section = Section::new(file, 7, 6);
        let mut text = String::new();
        section.read_to_string(&mut text).expect("it is there");
        assert_eq!(text, "inside");
        assert_eq!(section.seek(SeekFrom::End(-4)).expect("within"), 2);
        text.clear();
        section.read_to_string(&mut text).expect("it is there");
        assert_eq!(text, "side");
        assert!(section.seek(SeekFrom::Current(-7)).is_err());
        section.seek(SeekFrom::Start(100)).expect("beyond the end, as in files");
        assert_eq!(section.read(&mut [0; 4]).expect("nothing there"), 0);
    }
}
