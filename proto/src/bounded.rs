//! Files that are read whole, up to a bound. What a file says of its own size does not count: a pipe or a
//! device says 0 and may never end.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

/// The bytes of a file that has at most `limit` of them; an error of the kind
/// [`FileTooLarge`](io::ErrorKind::FileTooLarge) where it has more.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        let problem = format!("it has more than {limit} bytes, which no file of this kind has");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

/// The same as text.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    let bytes = read(path, limit)?;
    String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()].split(|byte| *byte == b'\n').count();
        let told = format!("line {line} is not UTF-8; save the file as UTF-8 (`iconv -t UTF-8` converts it)");
        io::Error::new(io::ErrorKind::InvalidData, told)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read_text(&path, 4).unwrap(), "four");
        assert_eq!(read(&path, 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        std::fs::write(&path, b"a\nb\xff").unwrap();
        let error = read_text(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().starts_with("line 2 is not UTF-8"), "{error}");
    }

    #[test]
    fn a_device_without_an_end_is_left_after_the_bound() {
        let error = read(Path::new("/dev/zero"), 1 << 10).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }
}
