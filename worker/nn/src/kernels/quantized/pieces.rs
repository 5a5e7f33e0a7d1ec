//! How much of a matrix is quantized at a time.

/// Values that a thread reads and quantizes at a time: a multiple of every block.
pub(super) const PIECE: usize = 1 << 16;
