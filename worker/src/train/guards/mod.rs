//! What watches over a run, so that nothing wrong is learned, and nothing wrong is kept.
//!
//! ```text
//! skips          what was left out so far; when it is too much (`left_out`, `learned`)
//! spike          losses far above those before (`loss_history`)
//! divergence     how a run ends whose weights are not finite, or of which step after step is left out
//! gradient_watch everything that should train gets a gradient
//! verify         ranks compare what they hold (`finding` says what they found)
//! replay         ranks compare what they compute, each from another one's samples
//! autobatch      the largest micro-batch that fits, found by trying
//! fault          a rank that is wrong or slow on purpose, for tests
//! ```

mod autobatch;
mod divergence;
mod fault;
mod finding;
mod gradient_watch;
mod learned;
mod left_out;
mod loss_history;
mod replay;
mod skips;
mod spike;
pub(super) mod verify;

pub(super) use self::{
    autobatch::Search,
    fault::InjectedFaults,
    loss_history::LossHistory,
    replay::{AttemptOutcome, Suspicions},
    skips::Skips,
};
pub use self::{
    finding::Comparison,
    gradient_watch::{GradientWatch, SilentTrainables},
};
