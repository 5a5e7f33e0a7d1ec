//! One rank's training: what it works with, what it leaves, and what it has looked at.

use coxswain_nn::kernels::Tape;

use super::{Results, ValidationState, Workbench};
use crate::link::Commands;

/// One rank's training. Built by [`TaskTrainer`](super::TaskTrainer).
pub(super) struct Training<'a, B: Tape<Base = B>> {
    pub bench: Workbench<'a, B>,
    pub results: Results,
    pub looking: ValidationState,
    /// Requests obeyed so far, to tell a new one from an old one; `stop` stays once all have agreed to it.
    pub obeyed: Commands,
}
