//! Training a policy of LeRobot's from its own directory, and back to one.
//!
//! ```text
//! passes      a micro-batch through the policy: loss, gradients, samples
//! objective   the policy as the engine trains it
//! subject     what it will take
//! ```

mod objective;
mod passes;
mod subject;
#[cfg(test)]
mod tests;

pub(super) use self::{objective::PolicyObjective, subject::PolicySubject};
