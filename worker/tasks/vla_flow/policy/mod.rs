//! The whole policy: vision-language model, sensor encoder, action expert.
//!
//! ```text
//! load               reads the model, registers everything that trains, fills in initial values
//! forward_backward   one micro-batch: loss, and gradients summed into the flat parameter buffer
//! features_below     features at the tap without a trace, to be kept
//! vl_features        hidden states without a trace
//! loss               forward alone, to compare features
//! sample_actions     Euler sampling, for evaluation
//! ```
//!
//! Where a micro-batch brings features, nothing below the [`Tap`] runs, in any of these.
//!
//! The loss of a micro-batch is a *sum* over valid elements, and so are its gradients: the engine,
//! which knows the valid count of the global batch, divides. How a batch is split then changes only rounding.
//!
//! The backward pass is a chain of segments (`recompute`): expert, then decoder layers, then the vision tower
//! if an adapter is there. Nothing below the lowest trainable is recorded.
//!
//! What this module does not do: optimize, communicate, or read data.

mod digest;
mod error;
mod features;
mod load;
mod parts;
mod passes;
mod report;
mod tap;
#[cfg(test)]
mod tests;

pub use self::{
    error::{PolicyError, StepError},
    parts::{Policy, VlFeatures},
    tap::{TrainedParts, resolve as resolve_tap},
};
pub(super) use self::{
    error::{check_finite, failed},
    parts::download,
};
