//! Update rules: how the weights of the flat parameter buffer follow their gradients.
//!
//! ```text
//! here            those that a run file can name
//! rule            what a rule is
//! state           what a rule keeps of each parameter besides its weights
//! adamw           AdamW (arXiv 1711.05101): two float32 values an element
//! adamw8bit       the same with moments in 8 bits, in blocks (arXiv 2110.02861), as bitsandbytes has it
//! ```
//!
//! The engine partitions what a rule works on: each rank updates its part of the buffer, keeps the rule's
//! state of that part, and perhaps once more that of another rank's. It clips gradients, follows the
//! schedule, saves and moves the state; a rule says what its state is ([`StateBuffer`]), where a part may end
//! ([`Grain`](crate::params::Grain)) and what an update does. It sees no rank and no file.
//!
//! docs/develop/add-an-optimizer.md adds one.

mod adamw;
mod adamw8bit;
mod rule;
mod state;

use std::{ops::Range, sync::Arc};

use coxswain_proto::run_spec::{Optimizer, OptimizerName};

use crate::{kernels::flat::Flat, params::TrainableLayout};

pub use self::{
    adamw::AdamW,
    adamw8bit::AdamW8bit,
    rule::{Hyperparameters, ParamUpdate, UpdateRule},
    state::{ParamPiece, StateBuffer, StateElement, StateValues, bytes, counts, pieces},
};

/// Bytes of the state of a part under the rule that a run file names, and of the average of the weights where
/// the run keeps one.
pub fn state_bytes(settings: &Optimizer, layout: &TrainableLayout, part: &Range<usize>) -> u64 {
    let average = if settings.ema_decay.is_some() { 4 * part.len() as u64 } else { 0 };
    bytes(rule_of::<Vec<f32>>(settings).state(), layout, part) + average
}

/// The rule that a run file names.
pub fn rule_of<F: Flat>(settings: &Optimizer) -> Arc<dyn UpdateRule<F>> {
    match settings.name {
        OptimizerName::Adamw => Arc::new(AdamW::new(settings)),
        OptimizerName::Adamw8bit => Arc::new(AdamW8bit::new(settings)),
    }
}
