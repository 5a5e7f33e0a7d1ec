//! Head and loss of the tokens that a decoder is to write.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{LinearOps, Tape},
    next_token::{Head, NextTokens, TokenTargets, next_tokens},
    params::GradientSums,
};

use super::model::T5;

impl<B: Tape<Base = B>> T5<B> {
    /// Predicts targets from the decoder's normed hidden states `[b * t, d]`. With `grads` there are
    /// gradients; the head itself is frozen.
    pub fn predict(
        &self,
        hidden_nd: Tensor<B, 2>,
        targets: &TokenTargets,
        grads: Option<&mut dyn GradientSums<B>>,
    ) -> NextTokens<B> {
        let head = Head { w_vd: self.head_vd.clone(), update: None, trained: None };
        let found = next_tokens(self.scaled(hidden_nd), &head, targets, grads);
        NextTokens { dhidden: found.dhidden.map(|dhidden_nd| self.scaled(dhidden_nd)), ..found }
    }

    /// Logits of all rows, `[n, vocab]`: for comparison, and for a few rows at a time.
    pub fn logits(&self, hidden_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        <B as LinearOps>::linear(self.scaled(hidden_nd), self.head_vd.clone(), None)
    }

    fn scaled(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        if self.config.scale_output { x_nd * (self.config.d_model as f64).powf(-0.5) } else { x_nd }
    }
}
