//! Head and loss of the tokens that a decoder is to write.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{LinearOps, Tape},
    next_token::{Head, NextTokens, TokenTargets, next_tokens},
    params::{GradientSums, ParamScope, Trainables},
};

use super::model::T5;

impl<B: Tape<Base = B>> T5<B> {
    /// Predicts targets from the decoder's normed hidden states `[b * t, d]`. With `grads` there are
    /// gradients, and that of the head, if it trains, is added to them.
    pub fn predict(
        &self,
        trainables: &Trainables<B>,
        hidden_nd: Tensor<B, 2>,
        targets: &TokenTargets,
        grads: Option<&mut dyn GradientSums<B>>,
    ) -> NextTokens<B> {
        let w_vd = self.head_vd.on_tape(&ParamScope::<B>::frozen(trainables));
        let trained = self.head_vd.trained().map(|id| trainables.layout().get(id).clone());
        let head = Head { w_vd, update: None, trained };
        let found = next_tokens(self.scaled(hidden_nd), &head, targets, grads);
        NextTokens { dhidden: found.dhidden.map(|dhidden_nd| self.scaled(dhidden_nd)), ..found }
    }

    /// Logits of all rows, `[n, vocab]`: for comparison, and for a few rows at a time.
    pub fn logits(&self, trainables: &Trainables<B>, hidden_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        let w_vd = self.head_vd.on_tape(&ParamScope::<B>::frozen(trainables));
        <B as LinearOps>::linear(self.scaled(hidden_nd), w_vd, None)
    }

    fn scaled(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        if self.config.scale_output { x_nd * (self.config.d_model as f64).powf(-0.5) } else { x_nd }
    }
}
