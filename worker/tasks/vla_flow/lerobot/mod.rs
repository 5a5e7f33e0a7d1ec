//! Training a policy of LeRobot's from its own directory, and back to one.
//!
//! ```text
//! passes      a micro-batch through the policy: loss, gradients, samples
//! objective   the policy as the engine trains it
//! features    what of it is kept
//! parts       what of it is frozen, and what trains
//! subject     what it will take
//! starter     a run file that begins with it
//! from_base   a policy directory where there is only the base of one
//! ```

mod features;
mod from_base;
mod objective;
mod parts;
mod passes;
mod starter;
mod subject;
#[cfg(test)]
mod tests;

pub(super) use self::{
    from_base::make_policy,
    objective::{POLICY_DIR, PolicyObjective},
    passes::{PolicyPasses, TunedPolicy, convention},
    starter::PolicyStart,
    subject::PolicySubject,
};
