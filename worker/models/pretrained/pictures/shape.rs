//! What the vision tower's sizes say of its input.

/// How an image lies in a model's input, in three numbers that its family understands: of patches, how many
/// there are along time, height and width.
pub type ImageShape = [u32; 3];

/// Sizes of the vision tower that shape its input, from `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchShape {
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Patches merged into one token along each side.
    pub merge: usize,
    /// Frames in one patch.
    pub frames: usize,
}

impl PatchShape {
    /// Values of one patch: channels, frames and pixels.
    pub fn columns(&self) -> usize {
        3 * self.frames * self.patch * self.patch
    }

    /// Patches of an image of this shape.
    pub fn count(&self, image: ImageShape) -> usize {
        image.iter().map(|side| *side as usize).product()
    }

    /// Values of an image of this shape.
    pub fn values(&self, image: ImageShape) -> usize {
        self.count(image) * self.columns()
    }

    /// Tokens that an image of this shape becomes.
    pub fn tokens(&self, image: ImageShape) -> usize {
        self.count(image) / (self.merge * self.merge)
    }
}
