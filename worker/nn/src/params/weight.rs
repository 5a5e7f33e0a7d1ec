//! A weight of the pretrained model: a frozen tensor, or a parameter that a [`ParamScope`] resolves.
//!
//! Layers read it either way. What trains is float32 whatever frozen weights are kept as, and only the flat
//! parameter buffer has it: there is no frozen copy beside it.

use burn::tensor::Tensor;

use super::{ParamId, ParamScope};
use crate::kernels::{ModelBackend, Tape};

/// A weight of `D` axes.
#[derive(Clone, Debug)]
pub enum BaseWeight<B: ModelBackend, const D: usize> {
    /// As the checkpoint has it, for good.
    Frozen(Tensor<B, D>),
    /// It trains.
    Trained(ParamId),
}

impl<B: ModelBackend, const D: usize> BaseWeight<B, D> {
    /// The weight on a tape: a constant, or the parameter as its scope has it.
    pub fn on_tape<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>) -> Tensor<T, D> {
        match self {
            Self::Frozen(tensor) => T::lift(tensor.clone()),
            Self::Trained(id) => params.get(*id),
        }
    }

    /// The parameter that it is, if it trains.
    pub fn trained(&self) -> Option<ParamId> {
        match self {
            Self::Frozen(_) => None,
            Self::Trained(id) => Some(*id),
        }
    }

    /// Whether it trains.
    pub fn trains(&self) -> bool {
        self.trained().is_some()
    }
}

impl<B: ModelBackend, const D: usize> From<Tensor<B, D>> for BaseWeight<B, D> {
    fn from(tensor: Tensor<B, D>) -> Self {
        Self::Frozen(tensor)
    }
}
