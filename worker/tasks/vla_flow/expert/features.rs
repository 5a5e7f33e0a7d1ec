//! The norm on hidden states, `layer_norm(h) * gain + bias`: of all blocks together (`expert.feature_norm`),
//! or of each block that reads its own.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{RowOps, Tape},
    params::{Init, ParamId, ParamScope},
    recompute::segment::Segment,
};

use super::registrar::Registrar;

/// A layer norm of the hidden states, with gain and bias (`vlln` of GR00T).
#[derive(Clone, Debug)]
pub(super) struct FeatureNorm {
    gain: ParamId,
    bias: ParamId,
}

impl FeatureNorm {
    /// `{name}.weight` and `{name}.bias`.
    pub fn register(registrar: &mut Registrar<'_>, name: &str, width: usize) -> Self {
        Self {
            gain: registrar.tensor(&format!("{name}.weight"), &[width], Init::Ones),
            bias: registrar.tensor(&format!("{name}.bias"), &[width], Init::Zeros),
        }
    }

    pub fn apply<T: Tape>(&self, params: &ParamScope<'_, T>, x_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        const EPS: f64 = 1e-5;
        let width = x_nd.dims()[1];
        let [gain, bias] = [self.gain, self.bias].map(|id| params.get::<1>(id).reshape([1, width]));
        <T as RowOps>::layer_norm(x_nd, EPS) * gain + bias
    }

    /// Whether it trains.
    pub fn trains(&self) -> bool {
        matches!(self.gain, ParamId::Trained(_))
    }
}

/// The norm on the hidden states of one micro-batch, `[b * s, context]`.
pub(super) struct FeatureSegment<'a>(pub &'a FeatureNorm);

impl<B: Tape<Base = B>> Segment<B> for FeatureSegment<'_> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.apply(params, inputs[0].clone())
    }
}
