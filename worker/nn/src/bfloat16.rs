//! bfloat16: the upper half of a float32. Rounding without a branch, so that loops over it are vectorised.

use half::bf16;

/// To the nearest, ties to even; NaN stays NaN, and what is too large becomes infinite.
#[inline(always)]
pub fn narrow(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    // A NaN whose payload lies in the lower half alone would round to infinity.
    let kept = if x.is_nan() { bits | 0x0040_0000 } else { rounded };
    bf16::from_bits((kept >> 16) as u16)
}

/// Exact.
#[inline(always)]
pub fn widen(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bfloat16_survives_and_every_border_is_rounded_as_half_does() {
        for bits in 0..=u16::MAX {
            let value = bf16::from_bits(bits);
            if !value.is_nan() {
                assert_eq!(narrow(widen(value)).to_bits(), bits);
            }
            for low in [0x0000_0001u32, 0x0000_7fff, 0x0000_8000, 0x0000_8001, 0x0000_ffff] {
                let between = f32::from_bits(u32::from(bits) << 16 | low);
                assert_eq!(narrow(between).to_bits(), bf16::from_f32(between).to_bits(), "{between:e}");
            }
        }
    }
}
