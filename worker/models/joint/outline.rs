//! What a policy knows of a model that lends its layers before any weight is read.

use coxswain_nn::lora::Module;

use super::stream::StreamShape;
use crate::pretrained::pictures::PatchShape;

/// A tensor that a policy's file has of a model: its full name and its shape.
pub type NamedShape = (String, Vec<usize>);

/// What a policy needs to know of a model before any weight is read.
#[derive(Clone, Debug, PartialEq)]
pub struct JointOutline {
    /// Sizes of a decoder layer.
    pub layer: StreamShape,
    /// Decoder layers that are there.
    pub layers: usize,
    /// Rows of the table of token embeddings.
    pub vocab_size: usize,
    /// The id that stands for a token of an image.
    pub image_token: u32,
    /// Side of the square that images are, in pixels.
    pub image_side: usize,
    /// What they are cut into.
    pub patches: PatchShape,
    /// Every tensor that Transformers' class has, in its order, the LM head included.
    pub tensors: Vec<NamedShape>,
    /// Modules of a model that a policy runs as a whole; none of one that lends its layers.
    pub modules: Vec<Module>,
}

impl JointOutline {
    /// Tokens of an image.
    pub fn image_tokens(&self) -> usize {
        let side = (self.image_side / self.patches.patch) as u32;
        self.patches.tokens([1, side, side])
    }

    /// Parameters of the whole model.
    pub fn parameters(&self) -> usize {
        self.tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }
}
