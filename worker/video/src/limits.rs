//! What a file may claim before memory is spent on it. Every bound is far above what LeRobot data sets hold.

/// Pixels of one frame: 4096 x 2176, the largest level that cameras of robots could reach. A decoder keeps up
/// to sixteen such frames.
pub const MAX_PIXELS: u64 = 4096 * 2176;

/// Bytes of the `moov` box. Half a million frames need about 8 MiB.
pub const MAX_MOOV_BYTES: u64 = 64 << 20;

/// Samples of a track: 11 hours at 50 frames a second. One entry of a table may stand for all of them, and an
/// index takes some tens of bytes for each.
pub const MAX_SAMPLES: usize = 2 << 20;

/// Boxes beside `moov` at the top of a file. Muxers write four to six.
pub const MAX_TOP_BOXES: usize = 4096;

/// Bytes of one sample (a coded picture): an intra picture of the largest frame without any compression.
pub const MAX_SAMPLE_BYTES: u32 = 32 << 20;

/// Bytes read at once when neighbouring samples are wanted together.
pub const MAX_READ_BYTES: u64 = 8 << 20;

/// Coded pictures or slices in one sample. AV1 hides at most seven frames behind a shown one, H.264 encoders
/// write a slice for each row of macroblocks at most.
pub const MAX_UNITS_IN_SAMPLE: usize = 512;

/// AV1 decoders that may panic before no further one is opened in this process: each leaves behind a thread
/// that sleeps and what it had allocated, some ten frames.
pub const MAX_GIVEN_UP: usize = 16;

/// Reference pictures an H.264 stream may keep, and entries a reference list may have (H.264 Annex A and
/// 7.4.3).
pub const MAX_REFERENCES: u32 = 16;
/// See [`MAX_REFERENCES`]; fields of interlaced streams double it.
pub const MAX_LIST_ENTRIES: u32 = 32;

const _: () = assert!(MAX_READ_BYTES < MAX_MOOV_BYTES && MAX_SAMPLE_BYTES as u64 <= MAX_MOOV_BYTES);
