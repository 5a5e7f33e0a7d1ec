//! A video's table of contents: read once per file, kept beside the run, asked for each frame.

use std::path::Path;

use crate::boxes::{Boxes, Cursor, Header};
use crate::codec::{Codec, Description, Stream};
use crate::error::{Fault, TO_PLAIN_MP4, VideoError, container};
use crate::limits::{MAX_MOOV_BYTES, MAX_TOP_BOXES};
use crate::matrix::{Rotation, rotation};
use crate::picture::Colour;
use crate::source::Source;
use crate::tables::{Sample, Tables, edits, presentation};

const MAGIC: &[u8; 8] = b"coxmoov1";

/// The `moov` box of a file and the file's length: everything an index is made from, as the file has it. This
/// is what to keep beside a run (6 to 16 bytes a frame); [`VideoIndex::new`] checks it each time like the
/// file itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moov {
    file_bytes: u64,
    body: Vec<u8>,
}

impl Moov {
    /// Finds and reads the box, before or after the pictures. Reads nothing else but the heads of the other
    /// boxes.
    pub fn read(source: &dyn Source) -> Result<Self, Fault> {
        Self::find(source).map_err(|fault| {
            let mut begin = [0; 64];
            let begin = &mut begin[..source.len().min(64) as usize];
            let other = source.read(0, begin).ok().and_then(|()| Fault::no_video(begin));
            other.unwrap_or(fault)
        })
    }

    fn find(source: &dyn Source) -> Result<Self, Fault> {
        let file_bytes = source.len();
        let mut at = 0;
        for _ in 0..MAX_TOP_BOXES {
            let room = file_bytes - at;
            if room < 8 {
                return Err(container("no `moov` box: the file is truncated, or still being written"));
            }
            let mut head = [0; 16];
            let head = &mut head[..room.min(16) as usize];
            source.read(at, head)?;
            let header = Header::parse(head, room)?;
            if &header.kind == b"moof" {
                return Err(fragmented());
            }
            if &header.kind == b"moov" {
                let value = header.total - header.header as u64;
                if value > MAX_MOOV_BYTES {
                    return Err(Fault::Limit { what: "bytes of `moov`", value, limit: MAX_MOOV_BYTES });
                }
                let mut body = vec![0; value as usize];
                source.read(at + header.header as u64, &mut body)?;
                return Ok(Self { file_bytes, body });
            }
            at += header.total;
        }
        let (what, limit) = ("top-level MP4 boxes", MAX_TOP_BOXES as u64);
        Err(Fault::Limit { what, value: limit + 1, limit })
    }

    /// All that it says, as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        [MAGIC.as_slice(), &self.file_bytes.to_be_bytes(), &self.body].concat()
    }

    /// What [`Moov::to_bytes`] wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Fault> {
        let mut cursor = Cursor::new(bytes);
        if &cursor.array::<8>()? != MAGIC {
            return Err(container("not a cached `moov` box"));
        }
        Ok(Self { file_bytes: cursor.u64()?, body: cursor.rest().to_vec() })
    }
}

fn fragmented() -> Fault {
    Fault::Refused { what: "a fragmented mp4".to_owned(), command: TO_PLAIN_MP4 }
}

/// Where each frame of one video track lies and how it is decoded. Frames are numbered from 0 in the order
/// they are shown, edit lists applied: the numbers FFmpeg's decoding of the file counts.
#[derive(Debug)]
pub struct VideoIndex {
    /// What decodes it.
    pub codec: Codec,
    /// Pixels of a row, as decoded.
    pub width: usize,
    /// Rows, as decoded.
    pub height: usize,
    /// How what is decoded is turned before it is seen.
    pub rotation: Rotation,
    /// Ticks of a second, the unit of [`VideoIndex::ticks`].
    pub timescale: u32,
    pub(crate) samples: Vec<Sample>,
    pub(crate) stream: Stream,
    pub(crate) colour: Colour,
    order: Vec<u32>,
    times: Times,
}

/// When frames are shown. Nearly all files have a constant rate, which needs no table.
#[derive(Debug)]
enum Times {
    Even { first: i64, step: i64 },
    Listed(Vec<i64>),
}

impl VideoIndex {
    /// Makes the index of the `track`th video track (sound and other tracks are not counted).
    pub fn new(moov: &Moov, track: usize) -> Result<Self, Fault> {
        if Boxes::find(&moov.body, b"mvex")?.is_some() {
            return Err(fragmented());
        }
        let mvhd = Boxes::need(&moov.body, b"mvhd")?;
        let movie_timescale = timescale(mvhd)?;
        let tracks = video_tracks(&moov.body)?;
        let trak = *tracks.get(track).ok_or(Fault::NoSuchTrack { tracks: tracks.len(), track })?;
        let mdia = Boxes::need(trak, b"mdia")?;
        let timescale = timescale(Boxes::need(mdia, b"mdhd")?)?;
        let stbl = Boxes::need(Boxes::need(mdia, b"minf")?, b"stbl")?;
        // The codec first: a file of another codec is refused by that name, whatever else it holds.
        let first = Description::read(Boxes::need(stbl, b"stsd")?, 0)?;
        let tables = Tables::read(stbl, moov.file_bytes)?;
        let description = match tables.description {
            0 => first,
            other => Description::read(Boxes::need(stbl, b"stsd")?, other)?,
        };
        let edits =
            match Boxes::find(trak, b"edts")?.map(|edts| Boxes::find(edts, b"elst")).transpose()?.flatten() {
                Some(elst) => edits(elst, movie_timescale, timescale)?,
                None => Vec::new(),
            };
        let (order, ticks) = presentation(&tables.times, &edits)?;
        Ok(Self {
            codec: description.stream.codec(),
            width: description.width,
            height: description.height,
            rotation: rotation(mvhd, Boxes::need(trak, b"tkhd")?)?,
            timescale,
            samples: tables.samples,
            stream: description.stream,
            colour: description.colour,
            order,
            times: Times::new(ticks),
        })
    }

    /// How many frames are shown.
    pub fn frames(&self) -> usize {
        self.order.len()
    }

    /// When a frame is shown, in ticks of [`VideoIndex::timescale`].
    pub fn ticks(&self, frame: usize) -> Option<i64> {
        match &self.times {
            Times::Even { first, step } => (frame < self.frames()).then(|| first + step * frame as i64),
            Times::Listed(times) => times.get(frame).copied(),
        }
    }

    /// The frame that is shown nearest to `seconds`.
    pub fn frame_at(&self, seconds: f64) -> usize {
        let ticks = (seconds * f64::from(self.timescale)).round() as i64;
        let distance = |frame: &usize| self.ticks(*frame).map_or(u64::MAX, |at| at.abs_diff(ticks));
        let after = match &self.times {
            Times::Even { first, step } if *step > 0 => (ticks.saturating_sub(*first) / step).max(0) as usize,
            Times::Even { .. } => 0,
            Times::Listed(times) => times.partition_point(|at| *at < ticks),
        };
        let last = self.frames().saturating_sub(1);
        let near = [after.saturating_sub(1), after, after + 1].map(|frame| frame.min(last));
        near.into_iter().min_by_key(distance).unwrap_or(0)
    }

    /// When a frame is shown, in seconds.
    pub fn seconds(&self, frame: usize) -> Option<f64> {
        Some(self.ticks(frame)? as f64 / f64::from(self.timescale))
    }

    /// Frames from one keyframe to the next, at most.
    pub fn longest_group(&self) -> usize {
        let mut keyframes: Vec<u32> = self.samples.iter().map(|sample| sample.start).collect();
        keyframes.sort_unstable();
        keyframes.chunk_by(|a, b| a == b).map(<[u32]>::len).max().unwrap_or(0)
    }

    /// Coded pictures in decode order.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// The number of the sample that holds a frame.
    pub fn sample_of(&self, frame: usize) -> Option<u32> {
        self.order.get(frame).copied()
    }

    /// Bytes that the tables take, for callers that keep many.
    pub fn bytes(&self) -> usize {
        let listed = if let Times::Listed(times) = &self.times { size_of_val(times.as_slice()) } else { 0 };
        size_of_val(self.samples.as_slice()) + size_of_val(self.order.as_slice()) + listed
    }
}

impl Times {
    fn new(ticks: Vec<i64>) -> Self {
        let first = ticks.first().copied().unwrap_or(0);
        let step = ticks.get(1).map_or(0, |second| second - first);
        let even = |(n, &tick): (usize, &i64)| {
            (n as i64).checked_mul(step).and_then(|at| at.checked_add(first)) == Some(tick)
        };
        if ticks.iter().enumerate().all(even) { Self::Even { first, step } } else { Self::Listed(ticks) }
    }
}

fn video_tracks(moov: &[u8]) -> Result<Vec<&[u8]>, Fault> {
    let mut tracks = Vec::new();
    for found in Boxes::new(moov) {
        let found = found?;
        if &found.kind == b"trak" {
            let mut handler = Cursor::new(Boxes::need(Boxes::need(found.body, b"mdia")?, b"hdlr")?);
            handler.take(8)?;
            if &handler.array::<4>()? == b"vide" {
                tracks.push(found.body);
            }
        }
    }
    Ok(tracks)
}

/// Ticks of a second from `mvhd` or `mdhd`, whose heads are alike.
fn timescale(body: &[u8]) -> Result<u32, Fault> {
    let mut cursor = Cursor::new(body);
    let version = cursor.version()?;
    cursor.take(if version == 1 { 16 } else { 8 })?;
    match cursor.u32()? {
        0 => Err(container("a time scale of zero")),
        timescale => Ok(timescale),
    }
}

/// One video, ready to be asked for frames.
pub struct Video {
    /// As errors name it.
    pub(crate) path: std::path::PathBuf,
    pub(crate) source: Box<dyn Source>,
    pub(crate) id: u64,
    index: VideoIndex,
}

impl Video {
    /// Opens a file and reads the table of its first video track.
    pub fn open(path: &Path) -> Result<Self, VideoError> {
        let fault = |fault| VideoError::file(path, fault);
        let source = crate::source::FileSource::new(path).map_err(fault)?;
        let moov = Moov::read(&source).map_err(fault)?;
        Self::with(path, Box::new(source), &moov, 0)
    }

    /// A video from a source and a table that was kept. `path` is for errors.
    pub fn with(path: &Path, source: Box<dyn Source>, moov: &Moov, track: usize) -> Result<Self, VideoError> {
        let fault = |fault| VideoError::file(path, fault);
        if source.len() != moov.file_bytes {
            let changed = format!("{} bytes, was {}", source.len(), moov.file_bytes);
            return Err(fault(Fault::Changed(changed)));
        }
        let index = VideoIndex::new(moov, track).map_err(fault)?;
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(Self { path: path.to_owned(), source, id, index })
    }

    /// Table of contents.
    pub fn index(&self) -> &VideoIndex {
        &self.index
    }

    /// As errors name it.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
