//! One change of an image, with the parameters that were drawn for it.

use super::{
    colour,
    geometry::{self, Motion, Part},
    picture::Picture,
};

/// See [`Transforms`](crate::vla_flow::config::Transforms) for what each does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Change {
    Brightness(f64),
    Contrast(f64),
    Saturation(f64),
    Hue(f64),
    Sharpness(f64),
    Affine(Motion),
    /// Whatever was drawn to crop comes to a part.
    Crop(Part),
}

impl Change {
    pub(super) fn apply(self, picture: &mut Picture) {
        match self {
            Self::Brightness(factor) => colour::brightness(picture, factor),
            Self::Contrast(factor) => colour::contrast(picture, factor),
            Self::Saturation(factor) => colour::saturation(picture, factor),
            Self::Hue(factor) => colour::hue(picture, factor),
            Self::Sharpness(factor) => colour::sharpness(picture, factor),
            Self::Affine(motion) => geometry::affine(picture, motion),
            Self::Crop(part) => geometry::resized_crop(picture, part),
        }
    }
}
