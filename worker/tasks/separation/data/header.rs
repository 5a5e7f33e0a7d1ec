//! The header of a WAV file: what its samples are, and where they lie.
//!
//! As libsndfile, FFmpeg and Python read them: a chunk of odd length is followed by a byte that belongs to
//! none, and a program that wrote into a pipe could not know how long its samples would be, so that they go
//! on to the end of the file.

use std::{
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
};

/// Chunks before the samples; of more the file is none.
const CHUNKS: usize = 4096;
/// Bytes that a program writes into a pipe as the length that it does not know: at least so many.
const UNKNOWN: u32 = 0x7fff_0000;
/// Kinds of samples, as `fmt ` has them.
const INTEGERS: u16 = 1;
const FLOATS: u16 = 3;
const EXTENSIBLE: u16 = 0xfffe;

const TO_PLAIN: &str = "convert it: `ffmpeg -i IN.wav -c:a pcm_s16le OUT.wav`";

/// How a sample is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Whole numbers of so many bytes; of one byte they have no sign.
    Integer(usize),
    /// Floating point numbers of so many bytes.
    Float(usize),
}

/// What a header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WavHeader {
    /// Samples of a channel in a second.
    pub rate: u32,
    /// Channels.
    pub channels: u16,
    /// Each sample.
    pub format: Format,
    /// Where the samples lie in the file.
    pub samples: Range<u64>,
    /// Where the file ends: before its samples do, if it was cut off.
    pub end: u64,
}

/// Why a header cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub struct HeaderFault {
    /// What of it.
    pub field: &'static str,
    /// What is there.
    pub found: String,
    /// What to do.
    pub remedy: &'static str,
}

impl HeaderFault {
    fn damaged(found: impl Into<String>) -> Self {
        Self { field: "header", found: found.into(), remedy: "copy the file again, or write it as WAV" }
    }
}

impl From<io::Error> for HeaderFault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::damaged("ends before its samples begin"),
            _ => Self::damaged(error.to_string()),
        }
    }
}

impl Format {
    fn bytes(self) -> usize {
        let (Self::Integer(bytes) | Self::Float(bytes)) = self;
        bytes
    }

    /// A sample from its bytes, full scale at 1.
    pub fn value(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::Integer(_), [one]) => (f32::from(*one) - 128.0) / 128.0,
            (Self::Integer(_), [a, b]) => f32::from(i16::from_le_bytes([*a, *b])) / 32_768.0,
            (Self::Integer(_), [a, b, c]) => (i32::from_le_bytes([0, *a, *b, *c]) >> 8) as f32 / 8_388_608.0,
            (Self::Integer(_), [a, b, c, d]) => i32::from_le_bytes([*a, *b, *c, *d]) as f32 / 2_147_483_648.0,
            (Self::Float(_), [a, b, c, d]) => f32::from_le_bytes([*a, *b, *c, *d]),
            (Self::Float(_), bytes) => {
                bytes.first_chunk().map_or(f32::NAN, |bytes| f64::from_le_bytes(*bytes) as f32)
            }
            (Self::Integer(_), _) => f32::NAN,
        }
    }
}

impl WavHeader {
    /// Reads the header of a file from its beginning.
    pub fn from_file(file: &mut (impl Read + Seek)) -> Result<Self, HeaderFault> {
        let len = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(0))?;
        let mut head = [0; 12];
        file.read_exact(&mut head)?;
        if !matches!(&head[..4], b"RIFF" | b"RF64") || &head[8..] != b"WAVE" {
            return Err(HeaderFault::damaged("is not a WAV file: it does not begin with RIFF and WAVE"));
        }
        let riff = word(&head, 4);
        let (mut at, mut format, mut long) = (12, None, None);
        for _ in 0..CHUNKS {
            let mut head = [0; 8];
            file.seek(SeekFrom::Start(at))?;
            file.read_exact(&mut head)?;
            let (kind, size) = (&head[..4], word(&head, 4));
            at += 8;
            match kind {
                b"fmt " => format = Some(Layout::from_file(file, size)?),
                b"ds64" => {
                    let mut sizes = [0; 16];
                    file.read_exact(&mut sizes)?;
                    long = sizes.last_chunk().map(|size| u64::from_le_bytes(*size));
                }
                b"data" => {
                    let Some(layout) = format else {
                        return Err(HeaderFault::damaged("the `data` chunk comes before the `fmt ` chunk"));
                    };
                    let left = len.saturating_sub(at);
                    let is_unknown = match size {
                        0 => matches!(riff, 0 | u32::MAX),
                        size => size >= UNKNOWN && u64::from(size) > left,
                    };
                    let size = match long.filter(|_| size == u32::MAX) {
                        Some(long) => long,
                        None if is_unknown => left,
                        None => u64::from(size),
                    };
                    let Layout { rate, channels, format } = layout;
                    return Ok(Self {
                        rate,
                        channels,
                        format,
                        samples: at..at.saturating_add(size),
                        end: len,
                    });
                }
                _ => {}
            }
            at += u64::from(size) + u64::from(size % 2);
        }
        Err(HeaderFault::damaged(format!("has more than {CHUNKS} chunks before its samples")))
    }

    /// Bytes of a frame: a sample of each channel.
    pub fn frame_bytes(&self) -> usize {
        self.format.bytes() * usize::from(self.channels)
    }

    /// Frames that the header promises.
    pub fn frames(&self) -> u64 {
        (self.samples.end - self.samples.start) / self.frame_bytes().max(1) as u64
    }

    /// Frames that are there.
    pub fn frames_there(&self) -> u64 {
        let end = self.samples.end.min(self.end);
        end.saturating_sub(self.samples.start) / self.frame_bytes().max(1) as u64
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u32::from_le_bytes(*word))
}

/// What `fmt ` says.
#[derive(Clone, Copy)]
struct Layout {
    rate: u32,
    channels: u16,
    format: Format,
}

impl Layout {
    fn from_file(file: &mut impl Read, size: u32) -> Result<Self, HeaderFault> {
        let mut body = [0; 26];
        let there = (size as usize).min(body.len());
        file.read_exact(&mut body[..there])?;
        let short = |at: usize| u16::from_le_bytes([body[at], body[at + 1]]);
        let (channels, rate, frame, bits) = (short(2), word(&body, 4), short(12), short(14));
        if there < 16 || channels == 0 || frame == 0 {
            return Err(HeaderFault::damaged("does not describe the format of its samples"));
        }
        let kind = if short(0) == EXTENSIBLE { short(24) } else { short(0) };
        // Samples of fewer bits than their bytes hold fill them from the top.
        let bytes = usize::from(frame) / usize::from(channels);
        let format = match (kind, bytes) {
            (INTEGERS, 1..=4) => Format::Integer(bytes),
            (FLOATS, 4 | 8) => Format::Float(bytes),
            (INTEGERS | FLOATS, _) => {
                let found = format!("{bits} in {bytes} bytes, which is not supported");
                return Err(HeaderFault { field: "bits per sample", found, remedy: TO_PLAIN });
            }
            (kind, _) => {
                let found = format!("are compressed (format {kind})");
                return Err(HeaderFault { field: "samples", found, remedy: TO_PLAIN });
            }
        };
        if usize::from(frame) != format.bytes() * usize::from(channels) {
            return Err(HeaderFault::damaged(format!("has frames of {frame} bytes for {channels} channels")));
        }
        Ok(Self { rate, channels, format })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// Stereo of 16 bits: chunks before the samples, the lengths that it claims, and two frames.
    fn file(before: &[u8], riff: u32, data: u32) -> Vec<u8> {
        let fmt = [&b"fmt "[..], &16u32.to_le_bytes(), &[1, 0, 2, 0], &8000u32.to_le_bytes()].concat();
        let fmt = [&fmt[..], &32_000u32.to_le_bytes(), &[4, 0, 16, 0]].concat();
        let head = [&b"RIFF"[..], &riff.to_le_bytes(), b"WAVE", &fmt, before, b"data"].concat();
        [&head[..], &data.to_le_bytes(), &[0, 0x40, 0, 0xc0, 0, 0x20, 0, 0xe0]].concat()
    }

    fn read(bytes: Vec<u8>) -> Result<WavHeader, HeaderFault> {
        WavHeader::from_file(&mut Cursor::new(bytes))
    }

    #[test]
    fn a_byte_that_fills_up_a_chunk_of_odd_length_belongs_to_none() {
        let plain = read(file(&[], 44, 8)).unwrap();
        assert_eq!((plain.rate, plain.channels, plain.format), (8000, 2, Format::Integer(2)));
        assert_eq!((plain.samples.clone(), plain.frames(), plain.frames_there()), (44..52, 2, 2));
        let junk = [&b"LIST"[..], &3u32.to_le_bytes(), b"abc\0"].concat();
        assert_eq!(read(file(&junk, 56, 8)).unwrap(), WavHeader { samples: 56..64, end: 64, ..plain });
    }

    #[test]
    fn samples_of_unknown_length_go_on_to_the_end_and_those_of_a_known_one_do_not() {
        for (riff, data) in [(u32::MAX, u32::MAX), (0, 0), (u32::MAX, 0), (0x7fff_f024, 0x7fff_f000)] {
            assert_eq!(read(file(&[], riff, data)).unwrap().frames(), 2, "{data:x}");
        }
        assert_eq!(read(file(&[], 36, 0)).unwrap().frames(), 0, "it has none");
        let cut = read(file(&[], 136, 100)).unwrap();
        assert_eq!((cut.frames(), cut.frames_there()), (25, 2), "it was cut off, and is not to be read");
        let ds64 = [&b"ds64"[..], &28u32.to_le_bytes(), &[0; 8], &8u64.to_le_bytes(), &[0; 12]].concat();
        assert_eq!(read(file(&ds64, u32::MAX, u32::MAX)).unwrap().frames(), 2, "RF64 says it");
    }

    #[test]
    fn values_are_those_of_their_bytes() {
        for (format, bytes, value) in [
            (Format::Integer(1), &[0xc0][..], 0.5),
            (Format::Integer(2), &[0, 0xc0], -0.5),
            (Format::Integer(3), &[0, 0, 0xc0], -0.5),
            (Format::Integer(4), &[0, 0, 0, 0x40], 0.5),
            (Format::Float(4), &0.25f32.to_le_bytes(), 0.25),
            (Format::Float(8), &0.25f64.to_le_bytes(), 0.25),
        ] {
            assert_eq!(format.value(bytes), value, "{format:?}");
        }
    }

    #[test]
    fn what_is_no_plain_wav_is_named_with_a_remedy_that_helps() {
        let mut law = file(&[], 44, 8);
        law[20] = 6;
        let fault = read(law).unwrap_err();
        assert!(
            fault.found.contains("compressed (format 6)") && fault.remedy.contains("ffmpeg"),
            "{fault:?}"
        );
        assert!(read(b"fLaC and more of it".to_vec()).unwrap_err().found.contains("is not a WAV file"));
        assert!(read(file(&[], 44, 8)[..30].to_vec()).unwrap_err().found.contains("ends before"));
    }
}
