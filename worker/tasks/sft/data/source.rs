//! Where chats and their images lie.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use coxswain_data::{DataError, Fingerprint, shards::names_shards};

use super::{shards::ChatShards, spelling::Chat};
use crate::{sft::config::ChatData, tokens::lines::Lines};

/// Chats by number, and the files of their images.
pub trait ChatSource: Send + Sync {
    /// Chats.
    fn len(&self) -> u64;

    /// Chat `index`; or what is wrong with it, and the remedy.
    fn chat(&self, index: u64) -> Result<Chat, DataError>;

    /// The first bytes of an image of chat `index`, at most so many; or what is wrong with it.
    fn image(&self, index: u64, name: &str, most: u64) -> Result<Vec<u8>, String>;

    /// Tells this image from those of all chats.
    fn image_key(&self, index: u64, name: &str) -> String;

    /// What is wrong with chat `index`, and the remedy.
    fn fault(&self, index: u64, fault: String) -> DataError;

    /// How to bring chats.
    fn remedy(&self) -> &'static str;

    /// Where they lie, for people; empty where the run file says it all.
    fn describe(&self) -> String {
        String::new()
    }

    /// What is probably not meant so: a line each.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The chats at `data.path`, none of them read.
pub fn open(path: &Path, data: &ChatData) -> Result<Box<dyn ChatSource>, DataError> {
    Ok(match names_shards(path) {
        true => Box::new(ChatShards::open(path, data)?),
        false => Box::new(ChatLines { lines: Lines::scan(path, |_, _| Ok(()))?, beside: beside(path, data) }),
    })
}

/// The same, each chat read and its images looked for; and what names their content.
pub fn open_checked(path: &Path, data: &ChatData) -> Result<(Box<dyn ChatSource>, Fingerprint), DataError> {
    if names_shards(path) {
        let shards = ChatShards::open(path, data)?;
        let fingerprint = shards.check()?;
        return Ok((Box::new(shards), fingerprint));
    }
    let (lines, fingerprint) = ChatLines::checked(path, data)?;
    Ok((Box::new(lines), fingerprint))
}

/// A file of lines, and images by path.
struct ChatLines {
    lines: Lines,
    /// Where relative paths of images begin.
    beside: PathBuf,
}

impl ChatLines {
    fn checked(path: &Path, data: &ChatData) -> Result<(Self, Fingerprint), DataError> {
        let beside = beside(path, data);
        let mut sizes = Vec::new();
        let lines = Lines::scan(path, |number, text| {
            let refuse = |fault| DataError::Line { path: path.into(), line: number, fault };
            for image in Chat::parse(text).map_err(refuse)?.images {
                let image = beside.join(image);
                let file = fs::metadata(&image).ok().filter(fs::Metadata::is_file);
                let file = file.ok_or_else(|| {
                    let remedy = "correct the path, or set data.images to where paths begin";
                    refuse(format!("there is no image {}; {remedy}", image.display()))
                })?;
                sizes.push(file.len());
            }
            Ok(())
        })?;
        let fingerprint = fingerprint(&lines, &sizes);
        Ok((Self { lines, beside }, fingerprint))
    }
}

impl ChatSource for ChatLines {
    fn len(&self) -> u64 {
        self.lines.len()
    }

    fn chat(&self, index: u64) -> Result<Chat, DataError> {
        Chat::parse(&self.lines.read(index)?).map_err(|fault| self.fault(index, fault))
    }

    fn image(&self, _index: u64, name: &str, most: u64) -> Result<Vec<u8>, String> {
        read_head(&self.beside.join(name), most)
    }

    fn image_key(&self, _index: u64, name: &str) -> String {
        name.to_owned()
    }

    fn fault(&self, index: u64, fault: String) -> DataError {
        DataError::Line { path: self.lines.path().into(), line: self.lines.number(index), fault }
    }

    fn remedy(&self) -> &'static str {
        "write one chat a line"
    }
}

/// The file of an image; or what is wrong with it.
pub fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    read_head(path, u64::MAX)
}

fn read_head(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    match read {
        Ok(_) => Ok(bytes),
        Err(error) => Err(format!("{}: cannot be read ({error}); restore the file", path.display())),
    }
}

/// Where relative paths of images begin.
fn beside(path: &Path, data: &ChatData) -> PathBuf {
    let beside = data.images.as_ref().map(PathBuf::from);
    beside.unwrap_or_else(|| path.parent().unwrap_or(Path::new("")).into())
}

/// Names the lines and their images, which may lie anywhere. Of images it has the sizes: opening looks for
/// every one of them anyway, and reading them all on every rank would take as long as an epoch's decoding.
fn fingerprint(lines: &Lines, sizes: &[u64]) -> Fingerprint {
    if sizes.is_empty() {
        return lines.fingerprint();
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&lines.fingerprint().0);
    sizes.iter().for_each(|size| {
        hasher.update(&size.to_le_bytes());
    });
    Fingerprint(*hasher.finalize().as_bytes())
}
