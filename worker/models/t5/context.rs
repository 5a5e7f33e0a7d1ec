//! What a micro-batch is to the blocks.

use burn::tensor::Tensor;
use coxswain_nn::kernels::ModelBackend;

/// What all blocks share within one micro-batch. Added to scores: `[1, heads, s, s]`, `[1, heads, t, t]`,
/// `[b, 1, 1, s]`.
pub struct T5Context<B: ModelBackend> {
    /// Rows.
    pub batch: usize,
    /// By relative positions of a source.
    pub encoder_bias: Tensor<B, 4>,
    /// By those of a target, and against what lies ahead.
    pub decoder_bias: Tensor<B, 4>,
    /// Against padding of a source; none where nothing is padded.
    pub padding: Option<Tensor<B, 4>>,
}
