//! Errors say where (file, frame), what, and what helps.

use std::fmt;
use std::path::{Path, PathBuf};

/// What went wrong in which file and, where one is meant, in which frame (presentation number).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VideoError {
    /// The file, as the caller named it.
    pub path: PathBuf,
    /// The presentation number of the frame.
    pub frame: Option<usize>,
    /// What went wrong.
    pub fault: Fault,
}

impl VideoError {
    pub(crate) fn file(path: &Path, fault: Fault) -> Self {
        Self { path: path.to_owned(), frame: None, fault }
    }

    pub(crate) fn frame(path: &Path, frame: usize, fault: Fault) -> Self {
        Self { path: path.to_owned(), frame: Some(frame), fault }
    }
}

impl fmt::Display for VideoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some(frame) = self.frame {
            write!(f, ", frame {frame}")?;
        }
        write!(f, ": {}", self.fault)
    }
}

impl std::error::Error for VideoError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.fault)
    }
}

/// What can be wrong with a video, each with its remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Io(String),
    /// The container contradicts itself or ends early.
    #[error(
        "not a valid mp4 file: {0}; copy or download it again, or rewrite it with `ffmpeg -i IN -c copy OUT.mp4`"
    )]
    Container(String),
    /// Something else has the video's name.
    #[error("is {what}, not a video; {remedy}")]
    NoVideo {
        /// What it is.
        what: &'static str,
        /// How the video comes there.
        remedy: &'static str,
    },
    /// Valid, but not decoded here.
    #[error("{what} is not supported; convert with `{command}`")]
    Refused {
        /// The codec, layout or structure, by name.
        what: String,
        /// The command that makes a file which is decoded.
        command: &'static str,
    },
    /// More than a bound of [`crate::limits`].
    #[error("{what}: {value}, above the limit of {limit}; the file is damaged, or is not a camera recording")]
    Limit {
        /// Which quantity.
        what: &'static str,
        /// What the file says.
        value: u64,
        /// The bound.
        limit: u64,
    },
    /// The coded picture cannot be decoded. Other frames may be fine.
    #[error("damaged picture: {0}; leave the episode out or restore the file")]
    Picture(String),
    /// The AV1 decoder has panicked too often.
    #[error(
        "AV1 decoding is disabled in this process: the decoder has panicked {times} times and leaks its \
         memory each time; leave out the episodes of the frames that earlier errors name, and start again"
    )]
    GivenUp {
        /// How often.
        times: usize,
    },
    /// The caller asked for a frame beyond the last.
    #[error("the file has {frames} frames; the data set's metadata does not belong to this file")]
    NoSuchFrame {
        /// How many there are.
        frames: usize,
    },
    /// The caller asked for a video track beyond the last.
    #[error("video track {track} (counted from 0) does not exist; video tracks in the file: {tracks}")]
    NoSuchTrack {
        /// How many there are.
        tracks: usize,
        /// Which was asked for.
        track: usize,
    },
    /// The file is not the one that was indexed.
    #[error("changed since it was indexed: {0}; start again with the new file")]
    Changed(String),
}

/// What stands in a clone without Git LFS in place of a file begins with this.
pub const LFS_POINTER: &[u8] = b"version https://git-lfs";
/// What a page begins with, or what a store of files says in place of one.
const PAGES: [&[u8]; 4] = [b"<!", b"<h", b"<H", b"<?"];

impl Fault {
    /// What is wrong with a file that is no mp4 and begins like this, where it is something else altogether.
    pub(crate) fn no_video(begin: &[u8]) -> Option<Self> {
        let (what, remedy) = match begin {
            [] => ("empty", "copy or download it again"),
            _ if begin.starts_with(LFS_POINTER) => {
                ("a Git LFS pointer", "download the real file: `git lfs pull` in the data set's directory")
            }
            _ if PAGES.iter().any(|page| begin.trim_ascii_start().starts_with(page)) => {
                ("a web page", "download it again: the server sent a web page instead, perhaps to log in")
            }
            _ => return None,
        };
        Some(Self::NoVideo { what, remedy })
    }
}

pub(crate) const TO_H264: &str = "ffmpeg -i IN.mp4 -c:v libx264 -pix_fmt yuv420p -g 2 OUT.mp4";
pub(crate) const TO_PLAIN_MP4: &str = "ffmpeg -i IN.mp4 -c copy -movflags +faststart OUT.mp4";

pub(crate) fn container(what: impl Into<String>) -> Fault {
    Fault::Container(what.into())
}

pub(crate) fn refused(what: impl Into<String>) -> Fault {
    Fault::Refused { what: what.into(), command: TO_H264 }
}

pub(crate) fn picture(what: impl Into<String>) -> Fault {
    Fault::Picture(what.into())
}
