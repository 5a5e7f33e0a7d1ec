//! Elements out of weight files, converted on the way.
//!
//! ```text
//! InMap    the mapped file, by all threads: while a model is loaded. A fault of the disk ends the process
//!          (`mapping`)
//! InFile   plain reads through a small buffer, by the calling thread: while training runs. A fault of the
//!          disk is an error
//! ```
//!
//! The bits are the same either way. What this file does not do: know names and shapes (`checkpoint`).

use std::{
    convert::Infallible,
    fs::{File, Metadata},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    time::SystemTime,
};

use burn::tensor::Bytes;
use coxswain_nn::dtypes::WeightsDtype;
use half::{bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::Dtype;

use super::mapping;
use coxswain_nn::pulse;

/// Elements converted by one thread at a time: large enough to hide the hand-over, small enough to balance.
const CONVERT_CHUNK: usize = 1 << 16;
/// Elements of a mapped file that are in memory before they are let go, 16 MiB of float32; in tests few, so
/// that there are several spans.
const SPAN: usize = if cfg!(test) { CONVERT_CHUNK } else { CONVERT_CHUNK << 6 };
/// Bytes of one plain read: they stay in the second-level cache until they are converted. A multiple of every
/// element's size.
const PIECE: usize = 256 << 10;

/// Stored elements, little-endian.
pub trait StoredElements {
    /// Why they cannot be read.
    type Fault;

    /// All of them, converted from `N` bytes each.
    fn convert<const N: usize, T: Copy + Default + Send>(
        &self,
        element: impl Fn([u8; N]) -> T + Sync,
    ) -> Result<Vec<T>, Self::Fault>;
}

/// Elements in a mapped file, which are let go once they are converted.
pub struct InMap<'a> {
    /// The file.
    pub map: &'a Mmap,
    /// Bytes of it that they are.
    pub range: Range<usize>,
}

impl StoredElements for InMap<'_> {
    type Fault = Infallible;

    fn convert<const N: usize, T: Copy + Default + Send>(
        &self,
        element: impl Fn([u8; N]) -> T + Sync,
    ) -> Result<Vec<T>, Infallible> {
        pulse::allow(self.range.len() as u64);
        let mut out = vec![T::default(); self.range.len() / N];
        for (out, start) in out.chunks_mut(SPAN).zip(self.range.clone().step_by(SPAN * N)) {
            let span = start..start + out.len() * N;
            let pieces = self.map[span.clone()].par_chunks(CONVERT_CHUNK * N);
            out.par_chunks_mut(CONVERT_CHUNK).zip(pieces).for_each(|(out, piece)| {
                for (value, le) in out.iter_mut().zip(piece.as_chunks::<N>().0) {
                    *value = element(*le);
                }
            });
            mapping::release(self.map, span);
        }
        Ok(out)
    }
}

/// Elements in an open file.
pub struct InFile<'a> {
    /// The file.
    pub file: &'a File,
    /// Where they begin.
    pub start: u64,
    /// How many bytes they are.
    pub len: usize,
}

impl StoredElements for InFile<'_> {
    type Fault = io::Error;

    fn convert<const N: usize, T: Copy + Default + Send>(
        &self,
        element: impl Fn([u8; N]) -> T + Sync,
    ) -> Result<Vec<T>, io::Error> {
        let mut out = Vec::with_capacity(self.len / N);
        let mut buffer = vec![0; PIECE.min(self.len)];
        for at in (0..self.len).step_by(PIECE) {
            let piece = &mut buffer[..PIECE.min(self.len - at)];
            self.file.read_exact_at(piece, self.start + at as u64)?;
            out.extend(piece.as_chunks::<N>().0.iter().map(|le| element(*le)));
        }
        Ok(out)
    }
}

/// Elements of type `source` in float32.
pub fn widened<S: StoredElements>(stored: &S, source: Dtype) -> Result<Vec<f32>, S::Fault> {
    match source {
        Dtype::F32 => stored.convert(f32::from_le_bytes),
        Dtype::BF16 => stored.convert(|le| bf16::from_le_bytes(le).to_f32()),
        _ => stored.convert(|le| f16::from_le_bytes(le).to_f32()),
    }
}

/// Elements of type `source` as `wanted`, rounded to nearest even; what is beyond float16 becomes infinite.
pub fn converted<S: StoredElements>(
    stored: &S,
    source: Dtype,
    wanted: WeightsDtype,
) -> Result<Bytes, S::Fault> {
    Ok(match (wanted, source) {
        (WeightsDtype::Float32, _) => Bytes::from_elems(widened(stored, source)?),
        (WeightsDtype::Bfloat16, Dtype::F32) => {
            Bytes::from_elems(stored.convert(|le| bf16::from_f32(f32::from_le_bytes(le)))?)
        }
        (WeightsDtype::Bfloat16, Dtype::BF16) => Bytes::from_elems(stored.convert(bf16::from_le_bytes)?),
        (WeightsDtype::Bfloat16, _) => {
            Bytes::from_elems(stored.convert(|le| bf16::from_f32(f16::from_le_bytes(le).to_f32()))?)
        }
        (WeightsDtype::Float16, Dtype::F32) => {
            Bytes::from_elems(stored.convert(|le| f16::from_f32(f32::from_le_bytes(le)))?)
        }
        (WeightsDtype::Float16, Dtype::BF16) => {
            Bytes::from_elems(stored.convert(|le| f16::from_f32(bf16::from_le_bytes(le).to_f32()))?)
        }
        (WeightsDtype::Float16, _) => Bytes::from_elems(stored.convert(f16::from_le_bytes)?),
    })
}

/// Whether all of what [`converted`] has made is finite: of matrices rounded to float16, whose range is
/// small.
pub fn is_within(dtype: WeightsDtype, bytes: &[u8]) -> bool {
    let finite = |le: &[u8; 2]| f16::from_le_bytes(*le).is_finite();
    dtype != WeightsDtype::Float16 || bytes.as_chunks::<2>().0.iter().all(finite)
}

/// What a file was when it was opened, as far as its metadata tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    len: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    /// The stamp of an open file.
    pub fn from_file(file: &File) -> io::Result<Self> {
        let metadata: Metadata = file.metadata()?;
        Ok(Self { len: metadata.len(), modified: metadata.modified().ok() })
    }

    /// An error if the file is another than it was.
    pub fn hold(&self, file: &File) -> io::Result<()> {
        let now = Self::from_file(file)?;
        let problem = match () {
            () if now.len != self.len => format!("the file changed from {} to {} bytes", self.len, now.len),
            () if now != *self => "the file was written to".to_owned(),
            () => return Ok(()),
        };
        Err(io::Error::new(io::ErrorKind::InvalidData, format!("{problem} since it was opened")))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const SOURCES: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];

    /// Elements of every type that are longer than a piece together, with something before and after them.
    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().expect("a temporary file");
        [&b"before"[..], bytes, b"after"]
            .iter()
            .for_each(|part| file.write_all(part).expect("there is room"));
        file
    }

    #[test]
    fn a_file_read_piece_by_piece_gives_the_bits_of_the_mapped_one() {
        let bytes: Vec<u8> = (0..2 * PIECE + 40).map(|at| (at * 31 % 251) as u8).collect();
        let file = file_of(&bytes);
        let in_file = InFile { file: &file, start: 6, len: bytes.len() };
        let map = mapping::map(&file).expect("it can be mapped");
        let in_map = InMap { map: &map, range: 6..6 + bytes.len() };
        for (source, wanted) in
            SOURCES.into_iter().flat_map(|source| WeightsDtype::ALL.map(|wanted| (source, wanted)))
        {
            let Ok(mapped) = converted(&in_map, source, wanted);
            let Ok(again) = converted(&in_map, source, wanted);
            assert!(mapped[..] == again[..], "what was let go is read again");
            let read = converted(&in_file, source, wanted).expect("readable");
            assert!(mapped[..] == read[..], "{source:?} as {wanted:?}");
        }
    }

    #[test]
    fn what_is_beyond_float16_is_seen_and_what_is_not_is_rounded() {
        let made = |values: [f32; 2], wanted| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let all = InFile { file: &file_of(&bytes), start: 6, len: bytes.len() };
            converted(&all, Dtype::F32, wanted).expect("readable").to_vec()
        };
        let rounded = made([65_504.0, 1.0 + 1.0 / 4096.0], WeightsDtype::Float16);
        assert_eq!(rounded, [f16::MAX, f16::ONE].map(f16::to_le_bytes).concat());
        assert!(is_within(WeightsDtype::Float16, &rounded));
        assert!(!is_within(WeightsDtype::Float16, &made([0.0, -70_000.0], WeightsDtype::Float16)));
        assert!(is_within(WeightsDtype::Bfloat16, &made([0.0, -70_000.0], WeightsDtype::Bfloat16)));
    }

    #[test]
    fn a_file_that_ends_early_is_an_error() {
        let file = file_of(&[1; 64]);
        let beyond = InFile { file: &file, start: 6, len: 128 };
        let error = converted(&beyond, Dtype::F32, WeightsDtype::Float32).expect_err("64 bytes and 5 more");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_stamp_holds_until_the_file_is_cut_or_written_to() {
        let mut file = file_of(&[1; 64]);
        let stamp = Stamp::from_file(&file).expect("it is open");
        stamp.hold(&file).expect("nothing has happened");
        file.write_all(b"more").expect("there is room");
        let message = stamp.hold(&file).expect_err("it is longer").to_string();
        assert_eq!(message, "the file changed from 75 to 79 bytes since it was opened");
        file.set_len(75).expect("it may be cut");
        let later = SystemTime::now() + std::time::Duration::from_secs(5);
        file.set_modified(later).expect("it is ours");
        let message = stamp.hold(&file).expect_err("it was changed").to_string();
        assert_eq!(message, "the file was written to since it was opened");
    }
}
