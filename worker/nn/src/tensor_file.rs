//! A safetensors file that is read tensor by tensor, or part by part, into where its contents belong.
//!
//! Of the file nothing but its header is in memory. Large files are never there beside what is made of them:
//! a run that is resumed takes what training takes.
//!
//! Plain reads, not a map: of a file that is cut short meanwhile, or a disk that fails, there is an error to
//! tell.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path};

use coxswain_proto::bounded;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::pulse;

/// Bytes read between two signs of motion.
const PIECE: usize = 64 << 20;
/// Bytes of the header's length, at the begin of the file.
const PREFIX: u64 = 8;
/// The longest header, as safetensors has it.
const LONGEST_HEADER: u64 = 100_000_000;

/// Bytes that can be read from anywhere.
pub trait ReadAt {
    /// How many there are.
    fn size(&self) -> u64;

    /// Reads as many as `into` holds, from `offset` on; an error if there are fewer.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
}

impl ReadAt for [u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|from| self.get(from..)?.get(..into.len()));
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl ReadAt for Vec<u8> {
    fn size(&self) -> u64 {
        self.as_slice().size()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.as_slice().read_at(offset, into)
    }
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn size(&self) -> u64 {
        (**self).size()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        (**self).read_at(offset, into)
    }
}

/// A file that is open; or none, which has no bytes.
#[derive(Debug, Default)]
pub struct OpenFile {
    file: Option<File>,
    bytes: u64,
}

impl OpenFile {
    /// Opens a file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = bounded::open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { file: Some(file), bytes })
    }
}

impl ReadAt for OpenFile {
    fn size(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let Some(file) = &self.file else { return Err(io::ErrorKind::UnexpectedEof.into()) };
        let places = (offset..).step_by(PIECE);
        for (at, piece) in places.zip(into.chunks_mut(PIECE)) {
            file.read_exact_at(piece, at)?;
            pulse::beat();
        }
        Ok(())
    }
}

/// A safetensors file whose header has been read.
#[derive(Debug)]
pub struct TensorFile<S> {
    source: S,
    metadata: Metadata,
    /// Where the data begins.
    begin: u64,
}

impl<S: ReadAt> TensorFile<S> {
    /// Reads the header; an error of kind `InvalidData` if this is no such file, or not all of it.
    pub fn new(source: S) -> io::Result<Self> {
        let invalid = |detail: &dyn std::fmt::Display| {
            let detail = format!("not a valid safetensors file ({detail}): truncated or garbled");
            io::Error::new(io::ErrorKind::InvalidData, detail)
        };
        if source.size() < PREFIX {
            return Err(invalid(&"it has no header"));
        }
        let mut length = [0; PREFIX as usize];
        source.read_at(0, &mut length)?;
        let length = u64::from_le_bytes(length);
        if length > LONGEST_HEADER || length > source.size() - PREFIX {
            return Err(invalid(&"its header is longer than the file, or than the limit"));
        }
        let mut header = vec![0; length as usize];
        source.read_at(PREFIX, &mut header)?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| invalid(&error))?;
        // Made once more, because this way of making one checks that offsets, shapes and types agree.
        let names = metadata.offset_keys();
        let infos = names.into_iter().filter_map(|name| Some((name.clone(), metadata.info(&name)?.clone())));
        let metadata = Metadata::new(metadata.metadata().clone(), infos.collect());
        let metadata = metadata.map_err(|error| invalid(&error))?;
        let begin = PREFIX + length;
        if begin + metadata.data_len() as u64 != source.size() {
            return Err(invalid(&"its data is not as long as its header says"));
        }
        Ok(Self { source, metadata, begin })
    }

    /// Names, shapes, types, and the file's own metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Every tensor.
    pub fn tensors(&self) -> impl Iterator<Item = (String, &TensorInfo)> {
        let names = self.metadata.offset_keys().into_iter();
        names.filter_map(|name| Some((name.clone(), self.metadata.info(&name)?)))
    }

    /// Bytes of a tensor of this file from `offset` on; an error if it has fewer.
    pub fn read(&self, tensor: &TensorInfo, offset: usize, into: &mut [u8]) -> io::Result<()> {
        let (begin, end) = tensor.data_offsets;
        if end - begin < offset.saturating_add(into.len()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.source.read_at(self.begin + (begin + offset) as u64, into)
    }
}

#[cfg(test)]
mod tests {
    use safetensors::{Dtype, tensor::TensorView};

    use super::*;

    fn file() -> Vec<u8> {
        let (a, b) = ([1.0f32, 2.0, 3.0], [4u8, 5]);
        let tensors = [
            ("a", TensorView::new(Dtype::F32, vec![3], bytemuck::cast_slice(&a)).expect("three floats")),
            ("b", TensorView::new(Dtype::U8, vec![2, 1], &b).expect("two bytes")),
        ];
        safetensors::serialize(tensors, None).expect("sound")
    }

    fn holds_its_tensors<S: ReadAt>(file: &TensorFile<S>) {
        let (mut floats, mut byte) = ([0.0f32; 2], [0]);
        let [a, b] = ["a", "b"].map(|name| file.metadata().info(name).expect("it is there"));
        file.read(a, 4, bytemuck::cast_slice_mut(&mut floats)).expect("it has as many");
        file.read(b, 1, &mut byte).expect("it has as many");
        assert!(file.read(b, 1, &mut [0; 2]).is_err(), "what is behind a tensor is not its own");
        assert_eq!((floats, byte), ([2.0, 3.0], [5]));
    }

    #[test]
    fn parts_of_tensors_are_read_from_memory_and_from_disk() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a.safetensors");
        std::fs::write(&path, file()).expect("it has space");
        let on_disk = TensorFile::new(OpenFile::open(&path).expect("written")).expect("sound");
        holds_its_tensors(&on_disk);
        holds_its_tensors(&TensorFile::new(file()).expect("sound"));
        let names: Vec<_> = on_disk.tensors().map(|(name, _)| name).collect();
        assert_eq!(names, ["a", "b"]);
    }

    #[test]
    fn a_device_is_no_file_of_weights() {
        let error = OpenFile::open(Path::new("/dev/null")).expect_err("it may never end");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }

    #[test]
    fn what_is_cut_short_or_garbled_is_refused() {
        let whole = file();
        assert!((0..whole.len()).all(|len| TensorFile::new(&whole[..len]).is_err()));
        assert!(TensorFile::new([&whole[..], &[0]].concat()).is_err(), "and so is what has more");
        let mut long = whole;
        long[7] = 0xff;
        assert!(TensorFile::new(&long).is_err());
        assert!(TensorFile::new(OpenFile::default()).is_err());
    }

    #[test]
    fn a_hostile_file_is_refused_or_read_within_its_own_size() {
        coxswain_fuzz::Target::new("safetensors", [file()]).check(|bytes| {
            let Ok(file) = TensorFile::new(bytes) else { return };
            for (_, tensor) in file.tensors() {
                let (begin, end) = tensor.data_offsets;
                assert!(end - begin <= bytes.len(), "{begin}..{end} of {}", bytes.len());
                drop(file.read(tensor, 0, &mut vec![0; end - begin]));
            }
        });
    }
}
