//! A family of models that lend their layers.

use std::path::Path;

use coxswain_nn::kernels::Tape;

use super::{model::JointModel, stream::StreamShape};
use crate::pretrained::{error::ModelError, family::Named, loader::Loader, pictures::PatchShape};

/// Where a model lies in a policy's file: what its names begin with, and how many of its decoder layers are
/// there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Within<'w> {
    /// Before the names that Transformers gives its tensors, dot included.
    pub prefix: &'w str,
    /// The first so many; all if none.
    pub layers: Option<usize>,
}

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

/// A family of models that lend their layers, as far as no device is needed.
pub trait JointFamily: Named {
    /// What `config.json` of the model's own directory says, of a model that lies within a policy's file.
    fn outline(&self, dir: &Path, within: Within<'_>) -> Result<JointOutline, ModelError>;
}

/// The family on one kind of device.
pub trait JointFamilyOn<B: Tape<Base = B>>: JointFamily {
    /// Reads a model. `dir` is the model's own directory, for `config.json` alone: weights come from
    /// `loader`.
    fn load(
        &self,
        dir: &Path,
        within: Within<'_>,
        loader: &mut Loader<'_, B>,
    ) -> Result<Box<dyn JointModel<B>>, ModelError>;
}
