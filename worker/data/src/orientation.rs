//! Which way up a picture is: Exif's `Orientation` of a JPEG or PNG, and pixels by it.
//!
//! Cameras store what they saw and note how they were held. Pillow's `exif_transpose`, which
//! Transformers and Hugging Face's data sets apply to every picture, turns it as noted; so is it done here.
//!
//! | | stored picture |
//! |---|---|
//! | 1, or none | upright |
//! | 2, 4 | flipped: left and right, top and bottom |
//! | 3 | upside down |
//! | 5, 7 | flipped along a diagonal: the main one, the other one |
//! | 6, 8 | on its side: a quarter turn to the right is missing, or one to the left |

use crate::pixels::Pixels;

/// The tag of Exif that has it.
const TAG: u16 = 0x0112;

/// How a picture is turned before it is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orientation(u8);

impl Orientation {
    /// As it is stored.
    pub const UPRIGHT: Self = Self(1);
    /// By half a turn.
    pub const HALF: Self = Self(3);
    /// By a quarter turn to the right.
    pub const RIGHT: Self = Self(6);
    /// By a quarter turn to the left.
    pub const LEFT: Self = Self(8);

    /// What these bytes of Exif say: a TIFF header and its first directory. Upright if they say nothing.
    pub fn of_exif(exif: &[u8]) -> Self {
        Self::from_tiff(exif.strip_prefix(b"Exif\0\0").unwrap_or(exif)).unwrap_or(Self::UPRIGHT)
    }

    fn from_tiff(tiff: &[u8]) -> Option<Self> {
        let is_big = match tiff.get(..4)? {
            b"MM\0*" => true,
            b"II*\0" => false,
            _ => return None,
        };
        let number = |at: usize, bytes: usize| -> Option<usize> {
            let bytes = tiff.get(at..at.checked_add(bytes)?)?;
            let join = |sum: usize, byte: &u8| sum << 8 | usize::from(*byte);
            Some(if is_big { bytes.iter().fold(0, join) } else { bytes.iter().rev().fold(0, join) })
        };
        let directory = number(4, 4)?;
        let entry = |at: usize| directory + 2 + 12 * at;
        let is_it = |at: &usize| number(entry(*at), 2) == Some(usize::from(TAG));
        let found = entry((0..number(directory, 2)?).find(is_it)?);
        // Bytes, shorts and longs: Pillow takes all of them.
        let bytes = [(1, 1), (3, 2), (4, 4)].iter().find(|(kind, _)| number(found + 2, 2) == Some(*kind))?.1;
        let value = number(found + 8, bytes)?;
        (1..=8).contains(&value).then_some(Self(value as u8))
    }

    /// Height and width of what is seen, of a stored picture's.
    pub fn size(self, height: usize, width: usize) -> (usize, usize) {
        if self.0 >= 5 { (width, height) } else { (height, width) }
    }

    /// The picture as it is seen.
    pub fn apply(self, stored: Pixels) -> Pixels {
        if self == Self::UPRIGHT {
            return stored;
        }
        let (high, wide) = (stored.height, stored.width);
        let (height, width) = self.size(high, wide);
        let mut rgb = Vec::with_capacity(stored.rgb.len());
        for y in 0..height {
            for x in 0..width {
                let (row, column) = match self.0 {
                    2 => (y, wide - 1 - x),
                    3 => (high - 1 - y, wide - 1 - x),
                    4 => (high - 1 - y, x),
                    5 => (x, y),
                    6 => (high - 1 - x, y),
                    7 => (high - 1 - x, wide - 1 - y),
                    _ => (x, wide - 1 - y),
                };
                rgb.extend_from_slice(&stored.rgb[3 * (row * wide + column)..][..3]);
            }
        }
        Pixels { height, width, rgb }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_are_rotated_as_pillow_rotates_them() {
        // ABC over DEF, and what `ImageOps.exif_transpose` makes of it, rows after one another.
        let rotated =
            ["ABC DEF", "CBA FED", "FED CBA", "DEF ABC", "AD BE CF", "DA EB FC", "FC EB DA", "CF BE AD"];
        for (orientation, wanted) in (1..).map(Orientation).zip(rotated) {
            let rgb = b"ABCDEF".iter().flat_map(|letter| [*letter; 3]).collect();
            let Pixels { height, width, rgb } = orientation.apply(Pixels { height: 2, width: 3, rgb });
            let seen: Vec<u8> = rgb.iter().step_by(3).copied().collect();
            let rows: Vec<_> = seen.chunks(width).map(String::from_utf8_lossy).collect();
            assert_eq!((rows.join(" ").as_str(), height), (wanted, wanted.split(' ').count()));
            assert_eq!(orientation.size(2, 3), (height, width));
        }
    }

    #[test]
    fn the_tag_is_found_in_either_byte_order_and_anything_else_is_upright() {
        let big = b"MM\0*\0\0\0\x08\0\x02\x01\x10\0\x02\0\0\0\x01\0\0\0\0\x01\x12\0\x03\0\0\0\x01\0\x06\0\0";
        let little = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x03\0\0\0";
        assert_eq!(Orientation::of_exif(big), Orientation::RIGHT);
        assert_eq!(Orientation::of_exif(little), Orientation::HALF);
        for end in 0..big.len() - 2 {
            assert_eq!(Orientation::of_exif(&big[..end]), Orientation::UPRIGHT, "of {end} bytes");
        }
        let mut beyond = *big;
        beyond[4..8].fill(0xff);
        assert_eq!(Orientation::of_exif(&beyond), Orientation::UPRIGHT);
    }
}
