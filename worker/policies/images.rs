//! Pictures as policies see them: scaled to fit a square, black beside them, `[-1, 1]`, cut into patches.
//!
//! The filter is PyTorch's bilinear one without antialiasing (`align_corners=False`), on values in `[0,
//! 1]`; sizes are rounded down. Lengths are `[height, width]`.

use coxswain_models::pretrained::pictures::{ImageInput, ImageProcessor, ImageShape, PatchShape, Rgb};

/// A picture as channels of rows, `[3, height, width]`, in `[0, 1]`.
#[derive(Clone, Copy, Debug)]
pub struct Planes<'p> {
    /// Row by row, channel by channel.
    pub values: &'p [f32],
    /// Height and width.
    pub size: [usize; 2],
}

/// Where a picture lies in its square.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alignment {
    /// At the right and at the bottom: SmolVLA's.
    End,
    /// In the middle, of an odd rest the larger part behind it: openpi's.
    Centre,
}

/// The picture in a square of this side, `[3, side, side]` in `[-1, 1]`.
pub fn letterbox(picture: Planes<'_>, side: usize, alignment: Alignment) -> Vec<f32> {
    let [height, width] = picture.size;
    if [height, width] == [side, side] {
        return picture.values.iter().map(|value| value * 2.0 - 1.0).collect();
    }
    let ratio = (width as f64 / side as f64).max(height as f64 / side as f64);
    let fitted = |length: usize| ((length as f64 / ratio) as usize).clamp(1, side);
    let [rows, columns] = [fitted(height), fitted(width)];
    let (vertical, horizontal) = (taps(height, rows), taps(width, columns));
    let [above, left] = [rows, columns].map(|length| match alignment {
        Alignment::End => side - length,
        Alignment::Centre => (side - length) / 2,
    });
    // Black, which is -1.
    let mut out = vec![-1.0; 3 * side * side];
    for channel in 0..3 {
        let plane = &picture.values[channel * height * width..][..height * width];
        for (y, &[(upper, over), (lower, under)]) in vertical.iter().enumerate() {
            let row = (channel * side + above + y) * side + left;
            for (x, &[(first, before), (second, after)]) in horizontal.iter().enumerate() {
                let at = |y: usize, x: usize| plane[y * width + x];
                let top = before * at(upper, first) + after * at(upper, second);
                let bottom = before * at(lower, first) + after * at(lower, second);
                out[row + x] = (over * top + under * bottom) * 2.0 - 1.0;
            }
        }
    }
    out
}

/// The two places of `from` that each place of `to` lies between, and how much of each.
fn taps(from: usize, to: usize) -> Vec<[(usize, f32); 2]> {
    let scale = from as f32 / to as f32;
    let tap = |place: usize| {
        let source = ((place as f32 + 0.5) * scale - 0.5).max(0.0);
        let first = (source as usize).min(from - 1);
        let second = (first + 1).min(from - 1);
        let part = source - first as f32;
        [(first, 1.0 - part), (second, part)]
    };
    (0..to).map(tap).collect()
}

/// A square `[3, side, side]` as patches in raster order, `[patches, 3 * patch * patch]`.
pub fn patches(square: &[f32], side: usize, patch: usize) -> Vec<f32> {
    let count = side / patch;
    let mut out = Vec::with_capacity(square.len());
    for (row, column) in (0..count).flat_map(|row| (0..count).map(move |column| (row, column))) {
        for (channel, y) in (0..3).flat_map(|channel| (0..patch).map(move |y| (channel, y))) {
            let start = (channel * side + row * patch + y) * side + column * patch;
            out.extend_from_slice(&square[start..start + patch]);
        }
    }
    out
}

/// Pictures to a policy's input, as bytes and as channels of numbers.
pub trait PolicyImages: ImageProcessor {
    /// The input that a picture becomes.
    fn seen(&self, picture: Planes<'_>) -> Result<ImageInput, String>;
}

/// Pictures in a square, to patches.
#[derive(Clone, Copy, Debug)]
pub struct LetterboxImages {
    /// Whose they are.
    pub policy: &'static str,
    /// Side of the square, in pixels.
    pub side: usize,
    /// What it is cut into.
    pub patches: PatchShape,
    /// Where pictures lie in it.
    pub alignment: Alignment,
}

impl LetterboxImages {
    /// Patches of a picture.
    fn boxed(&self, picture: Planes<'_>) -> ImageInput {
        let square = letterbox(picture, self.side, self.alignment);
        ImageInput { pixel_values: patches(&square, self.side, self.patches.patch), shape: self.square() }
    }

    /// How many, along each side.
    fn square(&self) -> ImageShape {
        let count = (self.side / self.patches.patch) as u32;
        [1, count, count]
    }
}

impl PolicyImages for LetterboxImages {
    fn seen(&self, picture: Planes<'_>) -> Result<ImageInput, String> {
        Ok(self.boxed(picture))
    }
}

impl ImageProcessor for LetterboxImages {
    fn patches(&self) -> PatchShape {
        self.patches
    }

    fn pixel_bounds(&self) -> [usize; 2] {
        [self.side * self.side; 2]
    }

    fn describe(&self) -> String {
        let Self { policy, side, patches, alignment } = self;
        let black = match alignment {
            Alignment::End => "left and top",
            Alignment::Centre => "around it",
        };
        format!("{policy}: letterbox {side}x{side}, bilinear, black {black}, patches of {}", patches.patch)
    }

    fn shape(&self, height: usize, width: usize) -> Result<ImageShape, String> {
        if height * width == 0 {
            return Err(format!("an image of {height}x{width} pixels is empty"));
        }
        Ok(self.square())
    }

    fn process(&self, image: Rgb) -> Result<ImageInput, String> {
        let shape = self.shape(image.height, image.width)?;
        Ok(self.process_to(image, shape))
    }

    fn process_to(&self, image: Rgb, _shape: ImageShape) -> ImageInput {
        let pixels = image.height * image.width;
        let channel = |channel: usize| {
            image.pixels.iter().skip(channel).step_by(3).map(|byte| f32::from(*byte) / 255.0)
        };
        let values: Vec<f32> = (0..3).flat_map(channel).collect();
        debug_assert_eq!(values.len(), 3 * pixels);
        let picture = Planes { values: &values, size: [image.height, image.width] };
        self.boxed(picture)
    }

    fn picture(&self, pixel_values: &[f32], _shape: ImageShape) -> Rgb {
        let (side, patch) = (self.side, self.patches.patch);
        let mut pixels = vec![0; 3 * side * side];
        for (number, values) in pixel_values.chunks_exact(self.patches.columns()).enumerate() {
            let (row, column) = (number / (side / patch) * patch, number % (side / patch) * patch);
            for (at, value) in values.iter().enumerate() {
                let (channel, y, x) = (at / (patch * patch), row + at / patch % patch, column + at % patch);
                pixels[(y * side + x) * 3 + channel] =
                    ((value + 1.0) * 127.5).round().clamp(0.0, 255.0) as u8;
            }
        }
        Rgb { height: side, width: side, pixels }
    }
}
