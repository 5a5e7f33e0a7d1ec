//! The two ways to run a block: keeping nothing, or recording for a backward pass.
//!
//! Blocks are written once, over a [`Tape`]. Whether their values leave a graph is the type's to say, so that
//! recompute (which runs a block without one first, and with one later) and evaluation share their code. What
//! this file does not do: operations ([`super::ModelBackend`]), and their derivatives ([`super::autodiff`]).

use std::sync::Arc;

use burn::{
    backend::{Autodiff, Flex},
    tensor::{Int, Tensor, backend::Backend},
};

use super::{LinearOps, ModelBackend, Residual, Weight, autodiff};

/// Where a forward pass runs: on a plain backend, keeping nothing, or recording for a backward pass on top of
/// one.
///
/// Frozen tensors live on [`Tape::Base`] once and are lifted, without a copy, into whichever tape a block
/// runs on.
pub trait Tape: ModelBackend {
    /// The plain backend underneath.
    type Base: ModelBackend<Device = Self::Device>;

    /// A tensor of the plain backend as a constant of this tape.
    fn lift<const D: usize>(tensor: Tensor<Self::Base, D>) -> Tensor<Self, D>;

    /// Words that kernels of the plain backend read, as a constant of this tape.
    fn lift_words(words: Tensor<Self::Base, 1, Int>) -> Tensor<Self, 1, Int>;

    /// [`linear`](LinearOps::linear) with a weight that is a leaf. Its gradient is not computed in the
    /// backward pass: `leave` is given what it is made of, `dy` and `x` of
    /// [`linear_weight_gradient`](LinearOps::linear_weight_gradient). A tape that records nothing leaves
    /// nothing.
    fn linear_leaving_weight(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        _leave: impl FnOnce(Tensor<Self::Base, 2>, Tensor<Self::Base, 2>) + Send + 'static,
    ) -> Tensor<Self, 2> {
        <Self as LinearOps>::linear(x_ni, w_oi, bias_o)
    }

    /// `residual` plus such a layer.
    fn linear_leaving_weight_residual(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        _leave: impl FnOnce(Tensor<Self::Base, 2>, Tensor<Self::Base, 2>) + Send + 'static,
    ) -> Tensor<Self, 2> {
        Self::linear_residual(residual, x_ni, w_oi, bias_o)
    }

    /// `y` as the value of such a layer: nothing is computed.
    fn linear_leaving_weight_cached(
        y_no: Tensor<Self::Base, 2>,
        _x_ni: Tensor<Self, 2>,
        _w_oi: Tensor<Self, 2>,
        _bias_o: Option<Tensor<Self, 1>>,
        _leave: impl FnOnce(Tensor<Self::Base, 2>, Tensor<Self::Base, 2>) + Send + 'static,
    ) -> Tensor<Self, 2> {
        Self::lift(y_no)
    }

    /// The values of a tensor of this tape, shared.
    fn lower<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self::Base, D>;
}

impl Tape for Flex {
    type Base = Flex;

    fn lift<const D: usize>(tensor: Tensor<Flex, D>) -> Tensor<Flex, D> {
        tensor
    }

    fn lift_words(words: Tensor<Flex, 1, Int>) -> Tensor<Flex, 1, Int> {
        words
    }

    fn lower<const D: usize>(tensor: Tensor<Flex, D>) -> Tensor<Flex, D> {
        tensor
    }
}

impl<B: ModelBackend> Tape for Autodiff<B> {
    type Base = B;

    fn lift<const D: usize>(tensor: Tensor<B, D>) -> Tensor<Self, D> {
        Tensor::from_inner(tensor)
    }

    fn lift_words(words: Tensor<B, 1, Int>) -> Tensor<Self, 1, Int> {
        Tensor::from_inner(words)
    }

    fn linear_leaving_weight(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        leave: impl FnOnce(Tensor<B, 2>, Tensor<B, 2>) + Send + 'static,
    ) -> Tensor<Self, 2> {
        let y_no = <B as LinearOps>::linear(
            Self::lower(x_ni.clone()),
            Self::lower(w_oi.clone()),
            bias_o.clone().map(Self::lower),
        );
        autodiff::linear_leaving_weight(y_no, x_ni, w_oi, bias_o, leave)
    }

    fn linear_leaving_weight_residual(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        leave: impl FnOnce(Tensor<B, 2>, Tensor<B, 2>) + Send + 'static,
    ) -> Tensor<Self, 2> {
        residual.plus(Self::linear_leaving_weight(x_ni, w_oi, bias_o, leave))
    }

    fn linear_leaving_weight_cached(
        y_no: Tensor<B, 2>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        leave: impl FnOnce(Tensor<B, 2>, Tensor<B, 2>) + Send + 'static,
    ) -> Tensor<Self, 2> {
        autodiff::linear_leaving_weight(y_no, x_ni, w_oi, bias_o, leave)
    }

    fn lower<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<B, D> {
        tensor.inner()
    }
}

impl<B: Backend> Weight<B> {
    /// As a constant of a tape.
    pub fn lifted<T: Tape<Base = B>>(&self) -> Weight<T> {
        match self {
            Self::Dense(w_oi) => Weight::Dense(T::lift(w_oi.clone())),
            Self::Quantized(matrix) => Weight::Quantized(Arc::clone(matrix)),
            Self::Packed(parts) => {
                Weight::Packed(parts.iter().map(|part| part.clone().changed(T::lift_words)).collect())
            }
        }
    }
}
