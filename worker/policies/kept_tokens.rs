//! What of samples is kept, so that later steps need not compute it.

use coxswain_models::joint::JointOutline;

/// What of a sample may be kept, as long as nothing trains that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptTokens {
    /// Features of the tokens of images: of each image so many.
    Images(usize),
    /// Hidden states of the whole prompt.
    Prompt,
    /// Keys and values of the whole prompt, in every layer.
    KeysValues,
}

impl KeptTokens {
    /// Values of a token.
    pub fn width(self, vlm: &JointOutline) -> usize {
        match self {
            Self::Images(_) | Self::Prompt => vlm.layer.width,
            Self::KeysValues => 2 * vlm.layers * vlm.layer.kv_width(),
        }
    }
}

/// What was kept of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct KeptFeatures<'b> {
    /// The tokens, and what of them.
    pub of: KeptTokens,
    /// `[tokens, width]`.
    pub values: &'b [f32],
}
