//! The members of one shard, header by header: contents are passed over, so a shard of any size takes a read
//! of 512 bytes for each member.
//!
//! What stands in a header is only ever compared with the file: a size that leads beyond its end is refused,
//! links and devices are passed over, names are cut into key and ending and used for nothing else.

use std::{
    collections::HashMap,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use coxswain_proto::bounded;
use tar::{EntryType, Header, PaxExtensions};

use crate::DataError;

/// Bytes of a block, in which everything in a tar file is counted.
pub(super) const BLOCK: u64 = 512;
/// Bytes of the longest name, or table of extended attributes.
const LONGEST_NAME: u64 = 64 << 10;
/// Members of a sample. More of them come of names with several dots.
const MOST_MEMBERS: u32 = 1024;

/// A member that is a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TarMember {
    /// Everything before the first dot of its name, with folders.
    pub key: String,
    /// What stands behind that dot, in lower case.
    pub ending: String,
    /// The block where its content begins.
    pub block: u32,
    /// Bytes of its content.
    pub bytes: u32,
    /// Whether it is the first of its sample.
    pub first: bool,
}

/// What was passed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PassedOver {
    /// Links, devices and the like.
    pub not_files: u64,
    /// Files whose names have no key or no ending.
    pub unnamed: u64,
}

/// A shard being scanned.
struct Scan<'a> {
    path: &'a Path,
    file: File,
    len: u64,
    at: u64,
    /// The name that an entry before this one gives.
    long_name: Option<String>,
    /// By key, where its sample begins.
    begins: HashMap<String, u64>,
    /// Key and endings of the sample at hand.
    key: Option<String>,
    endings: Vec<String>,
    passed_over: PassedOver,
}

/// Shows every member to `look`, in order.
pub(super) fn scan(
    path: &Path,
    mut look: impl FnMut(TarMember) -> Result<(), DataError>,
) -> Result<PassedOver, DataError> {
    let failed = |error| DataError::io(path, "read")(error);
    let file = bounded::open(path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    let mut scan = Scan {
        path,
        file,
        len,
        at: 0,
        long_name: None,
        begins: HashMap::new(),
        key: None,
        endings: Vec::new(),
        passed_over: PassedOver::default(),
    };
    while let Some(header) = scan.header()? {
        if let Some(found) = scan.entry(&header)? {
            look(found)?;
        }
    }
    Ok(scan.passed_over)
}

/// Reads the header at `at`, and says what is wrong with it.
pub(super) fn header_at(file: &File, path: &Path, at: u64) -> Result<Header, DataError> {
    let mut header = Header::new_old();
    file.read_exact_at(header.as_mut_bytes(), at).map_err(DataError::io(path, "read"))?;
    let bytes = header.as_bytes();
    // The field of the sum itself counts as blanks.
    let sum: u32 =
        bytes.iter().enumerate().map(|(n, &b)| if (148..156).contains(&n) { 32 } else { b.into() }).sum();
    if header.cksum().ok() == Some(sum) {
        return Ok(header);
    }
    let (found, remedy) = match bytes {
        [0x1f, 0x8b, ..] | [0x28, 0xb5, 0x2f, 0xfd, ..] | [0xfd, b'7', b'z', ..] | [b'B', b'Z', b'h', ..] => {
            ("compressed data", "unpack the shard to a plain tar file")
        }
        _ => ("not a valid tar header (wrong checksum)", "copy or write the shard again"),
    };
    Err(DataError::invalid(path, at_byte(at), found, remedy))
}

/// Where in a shard, for people.
pub(super) fn at_byte(at: u64) -> String {
    format!("byte {at}")
}

impl Scan<'_> {
    /// The next header; none at the end.
    fn header(&mut self) -> Result<Option<Header>, DataError> {
        if self.at >= self.len {
            return Ok(None);
        }
        if self.len - self.at < BLOCK {
            return Err(self.refuse("the shard ends within a header", "copy or write the shard again"));
        }
        let mut block = [0; BLOCK as usize];
        self.file.read_exact_at(&mut block, self.at).map_err(DataError::io(self.path, "read"))?;
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        header_at(&self.file, self.path, self.at).map(Some)
    }

    /// What an entry is, and on to the one behind it.
    fn entry(&mut self, header: &Header) -> Result<Option<TarMember>, DataError> {
        let size = header.entry_size();
        let size = size.map_err(|error| {
            self.refuse(format!("the tar header has no valid size ({error})"), "write the shard again")
        })?;
        let content = self.at + BLOCK;
        let name = |scan: &Self| match &scan.long_name {
            Some(name) => name.clone(),
            None => String::from_utf8_lossy(&header.path_bytes()).into_owned(),
        };
        if content.checked_add(size).is_none_or(|end| end > self.len) {
            let found = format!(
                "`{}` has {size} bytes, but the shard has only {} of them",
                name(self),
                self.len.saturating_sub(content)
            );
            return Err(self.refuse(found, "copy or write the shard again"));
        }
        let next = content + size.next_multiple_of(BLOCK);
        let mut found = None;
        match header.entry_type() {
            EntryType::GNULongName => {
                let bytes = self.extended(content, size)?;
                let text = String::from_utf8_lossy(&bytes);
                self.long_name = Some(text.trim_end_matches('\0').to_owned());
            }
            EntryType::XHeader => {
                let bytes = self.extended(content, size)?;
                self.attributes(&bytes)?;
            }
            EntryType::XGlobalHeader => {}
            EntryType::Regular | EntryType::Continuous => {
                let name = name(self);
                self.long_name = None;
                found = self.member(&name, content, size)?;
            }
            kind => {
                self.long_name = None;
                self.passed_over.not_files += u64::from(kind != EntryType::Directory);
            }
        }
        self.at = next;
        Ok(found)
    }

    /// The content of an entry that says something of the next one.
    fn extended(&self, content: u64, size: u64) -> Result<Vec<u8>, DataError> {
        if size > LONGEST_NAME {
            let found = format!("an extended header has {size} bytes, more than {LONGEST_NAME}");
            return Err(self.refuse(found, "write the shard again, with shorter file names"));
        }
        let mut bytes = vec![0; size as usize];
        self.file.read_exact_at(&mut bytes, content).map_err(DataError::io(self.path, "read"))?;
        Ok(bytes)
    }

    fn attributes(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        for attribute in PaxExtensions::new(bytes) {
            let broken = |_| self.refuse("the extended header is damaged", "copy or write the shard again");
            let attribute = attribute.map_err(broken)?;
            match attribute.key_bytes() {
                b"path" => {
                    self.long_name = Some(String::from_utf8_lossy(attribute.value_bytes()).into_owned())
                }
                // Such a size stands there because it does not fit in the header, which is then wrong.
                b"size" => return Err(self.refuse("a member has more than 8 GiB", "split it into samples")),
                _ => {}
            }
        }
        Ok(())
    }

    /// A file, if its name is one of a sample.
    fn member(&mut self, name: &str, content: u64, size: u64) -> Result<Option<TarMember>, DataError> {
        let Some((key, ending)) = apart(name) else {
            self.passed_over.unnamed += 1;
            return Ok(None);
        };
        let (Ok(block), Ok(bytes)) = (u32::try_from(content / BLOCK), u32::try_from(size)) else {
            return Err(self.refuse(
                format!("`{name}` has 4 GiB or more, or starts after 2 TiB"),
                "write smaller members and shards",
            ));
        };
        let first = self.key.as_deref() != Some(key);
        if first {
            if let Some(begun) = self.begins.insert(key.to_owned(), self.at) {
                let found = format!(
                    "`{name}` does not follow the other members of sample `{key}`, which are at byte {begun}"
                );
                let remedy = "give each sample its own key, or write the shard again with `tar --sort=name`";
                return Err(self.refuse(found, remedy));
            }
            self.key = Some(key.to_owned());
            self.endings.clear();
        } else if self.endings.contains(&ending) {
            let remedy = "keep one of them: names must differ after the first dot, and not only by case";
            return Err(self.refuse(format!("`{name}` occurs twice"), remedy));
        }
        if self.endings.len() as u32 == MOST_MEMBERS {
            let found = format!("sample `{key}` has more than {MOST_MEMBERS} members");
            let remedy = "rename them: files with the same name up to the first dot are one sample";
            return Err(self.refuse(found, remedy));
        }
        self.endings.push(ending.clone());
        Ok(Some(TarMember { key: key.to_owned(), ending, block, bytes, first }))
    }

    fn refuse(&self, found: impl Into<String>, remedy: &str) -> DataError {
        DataError::invalid(self.path, at_byte(self.at), found, remedy)
    }
}

/// Key and ending of a member's name; none of hidden files and of those without ending.
pub(super) fn apart(name: &str) -> Option<(&str, String)> {
    let name = name.strip_prefix("./").unwrap_or(name);
    let file = name.rfind('/').map_or(0, |slash| slash + 1);
    let dot = name[file..].find('.').filter(|&dot| dot > 0)?;
    Some((&name[..file + dot], name[file + dot + 1..].to_lowercase()))
}

/// The name that a header gives, as far as it has room for it.
pub(super) fn name_in(header: &Header) -> PathBuf {
    String::from_utf8_lossy(&header.path_bytes()).into_owned().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_cut_at_the_first_dot_of_its_file() {
        for (name, wanted) in [
            ("000123.jpg", Some(("000123", "jpg"))),
            ("./a.b/c.LEFT.PNG", Some(("a.b/c", "left.png"))),
            ("../../etc/a.json", Some(("../../etc/a", "json"))),
            ("a.", Some(("a", ""))),
            ("a.b/c", None),
            (".hidden", None),
            ("dir/._000.jpg", None),
            ("", None),
        ] {
            assert_eq!(apart(name), wanted.map(|(key, ending)| (key, ending.to_owned())), "{name}");
        }
    }
}
