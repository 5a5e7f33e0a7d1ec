//! A model on a device that lends its layers.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::Tape,
    lora::LoraLinear,
    params::{ParamId, Trainables},
};

use super::{outline::JointOutline, stream::StreamLayer};

/// A model whose parts a policy runs. Its vision tower does not train; what of the rest does is the policy's
/// to run on a tape.
pub trait JointModel<B: Tape<Base = B>> {
    /// What its configuration says.
    fn outline(&self) -> &JointOutline;

    /// What the tower makes of images, `[images * tokens, values]`, from `[images * patches, channels * side
    /// * side]`, patches in raster order.
    fn tower(&self, trainables: &Trainables<B>, patches_pi: Tensor<B, 2>) -> Tensor<B, 2>;

    /// What makes features of the model's width of that.
    fn connector(&self) -> &LoraLinear<B>;

    /// Rows of the table of token embeddings, `[n, d]`. Ids lie in the vocabulary.
    fn token_embeddings(&self, trainables: &Trainables<B>, ids: &[u32]) -> Tensor<B, 2>;

    /// The parameter that the table is, if it trains.
    fn trained_table(&self) -> Option<ParamId>;

    /// Decoder layers, first to last.
    fn layers(&self) -> &[StreamLayer<B>];
}
