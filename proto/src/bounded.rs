//! Files that are read whole, up to a bound. What a file says of its own size does not count: a pipe or a
//! device says 0 and may never end.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::FileTypeExt,
    path::Path,
};

/// Opens a file to be read at any place: a pipe, which may let one wait for ever, and a device, which may
/// never end, are refused.
pub fn open(path: &Path) -> io::Result<File> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is a pipe or a device; a file is needed"));
    }
    File::open(path)
}

/// How Windows' programs begin a UTF-8 text.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// The bytes of a file that has at most `limit` of them; an error of the kind
/// [`FileTooLarge`](io::ErrorKind::FileTooLarge) where it has more. What [`open`] refuses is refused.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    whole(open(path)?, limit)
}

/// The text of a file that has at most `limit` bytes, as [`read`] reads them. A mark of its byte order before
/// it is no part of it.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    text(read(path, limit)?)
}

/// The text of a file that a user names, who may have meant a pipe: `<(command)` in a shell.
pub fn read_piped_text(path: &Path, limit: u64) -> io::Result<String> {
    text(whole(File::open(path)?, limit)?)
}

fn whole(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        let problem = format!("it has more than {limit} bytes, the maximum for a file of this kind");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

fn text(mut bytes: Vec<u8>) -> io::Result<String> {
    if bytes.starts_with(MARK) {
        bytes.drain(..MARK.len());
    }
    String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()].split(|byte| *byte == b'\n').count();
        let (found, from) = match error.as_bytes() {
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => ("it is UTF-16".to_owned(), "UTF-16"),
            // Any byte is a character there: what has no mark cannot be told apart, and is mostly this.
            _ => (format!("line {line} is not UTF-8"), "WINDOWS-1252"),
        };
        let told =
            format!("{found}; save the file as UTF-8: `iconv -f {from} -t UTF-8 IN > OUT` converts it");
        io::Error::new(io::ErrorKind::InvalidData, told)
    })
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::fd::AsRawFd};

    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read_text(&path, 4).unwrap(), "four");
        assert_eq!(read(&path, 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        std::fs::write(&path, "\u{feff}four").unwrap();
        assert_eq!(read_text(&path, 8).unwrap(), "four");
        std::fs::write(&path, b"a\nb\xff").unwrap();
        let error = read_text(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let told = error.to_string();
        assert!(
            told.starts_with("line 2 is not UTF-8") && told.contains("-f WINDOWS-1252 -t UTF-8"),
            "{told}"
        );
        std::fs::write(&path, b"\xff\xfea\0").unwrap();
        let told = read_text(&path, 4).unwrap_err().to_string();
        assert!(told.starts_with("it is UTF-16; save") && told.contains("-f UTF-16 -t UTF-8"), "{told}");
    }

    #[test]
    fn a_device_is_not_opened_as_a_file() {
        let zero = Path::new("/dev/zero");
        for error in [open(zero).unwrap_err(), read(zero, 4).unwrap_err(), read_text(zero, 4).unwrap_err()] {
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        }
        assert_eq!(open(Path::new("/no/where")).unwrap_err().kind(), io::ErrorKind::NotFound);
        open(Path::new("/")).expect("a directory says so itself when it is read");
    }

    #[test]
    fn a_device_without_an_end_is_left_after_the_bound() {
        let error = read_piped_text(Path::new("/dev/zero"), 1 << 10).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn a_pipe_is_waited_for_where_a_user_may_have_meant_one_alone() {
        let (reader, mut writer) = io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let path = Path::new(&path);
        // Its writer says nothing: who reads it waits.
        assert_eq!(read(path, 8).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        writer.write_all(b"four").unwrap();
        drop(writer);
        assert_eq!(read_piped_text(path, 8).unwrap(), "four");
    }
}
