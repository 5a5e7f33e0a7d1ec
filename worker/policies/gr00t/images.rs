//! Pictures as such a policy sees them: to a square, its middle, and that to the square again, bicubic as
//! torchvision does it on bytes; then as the backbone's own processor has them.

use std::path::Path;

use coxswain_data::DataError;
use coxswain_models::pretrained::pictures::{
    ImageInput, ImageProcessor, ImageShape, KernelBits, PatchShape, PixelBounds, Rgb, SmartResize, resize,
};

use crate::images::{Planes, PolicyImages};

/// Sides in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ImageGeometry {
    /// Side of the square.
    pub target: usize,
    /// Side of its middle, which is kept.
    pub crop: usize,
}

impl ImageGeometry {
    fn apply(self, image: Rgb) -> Rgb {
        let Self { target, crop } = self;
        let square = resize(image, target, target, KernelBits::Fewest);
        if crop >= target {
            return square;
        }
        let first = (target - crop) / 2;
        let rows = (first..first + crop).flat_map(|row| {
            let start = (row * target + first) * 3;
            square.pixels[start..start + crop * 3].iter().copied()
        });
        let middle = Rgb { height: crop, width: crop, pixels: rows.collect() };
        resize(middle, target, target, KernelBits::Fewest)
    }
}

/// Pictures to the backbone's input.
pub(super) struct Gr00tImages {
    geometry: ImageGeometry,
    backbone: SmartResize,
}

impl Gr00tImages {
    /// With the settings of the processor in `backbone`.
    pub fn from_backbone(
        backbone: &Path,
        geometry: ImageGeometry,
        patches: PatchShape,
    ) -> Result<Self, DataError> {
        let processor = SmartResize::from_checkpoint(backbone, patches, PixelBounds::default())?;
        let side = (geometry.target / patches.patch) as u32;
        match processor.shape(geometry.target, geometry.target).unwrap_or_default() {
            [1, height, width] if [height, width] == [side, side] => {
                Ok(Self { geometry, backbone: processor })
            }
            found => Err(DataError::invalid(
                &backbone.join("preprocessor_config.json"),
                "size",
                format!("a {0}x{0} image gives {found:?} patches, not [1, {side}, {side}]", geometry.target),
                "use the processor of the model that the policy was made from",
            )),
        }
    }
}

impl PolicyImages for Gr00tImages {
    fn seen(&self, picture: Planes<'_>) -> Result<ImageInput, String> {
        let [height, width] = picture.size;
        let plane = height * width;
        let byte = |at: usize| (picture.values[at % 3 * plane + at / 3].clamp(0.0, 1.0) * 255.0) as u8;
        self.process(Rgb { height, width, pixels: (0..3 * plane).map(byte).collect() })
    }
}

impl ImageProcessor for Gr00tImages {
    fn patches(&self) -> PatchShape {
        self.backbone.patches()
    }

    fn pixel_bounds(&self) -> [usize; 2] {
        [self.geometry.target * self.geometry.target; 2]
    }

    fn describe(&self) -> String {
        let ImageGeometry { target, crop } = self.geometry;
        let own = self.backbone.describe();
        format!(
            "GR00T: {target}x{target}, its middle {crop}x{crop}, bicubic as torchvision's on bytes; {own}"
        )
    }

    fn shape(&self, height: usize, width: usize) -> Result<ImageShape, String> {
        if height * width == 0 {
            return Err(format!("an image of {height}x{width} pixels is empty"));
        }
        self.backbone.shape(self.geometry.target, self.geometry.target)
    }

    fn process(&self, image: Rgb) -> Result<ImageInput, String> {
        let shape = self.shape(image.height, image.width)?;
        Ok(self.process_to(image, shape))
    }

    fn process_to(&self, image: Rgb, shape: ImageShape) -> ImageInput {
        self.backbone.process_to(self.geometry.apply(image), shape)
    }

    fn picture(&self, pixel_values: &[f32], shape: ImageShape) -> Rgb {
        self.backbone.picture(pixel_values, shape)
    }
}
