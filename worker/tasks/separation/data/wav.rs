//! Stereo WAV files, alone or in a shard: what their headers say, and a stretch of their frames.

use std::{
    fmt,
    io::{BufReader, Read, Seek, SeekFrom},
    path::PathBuf,
    sync::Arc,
};

use coxswain_data::{
    DataError,
    shards::{MemberId, Shards},
};
use coxswain_proto::bounded;

use super::{
    batch::CHANNELS,
    header::{HeaderFault, WavHeader},
};

/// Bytes of a block by which a file's content is named.
const BLOCK: u64 = 64 << 10;
/// Blocks by which one is named; a file that has no more is named by all of it.
const BLOCKS: u64 = 16;

/// Where a file lies.
#[derive(Clone, Debug)]
pub enum WavPlace {
    /// By itself.
    File(PathBuf),
    /// In a shard.
    Member(Arc<Shards>, MemberId),
}

/// A file whose header has been read.
#[derive(Clone, Debug)]
pub struct Wav {
    /// Where it is.
    pub place: WavPlace,
    /// Samples of a channel, as the header has it.
    pub frames: u64,
    /// Samples of a channel that are there.
    pub there: u64,
}

/// What reads and seeks.
trait Readable: Read + Seek {}

impl<T: Read + Seek> Readable for T {}

impl WavPlace {
    fn reader(&self) -> Result<Box<dyn Readable>, DataError> {
        Ok(match self {
            Self::File(path) => Box::new(bounded::open(path).map_err(DataError::io(path, "read"))?),
            Self::Member(shards, member) => Box::new(shards.section(*member)?),
        })
    }

    /// Something of the file that cannot be used.
    pub fn invalid(&self, field: &str, found: String, remedy: &str) -> DataError {
        match self {
            Self::File(path) => DataError::invalid(path, field, found, remedy),
            Self::Member(shards, member) => shards.fault(*member, format!("{field}: {found}"), remedy),
        }
    }
}

impl fmt::Display for WavPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Member(shards, member) => {
                write!(f, "{}, {}", shards.path(*member).display(), shards.place(*member))
            }
        }
    }
}

impl Wav {
    /// Reads the header; says samples a second, too.
    pub fn of_any_rate(place: WavPlace) -> Result<(Self, u32), DataError> {
        let rate = header(&place)?.1.rate;
        Self::read_header(place, rate).map(|wav| (wav, rate))
    }

    /// Reads the header; another rate than `rate` and another number of channels than two are refused.
    pub fn read_header(place: WavPlace, rate: u32) -> Result<Self, DataError> {
        let (_, header) = header(&place)?;
        let refuse = |field: &str, found: String, remedy: &str| Err(place.invalid(field, found, remedy));
        if header.rate != rate {
            let found = format!("is {} Hz, but data.sample_rate is {rate}", header.rate);
            return refuse("sample rate", found, "resample it, or train at the rate that all files have");
        }
        if usize::from(header.channels) != CHANNELS {
            let found = format!("{}, but only stereo can be separated", header.channels);
            return refuse(
                "channels",
                found,
                "write it with two channels (for a mono file, the same one twice)",
            );
        }
        Ok(Self { place, frames: header.frames(), there: header.frames_there() })
    }

    /// `frames` frames from `start` on, `[channels, frames]`, full scale at 1. Says in words what is wrong.
    pub fn read_frames(&self, start: u64, frames: usize) -> Result<Vec<f32>, String> {
        let (mut file, header) = header(&self.place).map_err(|error| error.to_string())?;
        let short = |what: String| format!("ends early ({what}); copy or write the file again");
        let frame = header.frame_bytes() as u64;
        let begin = header.samples.start.saturating_add(start.saturating_mul(frame)).min(header.samples.end);
        let there = (header.samples.end - begin).min(frame * frames as u64);
        let mut bytes = Vec::new();
        let read = file.seek(SeekFrom::Start(begin)).and_then(|_| file.take(there).read_to_end(&mut bytes));
        read.map_err(|error| short(error.to_string()))?;
        let sample = bytes.chunks_exact(header.frame_bytes() / usize::from(header.channels));
        let interleaved: Vec<f32> = sample.map(|bytes| header.format.value(bytes)).collect();
        let wanted = CHANNELS * frames;
        if interleaved.len() < wanted {
            return Err(short(format!("{} of {wanted} values", interleaved.len())));
        }
        if let Some(value) = interleaved.iter().find(|value| !value.is_finite()) {
            return Err(format!("contains {value}; write the file again"));
        }
        let mut channels = Vec::with_capacity(wanted);
        (0..CHANNELS).for_each(|channel| channels.extend(interleaved.iter().skip(channel).step_by(CHANNELS)));
        Ok(channels)
    }

    /// Names its content: its length, and blocks from the first to the last, as far apart as each other. A
    /// set of hours of music would take a minute to be read through, on every rank, whenever one starts.
    pub fn name(&self, hasher: &mut blake3::Hasher) -> Result<(), DataError> {
        let failed = |error: std::io::Error| self.place.invalid("(file)", error.to_string(), "restore it");
        let mut file = self.place.reader()?;
        let len = file.seek(SeekFrom::End(0)).map_err(failed)?;
        hasher.update(&len.to_le_bytes());
        let blocks = len.div_ceil(BLOCK).min(BLOCKS);
        let start = |number: u64| match len > BLOCKS * BLOCK {
            true => number * (len - BLOCK) / (BLOCKS - 1),
            false => number * BLOCK,
        };
        let mut bytes = Vec::with_capacity(BLOCK as usize);
        for start in (0..blocks).map(start) {
            file.seek(SeekFrom::Start(start)).map_err(failed)?;
            bytes.clear();
            (&mut file).take(BLOCK).read_to_end(&mut bytes).map_err(failed)?;
            hasher.update(&bytes);
        }
        Ok(())
    }
}

fn header(place: &WavPlace) -> Result<(BufReader<Box<dyn Readable>>, WavHeader), DataError> {
    let mut file = BufReader::new(place.reader()?);
    let header = WavHeader::from_file(&mut file);
    let invalid = |HeaderFault { field, found, remedy }| place.invalid(field, found, remedy);
    header.map(|header| (file, header)).map_err(invalid)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use hound::{SampleFormat, WavSpec, WavWriter};

    use super::*;

    fn written(path: &Path, bits_per_sample: u16, sample_format: SampleFormat) -> Vec<u8> {
        let spec = WavSpec { channels: 2, sample_rate: 8000, bits_per_sample, sample_format };
        let mut writer = WavWriter::create(path, spec).expect("it has space");
        (0..64).for_each(|i| match sample_format {
            SampleFormat::Float => writer.write_sample(i as f32 / 64.0).expect("it has space"),
            SampleFormat::Int => writer.write_sample(i).expect("it has space"),
        });
        writer.finalize().expect("it has space");
        std::fs::read(path).expect("written")
    }

    #[test]
    fn a_hostile_file_is_refused_or_read_within_what_was_asked_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a.wav");
        let kinds = [(16, SampleFormat::Int), (24, SampleFormat::Int), (32, SampleFormat::Float)];
        let samples = kinds.map(|(bits, format)| written(&path, bits, format));
        coxswain_fuzz::Target::new("wav", samples).check(|bytes| {
            std::fs::write(&path, bytes).expect("it has space");
            let Ok(wav) = Wav::read_header(WavPlace::File(path.clone()), 8000) else { return };
            for (start, frames) in [(0, 8), (24, 8), (wav.frames.saturating_sub(4), 8), (wav.frames, 1)] {
                drop(wav.read_frames(start, frames));
            }
            wav.name(&mut blake3::Hasher::new()).expect("it is there");
        });
    }
}
