//! Matrices piece by piece: how large a piece is, and its largest value.

/// Values that a thread reads and quantizes at a time: a multiple of every block.
pub(super) const PIECE: usize = 1 << 16;

/// The largest magnitude; not finite if any value is not.
#[inline(always)]
pub(super) fn absmax(values: &[f32]) -> f32 {
    // As integers magnitudes have the order that they have as numbers, with infinity and NaN above them.
    let magnitude = |value: &f32| value.to_bits() & 0x7fff_ffff;
    f32::from_bits(values.iter().map(magnitude).max().unwrap_or(0))
}
