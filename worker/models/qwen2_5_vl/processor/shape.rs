//! What the vision tower's sizes say of its input.

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

    /// Tokens that an image of this grid becomes.
    pub fn tokens(&self, grid: [u32; 3]) -> usize {
        grid.iter().map(|g| *g as usize).product::<usize>() / (self.merge * self.merge)
    }
}
