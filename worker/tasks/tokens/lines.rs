//! Lines of a text file, found once and read where they lie: 16 bytes of memory a line, whatever its length.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use coxswain_data::{
    DataError, Fingerprint,
    text::{MARK, NotText},
};
use coxswain_proto::bounded;

/// Bytes of the longest line that is read: a chat, without its images.
const LONGEST: u64 = 64 << 20;

/// What becomes of a line that cannot be used: the end of the reading, or a note.
pub type AtFault<'a> = dyn FnMut(DataError) -> Result<(), DataError> + 'a;

/// Where a line lies.
#[derive(Clone, Copy, Debug)]
struct Line {
    offset: u64,
    bytes: u32,
    /// In the file, from 1: blank lines count.
    number: u32,
}

/// The lines of a file that are not blank.
pub struct Lines {
    path: PathBuf,
    file: File,
    lines: Vec<Line>,
    fingerprint: Fingerprint,
}

impl Lines {
    /// Reads the whole file once; `look` sees every line with its number.
    pub fn scan(
        path: &Path,
        look: impl FnMut(u64, &str) -> Result<(), DataError>,
    ) -> Result<Self, DataError> {
        Self::scan_joined(path, |_| false, look)
    }

    /// Reads a whole file whose records may go on over several lines: as long as `goes_on` says so of a line,
    /// the next one belongs to the same record. A record's number is that of its first line.
    pub fn scan_joined(
        path: &Path,
        mut goes_on: impl FnMut(&[u8]) -> bool,
        mut look: impl FnMut(u64, &str) -> Result<(), DataError>,
    ) -> Result<Self, DataError> {
        let file = bounded::open(path).map_err(DataError::io(path, "read"))?;
        let mut reader = BufReader::with_capacity(1 << 20, &file);
        let (mut hasher, mut lines, mut bytes) = (blake3::Hasher::new(), Vec::new(), Vec::new());
        let (mut offset, mut number) = (0, 0);
        loop {
            bytes.clear();
            let (mut breaks, mut is_open) = (0, true);
            while bytes.len() as u64 <= LONGEST && is_open {
                let before = bytes.len();
                let mut rest = reader.by_ref().take(LONGEST + 1 - before as u64);
                match rest.read_until(b'\n', &mut bytes).map_err(DataError::io(path, "read"))? {
                    0 => break,
                    _ => breaks += 1,
                }
                let mark = if offset == 0 && before == 0 && bytes.starts_with(MARK) { MARK.len() } else { 0 };
                is_open = goes_on(&bytes[before + mark..]);
            }
            let read = bytes.len() as u64;
            if read == 0 {
                break;
            }
            number += 1;
            let refuse =
                |fault: &str| DataError::Line { path: path.into(), line: number, fault: fault.into() };
            if read > LONGEST {
                return Err(refuse("is longer than 64 MiB; store images as files of their own"));
            }
            hasher.update(&bytes);
            let mark = if offset == 0 && bytes.starts_with(MARK) { MARK.len() } else { 0 };
            let text = str::from_utf8(&bytes[mark..]).map_err(|_| {
                let NotText { found, remedy } = NotText::of(&bytes);
                refuse(&format!("{found}; {remedy}"))
            })?;
            if number == 1 && text.trim_end().replace("\r\n", "").contains('\r') {
                return Err(refuse(
                    "has lines that end with CR alone; write LF: `tr '\\r' '\\n' < IN > OUT`",
                ));
            }
            if !text.trim().is_empty() {
                look(number, text)?;
                let (offset, bytes) = (offset + mark as u64, text.len() as u32);
                lines.push(Line { offset, bytes, number: number as u32 });
            }
            offset += read;
            number += breaks - 1;
        }
        drop(reader);
        let fingerprint = Fingerprint(*hasher.finalize().as_bytes());
        Ok(Self { path: path.into(), file, lines, fingerprint })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.lines.len() as u64
    }

    /// Names the file's content.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The number in the file of line `index`.
    pub fn number(&self, index: u64) -> u64 {
        self.lines.get(index as usize).map_or(0, |line| line.number.into())
    }

    /// Line `index`.
    pub fn line(&self, index: u64) -> Result<String, DataError> {
        let Some(line) = usize::try_from(index).ok().and_then(|index| self.lines.get(index)) else {
            return Err(DataError::OutOfRange { what: "sample", index, len: self.len() });
        };
        let mut bytes = vec![0; line.bytes as usize];
        self.file.read_exact_at(&mut bytes, line.offset).map_err(DataError::io(&self.path, "read"))?;
        String::from_utf8(bytes).map_err(|_| DataError::Line {
            path: self.path.clone(),
            line: line.number.into(),
            fault: "is not the same line as when the run began; restore the file".into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_belongs_to_no_line_and_utf_16_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a.jsonl");
        std::fs::write(&path, "\u{feff}{}\n{\"a\": 1}\n").expect("written");
        let mut seen = Vec::new();
        let lines = Lines::scan(&path, |number, text| {
            seen.push((number, text.to_owned()));
            Ok(())
        });
        let lines = lines.expect("read");
        assert_eq!(seen, [(1, "{}\n".to_owned()), (2, "{\"a\": 1}\n".to_owned())]);
        assert_eq!([0, 1].map(|at| lines.line(at).expect("a line")), ["{}\n", "{\"a\": 1}\n"]);
        std::fs::write(&path, b"\xff\xfe{\0}\0").expect("written");
        let error = Lines::scan(&path, |_, _| Ok(())).err().expect("refused").to_string();
        assert!(error.contains("a.jsonl:1: is UTF-16; convert it"), "{error}");
    }
}
