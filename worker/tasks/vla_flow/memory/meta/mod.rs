//! A training step run with sizes in place of tensors.
//!
//! Formulas for activation memory (34 s b h a layer and their kin) describe somebody else's implementation.
//! This one walks through ours: the same blocks in the same order on the same tape, except that a value is a
//! number of bytes on a [`Heap`] that knows its peak. Ownership does the accounting: a value's bytes are
//! given back when its last owner drops it, exactly as the real tensors' are. A step of a 36-layer model
//! takes a few milliseconds.
//!
//! ```text
//! tape     Heap, Value, a tape whose nodes own what their backward pass needs
//! ops      what each operation of `kernels` allocates, keeps, and gives back
//! tower    segments and recompute modes, as `model::recompute` has them
//! vl       vision tower and language model      expert   sensor encoder and action expert
//! step     one micro-batch, forward and backward
//! ```
//!
//! Each function here has a counterpart in `model` or `kernels` that it must be kept equal to in what is
//! alive when; the test of the prediction error is what notices if it is not. What the meta step leaves out:
//! tensors of a few hundred bytes, shapes, and the allocator's own rounding.

mod expert;
mod ops;
mod step;
mod tape;
mod tower;
mod vl;

pub(super) use expert::{ExpertShape, SensorShape};
pub(super) use ops::{Linear, Weight};
pub(super) use step::{Micro, StepShape, run, run_below};
pub(super) use tape::Widths;
pub(super) use vl::{BlockShape, Entry, Projections, VlShape};
