//! What Coxswain trains, a folder each.

pub mod vla_flow;

use coxswain_nn::kernels::Tape;
use coxswain_task::TaskOn;

/// All tasks, on one kind of device: a line each.
pub fn on<B: Tape<Base = B>>() -> Vec<&'static dyn TaskOn<B>> {
    vec![&vla_flow::VlaFlow]
}
