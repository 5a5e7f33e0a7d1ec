//! A model on a device that lends its layers.

use burn::tensor::Tensor;
use coxswain_nn::{kernels::Tape, params::Trainables};

use super::{outline::JointOutline, stream::StreamLayer};

/// A model whose parts a policy runs. Embeddings and images are read without a tape: what makes them does
/// not train.
pub trait JointModel<B: Tape<Base = B>> {
    /// What its configuration says.
    fn outline(&self) -> &JointOutline;

    /// Features of images, `[images * tokens, d]`, from `[images * patches, channels * side * side]`,
    /// patches in raster order.
    fn image_features(&self, trainables: &Trainables<B>, patches_pi: Tensor<B, 2>) -> Tensor<B, 2>;

    /// Rows of the table of token embeddings, `[n, d]`. Ids lie in the vocabulary.
    fn token_embeddings(&self, trainables: &Trainables<B>, ids: &[u32]) -> Tensor<B, 2>;

    /// Its decoder layers, first to last.
    fn layers(&self) -> &[StreamLayer<B>];
}
