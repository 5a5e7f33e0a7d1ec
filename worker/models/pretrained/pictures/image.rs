//! What an image is to a model, and what makes it so.

use coxswain_data::{pictures, pixels::Pixels};

use super::{
    fit::Fit,
    resize::Rgb,
    shape::{ImageShape, PatchShape},
};

/// An image as a model reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageInput {
    /// `[patches, values of a patch]`, row-major.
    pub pixel_values: Vec<f32>,
    /// How it lies in the model's input.
    pub shape: ImageShape,
}

/// What the run says of the size of images, where it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PixelBounds {
    /// `data.min_pixels`.
    pub min: Option<usize>,
    /// `data.max_pixels`.
    pub max: Option<usize>,
    /// `data.resize`.
    pub fit: Fit,
}

/// Turns images into a model's input. Errors say what is wrong with the image.
pub trait ImageProcessor: Send + Sync {
    /// Sizes of its patches.
    fn patches(&self) -> PatchShape;

    /// Fewest and most pixels of an image after resizing.
    fn pixel_bounds(&self) -> [usize; 2];

    /// Everything that decides what an image becomes, in words; a change of any of it changes the text.
    fn describe(&self) -> String;

    /// The shape of what an image of so many pixels becomes.
    fn shape(&self, height: usize, width: usize) -> Result<ImageShape, String>;

    /// An image of any size.
    fn process(&self, image: Rgb) -> Result<ImageInput, String>;

    /// An image that is resized to this shape, whatever its aspect.
    fn process_to(&self, image: Rgb, shape: ImageShape) -> ImageInput;

    /// The picture that an input shows: the inverse of what was done to it after resizing.
    fn picture(&self, pixel_values: &[f32], shape: ImageShape) -> Rgb;
}

/// PNG or JPEG as pixels.
pub fn decode(encoded: &[u8]) -> Result<Rgb, String> {
    let Pixels { height, width, rgb } = pictures::decode(encoded)?;
    Ok(Rgb { height, width, pixels: rgb })
}

/// One image. `expected` is its size (height, width) according to the data set: what its header says is
/// compared before its pixels take memory.
pub fn decode_sized(encoded: &[u8], expected: (usize, usize)) -> Result<Rgb, String> {
    let fits = |(height, width): (usize, usize)| match (height, width) == expected {
        true => Ok(()),
        false => Err(format!(
            "the image is {height}x{width} (height x width), but info.json says {}x{}; correct the feature's shape in info.json, or export the data set again",
            expected.0, expected.1
        )),
    };
    pictures::image_size(encoded).map_or(Ok(()), fits)?;
    let image = decode(encoded)?;
    fits((image.height, image.width)).map(|()| image)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn an_image_of_another_size_is_refused_before_it_is_decoded() {
        let pictures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets/pictures/shapes");
        let file = fs::read_dir(pictures).unwrap().next().unwrap().unwrap().path();
        let whole = fs::read(file).unwrap();
        let size = pictures::image_size(&whole).unwrap();
        decode_sized(&whole, size).unwrap();
        let cut = &whole[..whole.len() - 40];
        assert!(decode_sized(cut, size).unwrap_err().contains("does not decode"));
        assert!(decode_sized(cut, (size.0 + 1, size.1)).unwrap_err().contains("info.json says"));
    }
}
