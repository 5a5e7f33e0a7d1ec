//! Frames of LeRobot videos without FFmpeg: mp4 with AV1 (rav1d) or H.264 (rusty_h264), frames by number, RGB
//! out.
//!
//! ```text
//! pool               a bounded set of decoders; a batch's wishes, group of pictures by group of pictures
//! plan   decoder     which samples to decode; one decoder of either codec, panics caught
//! index  av1  h264   a file's table of contents; the codecs
//! tables codec       sample tables and edit lists; sample descriptions, and what is refused by name
//! boxes  source      mp4's boxes; bytes by range
//! matrix             which way up the pictures are shown
//! picture  rgb       planes, and what swscale makes of them
//! ```
//!
//! A frame is addressed by its presentation number: 0, 1, 2, ... in the order FFmpeg would give the frames,
//! edit lists applied. A picture is as it is decoded: [`VideoIndex::rotation`] says which way up it is seen.
//! Times are integers of the track's time scale. What is *not* done: sound, fragmented mp4, HEVC, VP9, depth,
//! more than 8 bits, interlaced video; each is refused by name with the command that converts it.
//!
//! Files are not trusted: sizes are bounded before memory is spent ([`limits`]), what is damaged is an error
//! of the frames that need it, and so is a panic of a decoder. Since rav1d's functions are `extern "C"`,
//! which do not unwind, each of its decoders has a thread of its own, which a panic stops for good.
//!
//! mp4 is parsed here because no crate does what is needed: `re_mp4` panics on files without chunk tables and
//! builds 56 bytes for each of up to four thousand million samples that twelve bytes can claim; `mp4parse`
//! gives no sample table without an unstable feature and no name for codecs it does not know.

mod av1;
mod boxes;
mod codec;
mod decoder;
mod error;
mod h264;
mod index;
pub mod limits;
mod matrix;
mod picture;
mod plan;
mod pool;
mod rgb;
mod source;
mod tables;

pub use codec::Codec;
pub use error::{Fault, LFS_POINTER, VideoError};
pub use index::{Moov, Video, VideoIndex};
pub use matrix::Rotation;
pub use picture::{Colour, Layout, Picture, Plane};
pub use pool::{Counts, DecoderPool};
pub use source::{FileSource, Source};
pub use tables::Sample;

/// Whether AV1 is decoded by dav1d's assembly (feature `video-asm`): the same pixels, several times sooner.
pub const ASSEMBLY: bool = cfg!(feature = "video-asm");
