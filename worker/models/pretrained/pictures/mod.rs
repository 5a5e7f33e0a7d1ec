//! From pictures to a model's input, as families of models share it.
//!
//! ```text
//! preprocessor   the checkpoint's own settings for images
//! image          what an image is to a model, and what makes it so
//! fit            letterbox, crop: what comes before the resize
//! smart_resize   any size to multiples of a merged square of patches, cut into patches
//! resize         bicubic, as Pillow's or as PyTorch's on bytes
//! shape          sizes of patches
//! ```

mod fit;
mod image;
mod preprocessor;
mod resize;
mod shape;
mod smart_resize;

pub use coxswain_data::pictures::image_size;

pub use self::{
    fit::Fit,
    image::{ImageInput, ImageProcessor, PixelBounds, decode, decode_sized},
    resize::{KernelBits, Rgb, resize},
    shape::{ImageShape, PatchShape},
    smart_resize::{DEFAULT_MAX_PIXELS, SmartResize, smart_resize},
};
