//! What is done to an image before `smart_resize`, by name.
//!
//! | | |
//! |---|---|
//! | `smart_resize` | nothing |
//! | `letterbox 224` | scaled to fit a square of 224 pixels, black around it, as openpi's `resize_with_pad` |
//! | `crop 2/3` | the middle: so much of each side |

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use super::resize::{KernelBits, Rgb, resize};

/// What is done to an image before `smart_resize`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fit {
    /// Nothing.
    #[default]
    SmartResize,
    /// Scaled to fit a square of this side, black around it.
    Letterbox(u32),
    /// The middle of the image.
    Crop {
        /// So many parts of each side.
        parts: u32,
        /// How many parts a side has.
        of: u32,
    },
}

impl Fit {
    /// Height and width of what comes of an image.
    pub fn size(self, height: usize, width: usize) -> (usize, usize) {
        match self {
            Self::SmartResize => (height, width),
            Self::Letterbox(side) => (side as usize, side as usize),
            Self::Crop { parts, of } => {
                let part = |side: usize| (side * parts as usize / of as usize).max(side.min(1));
                (part(height), part(width))
            }
        }
    }

    /// The image that is resized for the model.
    pub(super) fn apply(self, image: Rgb) -> Rgb {
        let (height, width) = self.size(image.height, image.width);
        match self {
            _ if image.pixels.is_empty() => image,
            Self::SmartResize => image,
            Self::Letterbox(_) => letterbox(image, height),
            Self::Crop { .. } => {
                let (top, left) = ((image.height - height) / 2, (image.width - width) / 2);
                let mut whole = Rgb { height, width, pixels: Vec::with_capacity(height * width * 3) };
                for row in image.pixels.chunks_exact(image.width * 3).skip(top).take(height) {
                    whole.pixels.extend_from_slice(&row[left * 3..(left + width) * 3]);
                }
                whole
            }
        }
    }
}

fn letterbox(image: Rgb, side: usize) -> Rgb {
    // The order of roundings is openpi's.
    let ratio = (image.width as f64 / side as f64).max(image.height as f64 / side as f64);
    let fitted = |length: usize| ((length as f64 / ratio) as usize).clamp(1, side);
    let image = {
        let (height, width) = (fitted(image.height), fitted(image.width));
        resize(image, height, width, KernelBits::Most)
    };
    let (top, left) = ((side - image.height) / 2, (side - image.width) / 2);
    let mut pixels = vec![0; side * side * 3];
    let rows = pixels.chunks_exact_mut(side * 3).skip(top);
    for (to, from) in rows.zip(image.pixels.chunks_exact(image.width * 3)) {
        to[left * 3..(left + image.width) * 3].copy_from_slice(from);
    }
    Rgb { height: side, width: side, pixels }
}

impl fmt::Display for Fit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SmartResize => f.write_str("smart_resize"),
            Self::Letterbox(side) => write!(f, "letterbox {side}"),
            Self::Crop { parts, of } => write!(f, "crop {parts}/{of}"),
        }
    }
}

impl FromStr for Fit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<u32>().ok().filter(|number| (1..=1 << 14).contains(number));
        let known = match text.split_once(' ') {
            None if text == "smart_resize" => Some(Self::SmartResize),
            Some(("letterbox", side)) => number(side).map(Self::Letterbox),
            Some(("crop", part)) => part.split_once('/').and_then(|(parts, of)| {
                let (parts, of) = (number(parts)?, number(of)?);
                (parts <= of).then_some(Self::Crop { parts, of })
            }),
            _ => None,
        };
        known.ok_or_else(|| {
            format!("`{text}` is not `smart_resize`, `letterbox 224` (a side in pixels) or `crop 2/3` (the fraction of each side to keep)")
        })
    }
}

impl Serialize for Fit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Fit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Who asks for the names of keys has no value for them.
        let has_value = deserializer.is_human_readable();
        let text = String::deserialize(deserializer)?;
        if has_value { text.parse().map_err(D::Error::custom) } else { Ok(Self::default()) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbered(height: usize, width: usize) -> Rgb {
        Rgb { height, width, pixels: (0..height * width * 3).map(|at| (at % 251) as u8).collect() }
    }

    #[test]
    fn names_are_read_as_they_are_written_and_others_refused() {
        for name in ["smart_resize", "letterbox 224", "crop 2/3"] {
            assert_eq!(name.parse::<Fit>().unwrap().to_string(), name);
        }
        for name in ["", "letterbox", "letterbox 0", "crop 3/2", "crop 1/0", "pad 3", "letterbox 99999"] {
            assert!(name.parse::<Fit>().unwrap_err().contains("`crop 2/3`"), "{name}");
        }
    }

    #[test]
    fn a_letterbox_has_the_image_in_its_middle_and_black_around() {
        let image = Rgb { height: 30, width: 40, pixels: vec![200; 30 * 40 * 3] };
        let boxed = Fit::Letterbox(20).apply(image);
        let rows = boxed.pixels.chunks_exact(60).map(|row| row.to_vec()).collect::<Vec<_>>();
        // 15 of 20 rows, from the second on: half of the five that are left, rounded down.
        for (at, row) in rows.iter().enumerate() {
            let shade = if (2..17).contains(&at) { 200 } else { 0 };
            assert!(row.iter().all(|value| *value == shade), "row {at}");
        }
        assert_eq!(Fit::Letterbox(20).size(30, 40), (20, 20));
    }

    proptest! {
        #[test]
        fn what_comes_out_has_the_size_that_is_told(
            height in 1usize..50, width in 1usize..50, side in 1u32..60, (parts, of) in (1u32..9, 9u32..12),
        ) {
            for fit in [Fit::SmartResize, Fit::Letterbox(side), Fit::Crop { parts, of }] {
                let out = fit.apply(numbered(height, width));
                prop_assert_eq!((out.height, out.width), fit.size(height, width), "{}", fit);
                prop_assert_eq!(out.pixels.len(), 3 * out.height * out.width);
            }
        }

        #[test]
        fn a_crop_is_the_middle_of_the_image(height in 3usize..30, width in 3usize..30) {
            let image = numbered(height, width);
            let out = Fit::Crop { parts: 1, of: 3 }.apply(image.clone());
            let (top, left) = ((height - out.height) / 2, (width - out.width) / 2);
            for y in 0..out.height {
                let from = ((top + y) * width + left) * 3;
                let (got, want) = (&out.pixels[y * out.width * 3..][..out.width * 3], &image.pixels[from..]);
                prop_assert_eq!(got, &want[..out.width * 3]);
            }
        }
    }
}
