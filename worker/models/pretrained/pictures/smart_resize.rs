//! From an encoded camera image to the rows that Qwen's vision tower reads, as Transformers'
//! `Qwen2VLImageProcessor` does it.
//!
//! ```text
//! png/jpeg -> RGB -> a rule by name (`fit`) -> smart_resize (multiples of patch * merge) -> bicubic
//!          -> x / 255 -> (x - mean) / std -> patches
//! rows     (grid_h / merge, grid_w / merge, merge, merge)     patches of one merged cell are neighbours
//! columns  (channel, frame, patch, patch)                     an image is its own second frame
//! ```
//!
//! An upper bound on pixels always applies: `data.max_pixels`; without it the checkpoint's own bound, but at
//! most [`DEFAULT_MAX_PIXELS`], since published checkpoints allow 12.8 M pixels, 16,384 tokens, for a single
//! image.

use std::path::Path;

use coxswain_data::DataError;

use super::{
    fit::Fit,
    image::{ImageInput, ImageProcessor, PixelBounds},
    preprocessor::Preprocessor,
    resize::{KernelBits, Rgb, resize},
    shape::{ImageShape, PatchShape},
};

/// 1,280 tokens of 28 x 28 pixels: Transformers' default for the model family. `data.max_pixels` lifts it.
pub const DEFAULT_MAX_PIXELS: usize = 1280 * 28 * 28;
/// Transformers' default: 4 tokens.
const DEFAULT_MIN_PIXELS: usize = 4 * 28 * 28;
/// Beyond this ratio of the longer side to the shorter the model family refuses an image.
const MAX_ASPECT: f64 = 200.0;

/// Resizes images to multiples of a merged square of patches, and cuts them into patches.
#[derive(Clone, Debug)]
pub struct SmartResize {
    shape: PatchShape,
    min_pixels: usize,
    max_pixels: usize,
    fit: Fit,
    /// Normalised value of every byte, by channel: 255ths, less mean, by deviation.
    table: Box<[[f32; 256]; 3]>,
}

impl SmartResize {
    /// With the settings of the checkpoint at `model`; the run's bounds win over its.
    pub fn from_checkpoint(model: &Path, shape: PatchShape, bounds: PixelBounds) -> Result<Self, DataError> {
        let own = Preprocessor::from_checkpoint(model, shape)?;
        let own_max = own.max_pixels.unwrap_or(DEFAULT_MAX_PIXELS);
        let max_pixels = bounds.max.unwrap_or(own_max.min(DEFAULT_MAX_PIXELS));
        let own_min = own.min_pixels.unwrap_or(DEFAULT_MIN_PIXELS);
        let min_pixels = bounds.min.unwrap_or(own_min.min(max_pixels));
        let cell = (shape.patch * shape.merge).pow(2);
        if max_pixels < cell || min_pixels > max_pixels {
            let found = match min_pixels > max_pixels {
                true => format!("the minimum {min_pixels} is above the maximum {max_pixels}"),
                false => format!("the maximum {max_pixels} is below {cell}, the pixels of one token"),
            };
            let remedy = "correct data.min_pixels or data.max_pixels in the run file";
            return Err(DataError::invalid(&own.path, "min_pixels, max_pixels", found, remedy));
        }
        // The order of roundings is Transformers': f64 product rounded to f32, then f32 difference and
        // quotient.
        let value = |channel: usize, byte: usize| {
            let rescaled = (byte as f64 * own.rescale_factor) as f32;
            (rescaled - own.mean[channel] as f32) / own.std[channel] as f32
        };
        let table = std::array::from_fn(|c| std::array::from_fn(|byte| value(c, byte)));
        Ok(Self { shape, min_pixels, max_pixels, fit: bounds.fit, table: Box::new(table) })
    }

    fn at(&self, grid: ImageShape, image: Rgb) -> ImageInput {
        let [_, grid_h, grid_w] = grid.map(|g| g as usize);
        let (height, width) = (grid_h * self.shape.patch, grid_w * self.shape.patch);
        let image = resize(self.fit.apply(image), height, width, KernelBits::Most);
        ImageInput { pixel_values: self.cut(&image, grid_h, grid_w), shape: grid }
    }

    fn cut(&self, image: &Rgb, grid_h: usize, grid_w: usize) -> Vec<f32> {
        let PatchShape { patch, merge, frames } = self.shape;
        let mut out = Vec::with_capacity(grid_h * grid_w * self.shape.columns());
        for cell in 0..grid_h / merge * (grid_w / merge) {
            let (cell_y, cell_x) = (cell / (grid_w / merge), cell % (grid_w / merge));
            for inner in 0..merge * merge {
                let y = (cell_y * merge + inner / merge) * patch;
                let x = (cell_x * merge + inner % merge) * patch;
                for channel in 0..3 {
                    let start = out.len();
                    for row in y..y + patch {
                        let from = (row * image.width + x) * 3;
                        let pixels = image.pixels[from..from + patch * 3].chunks_exact(3);
                        out.extend(pixels.map(|p| self.table[channel][p[channel] as usize]));
                    }
                    for _ in 1..frames {
                        out.extend_from_within(start..start + patch * patch);
                    }
                }
            }
        }
        out
    }
}

impl ImageProcessor for SmartResize {
    fn patches(&self) -> PatchShape {
        self.shape
    }

    fn pixel_bounds(&self) -> [usize; 2] {
        [self.min_pixels, self.max_pixels]
    }

    fn describe(&self) -> String {
        let PatchShape { patch, merge, frames } = self.shape;
        let values: &[[f32; 256]] = &*self.table;
        let table = blake3::hash(bytemuck::cast_slice(values));
        let before = if self.fit == Fit::SmartResize { String::new() } else { format!("{}, ", self.fit) };
        format!(
            "turned as Exif and videos say, {before}smart_resize to multiples of {}, {} to {} pixels; bicubic as Pillow's; values of table {}; patches of {patch} x {patch} x {frames}, \
             merged by {merge}",
            patch * merge,
            self.min_pixels,
            self.max_pixels,
            &table.to_hex()[..16],
        )
    }

    fn shape(&self, height: usize, width: usize) -> Result<ImageShape, String> {
        let factor = self.shape.patch * self.shape.merge;
        let (height, width) = self.fit.size(height, width);
        let (h, w) = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)?;
        Ok([1, (h / self.shape.patch) as u32, (w / self.shape.patch) as u32])
    }

    fn process(&self, image: Rgb) -> Result<ImageInput, String> {
        let shape = self.shape(image.height, image.width)?;
        Ok(self.at(shape, image))
    }

    fn process_to(&self, image: Rgb, shape: ImageShape) -> ImageInput {
        self.at(shape, image)
    }

    fn picture(&self, pixel_values: &[f32], grid: ImageShape) -> Rgb {
        let [_, grid_h, grid_w] = grid.map(|g| g as usize);
        let PatchShape { patch, merge, .. } = self.shape;
        let (height, width) = (grid_h * patch, grid_w * patch);
        let mut pixels = vec![0; height * width * 3];
        for (at, values) in pixel_values.chunks_exact(self.shape.columns()).enumerate() {
            let (cell, inner) = (at / (merge * merge), at % (merge * merge));
            let (cell_y, cell_x) = (cell / (grid_w / merge), cell % (grid_w / merge));
            let (y, x) = ((cell_y * merge + inner / merge) * patch, (cell_x * merge + inner % merge) * patch);
            for (channel, table) in self.table.iter().enumerate() {
                // An image is its own second frame, so the first is enough.
                let first = &values[channel * self.shape.frames * patch * patch..][..patch * patch];
                for (n, value) in first.iter().enumerate() {
                    // Normalised values rise with the byte.
                    let byte = table.partition_point(|of| of < value).min(255) as u8;
                    pixels[((y + n / patch) * width + x + n % patch) * 3 + channel] = byte;
                }
            }
        }
        Rgb { height, width, pixels }
    }
}

/// The size nearest to `height x width` whose sides are multiples of `factor`, within bounds of pixels,
/// keeping the aspect. Halves round to even, as Python's `round` does.
pub fn smart_resize(
    height: usize,
    width: usize,
    factor: usize,
    min_pixels: usize,
    max_pixels: usize,
) -> Result<(usize, usize), String> {
    let (h, w, f) = (height as f64, width as f64, factor as f64);
    if height == 0 || width == 0 || h.max(w) / h.min(w) > MAX_ASPECT {
        return Err(format!(
            "an image of {height}x{width} pixels is too narrow: one side may be at most 200 times as long as the other"
        ));
    }
    let nearest = |side: f64| (side / f).round_ties_even() * f;
    let (rounded_h, rounded_w) = (nearest(h), nearest(w));
    let (min, max) = (min_pixels as f64, max_pixels as f64);
    let (h, w) = if rounded_h * rounded_w > max {
        let beta = (h * w / max).sqrt();
        let fit = |side: f64| ((side / beta / f).floor() * f).max(f);
        (fit(h), fit(w))
    } else if rounded_h * rounded_w < min {
        let beta = (min / (h * w)).sqrt();
        let fit = |side: f64| (side * beta / f).ceil() * f;
        (fit(h), fit(w))
    } else {
        (rounded_h, rounded_w)
    };
    Ok((h as usize, w as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_the_published_rule() {
        let at = |h, w| smart_resize(h, w, 28, 3136, 12_845_056).unwrap();
        assert_eq!(at(480, 640), (476, 644));
        assert_eq!(at(224, 224), (224, 224));
        assert_eq!(at(256, 256), (252, 252));
        assert_eq!(at(720, 1280), (728, 1288));
        // 70 / 28 = 2.5 and 126 / 28 = 4.5 are ties: to even.
        assert_eq!(at(70, 126), (56, 112));
        assert_eq!(at(10, 10), (56, 56));
        assert_eq!(smart_resize(1000, 1000, 28, 3136, 10_000).unwrap(), (84, 84));
        // Patches of 16 pixels, with the bounds of Qwen3-VL.
        let newer = |h, w| smart_resize(h, w, 32, 65_536, 16_777_216).unwrap();
        assert_eq!((newer(480, 640), newer(224, 224)), ((480, 640), (256, 256)));
        assert_eq!((newer(100, 75), newer(720, 1280)), ((320, 224), (704, 1280)));
        assert_eq!(newer(5000, 5000), (4096, 4096));
        // One side would vanish: it stays one cell.
        assert_eq!(smart_resize(4000, 30, 28, 3136, 10_000).unwrap(), (1148, 28));
        assert!(smart_resize(28, 28 * 201, 28, 3136, 12_845_056).is_err());
        assert!(smart_resize(0, 28, 28, 3136, 12_845_056).is_err());
    }
}
