//! An image while it is changed: values from 0 to 1, as LeRobot hands images to torchvision.

use coxswain_models::pretrained::pictures::Rgb;

/// An RGB image of floats.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Picture {
    pub(super) height: usize,
    pub(super) width: usize,
    /// `[height, width]` of red, green, blue.
    pub(super) pixels: Vec<[f32; 3]>,
}

impl Picture {
    pub(super) fn from_image(image: &Rgb) -> Self {
        let pixels = image.pixels.chunks_exact(3).map(|p| [p[0], p[1], p[2]].map(|v| f32::from(v) / 255.0));
        Self { height: image.height, width: image.width, pixels: pixels.collect() }
    }

    /// In bytes again, rounded once, after the last change.
    pub(super) fn into_rgb(self) -> Rgb {
        // A cast saturates; values are within 0 and 1 anyway.
        let bytes = self.pixels.iter().flatten().map(|value| (value * 255.0).round_ties_even() as u8);
        Rgb { height: self.height, width: self.width, pixels: bytes.collect() }
    }

    pub(super) fn row(&self, y: usize) -> &[[f32; 3]] {
        &self.pixels[y * self.width..][..self.width]
    }
}
