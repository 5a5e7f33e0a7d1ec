//! What an update rule is.

use std::fmt;

use super::state::{ParamPiece, StateBuffer, StateValues};
use crate::{
    kernels::flat::{Average, Flat, Part},
    params::{Grain, ParamSpec},
};

/// How weights follow their gradients.
pub trait UpdateRule<F: Flat>: fmt::Debug + Send + Sync {
    /// The buffers of state that it keeps of a part, zero before the first step.
    fn state(&self) -> &[StateBuffer];

    /// Where parts may be cut: what it looks at together must be in one.
    fn grain(&self) -> Grain;

    /// Takes a step on what of these parameters is in a part; they come in the order of the buffer, and some
    /// may be left out. Then the average, if there is one, follows the weights, also where no update is
    /// ([`Flat::approach`]). The same input gives the same bits: another rank repeats it.
    fn update(
        &self,
        part: Part<'_, F, &mut [StateValues<F>]>,
        updates: &[ParamUpdate<'_>],
        average: Option<Average<'_, F>>,
    );
}

/// What of one parameter is in a part, and how it is updated.
#[derive(Clone, Copy, Debug)]
pub struct ParamUpdate<'a> {
    /// The parameter.
    pub param: &'a ParamSpec,
    /// Which of its elements, and where they are.
    pub piece: &'a ParamPiece,
    /// What applies to it in this step.
    pub with: Hyperparameters,
}

/// What the engine has decided about one step and one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// The gradient is to be multiplied by this first: one over the valid elements of the global batch, times
    /// what clips it.
    pub gradient_factor: f64,
    /// Learning rate.
    pub lr: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// The number of this step among those that were taken; 1 is the first.
    pub step: u64,
}
