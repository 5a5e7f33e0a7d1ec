//! A micro-batch as the model sees it.

use std::ops::Range;

/// What the model reads of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Prompts<'b> {
    /// `[b, s]` row-major.
    pub input_ids: &'b [u32],
    /// Valid tokens of each row; `b` ranges within `0..s`.
    pub valid: &'b [Range<u32>],
    /// `(t, h, w)` in patches, one per image, in order of rows, then of prompts.
    pub image_grids: &'b [[u32; 3]],
    /// `[patches, patch values]` of all images, in that order.
    pub pixel_values: &'b [f32],
}
