//! Head and loss of the tokens that a decoder is to write.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{LinearOps, Tape},
    next_token::{Head, NextTokens, next_tokens},
    params::GradientSums,
};

use super::model::T5;

/// Tokens that are predicted: from which row of the flattened targets, and what is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelRows {
    /// Rows of `[b * t]`, ascending.
    pub rows: Vec<u32>,
    /// The token to write at each.
    pub ids: Vec<u32>,
}

impl LabelRows {
    /// Of labels `[b, t]`; none is a place where nothing is predicted.
    pub fn of(labels: impl IntoIterator<Item = Option<u32>>) -> Self {
        let labelled = labels.into_iter().zip(0..).filter_map(|(label, row)| Some((row, label?)));
        let (rows, ids) = labelled.unzip();
        Self { rows, ids }
    }
}

/// What predicting has come to.
pub struct Predicted<B: Tape<Base = B>> {
    /// Of each target its loss in nats, and its margin: zero where it is the likeliest token.
    pub rows: Vec<[f32; 2]>,
    /// The gradient of the losses' sum by the hidden states, `[b * t, d]`, if it was asked for.
    pub dhidden_nd: Option<Tensor<B, 2>>,
}

impl<B: Tape<Base = B>> T5<B> {
    /// Predicts targets from the decoder's normed hidden states `[b * t, d]`; rows that predict nothing have
    /// no logits. With `grads` there are gradients; the head itself is frozen.
    pub fn predict(
        &self,
        hidden_nd: Tensor<B, 2>,
        targets: &LabelRows,
        grads: Option<&mut dyn GradientSums<B>>,
    ) -> Predicted<B> {
        let n = hidden_nd.dims()[0];
        let scale = self.output_scale();
        let hidden_md = scaled(hidden_nd.select(0, self.indices(&targets.rows)), scale);
        let head = Head { w_vd: self.head_vd.clone(), update: None, trained: None };
        let NextTokens { rows, dhidden_md, .. } = next_tokens(hidden_md, &head, &targets.ids, grads);
        let scattered = |dhidden_md| self.scattered(scaled(dhidden_md, scale), targets, n);
        Predicted { rows, dhidden_nd: dhidden_md.map(scattered) }
    }

    /// Logits of all rows, `[n, vocab]`: for comparison, and for a few rows at a time.
    pub fn logits(&self, hidden_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        <B as LinearOps>::linear(scaled(hidden_nd, self.output_scale()), self.head_vd.clone(), None)
    }

    /// `dhidden_md` at its rows of `n`, zero at the others: every row is taken from one place, so that no sum
    /// depends on an order.
    fn scattered(&self, dhidden_md: Tensor<B, 2>, targets: &LabelRows, n: usize) -> Tensor<B, 2> {
        let [m, d] = dhidden_md.dims();
        let mut sources = vec![m as u32; n];
        for (row, &at) in targets.rows.iter().enumerate() {
            sources[at as usize] = row as u32;
        }
        let with_zero = Tensor::cat(vec![dhidden_md, Tensor::zeros([1, d], &self.device)], 0);
        with_zero.select(0, self.indices(&sources))
    }
}

fn scaled<B: Tape<Base = B>>(x_nd: Tensor<B, 2>, scale: f64) -> Tensor<B, 2> {
    if scale == 1.0 { x_nd } else { x_nd * scale }
}
