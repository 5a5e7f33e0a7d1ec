//! Chats in a file of lines, and images by path.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use coxswain_data::{DataError, Fingerprint, text::excerpt};
use coxswain_proto::bounded;

use super::{source::ChatSource, spelling::Chat};
use crate::{
    sft::config::ChatData,
    tokens::lines::{AtFault, Lines},
};

/// A file of lines, and images by path.
pub struct ChatLines {
    lines: Lines,
    /// Where relative paths of images begin.
    beside: PathBuf,
}

impl ChatLines {
    /// Opens the file, none of its chats read.
    pub fn in_file(path: &Path, data: &ChatData) -> Result<Self, DataError> {
        Ok(Self { lines: Lines::scan(path, |_, _| Ok(()))?, beside: beside(path, data) })
    }

    /// Opens the file, reads every chat, which `see` gets with its place, and looks for its images. Names the
    /// content, too.
    pub fn checked(
        path: &Path,
        data: &ChatData,
        see: &mut dyn FnMut(u64, &Chat),
    ) -> Result<(Self, Fingerprint), DataError> {
        Self::scan(path, data, &mut Err, see)
    }

    /// Every line that this refuses.
    pub fn faults(path: &Path, data: &ChatData) -> Vec<DataError> {
        let mut faults = Vec::new();
        let note = &mut |fault: DataError| -> Result<(), DataError> {
            faults.push(fault);
            Ok(())
        };
        let ended = Self::scan(path, data, note, &mut |_, _| ());
        let ended = ended.err();
        faults.extend(ended);
        faults
    }

    fn scan(
        path: &Path,
        data: &ChatData,
        at_fault: &mut AtFault<'_>,
        see: &mut dyn FnMut(u64, &Chat),
    ) -> Result<(Self, Fingerprint), DataError> {
        let beside = beside(path, data);
        let (mut sizes, mut index) = (Vec::new(), 0);
        let lines = Lines::scan(path, |number, text| {
            let refuse = |fault| DataError::Line { path: path.into(), line: number, fault };
            let chat = image_sizes(&beside, text, &mut sizes);
            chat.map(|chat| see(index, &chat)).map_err(refuse).or_else(&mut *at_fault)?;
            index += 1;
            Ok(())
        })?;
        let fingerprint = fingerprint(&lines, &sizes);
        Ok((Self { lines, beside }, fingerprint))
    }
}

/// A chat, the bytes of whose images are noted; or what is wrong with it.
fn image_sizes(beside: &Path, text: &str, sizes: &mut Vec<u64>) -> Result<Chat, String> {
    let chat = Chat::parse(text)?;
    for image in &chat.images {
        let image = beside.join(&image.path);
        let file = fs::metadata(&image).ok().filter(fs::Metadata::is_file);
        let file = file.ok_or_else(|| {
            let remedy = "correct the path, or set data.images to the directory that paths start from";
            format!("there is no image {}; {remedy}", excerpt(&image.to_string_lossy()))
        })?;
        sizes.push(file.len());
    }
    Ok(chat)
}

impl ChatSource for ChatLines {
    fn len(&self) -> u64 {
        self.lines.len()
    }

    fn chat(&self, index: u64) -> Result<Chat, DataError> {
        Chat::parse(&self.lines.line(index)?).map_err(|fault| self.fault(index, fault))
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
    let read = bounded::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
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
