//! A run laid against the memory it is to run in.
//!
//! ```text
//! Subject (worker)  what is predicted about        capacity   which memory, and how much of it is free
//! outlook           one memory: categories, micro-batches, verdict
//! duration          how long a step takes, and what that rests on
//! check             what `cox run`, `cox check` and `cox plan` refuse
//! uses              evaluation and answers, by the same measure
//! vary              one key with several values
//! ```

pub mod capacity;
pub mod check;
mod duration;
mod outlook;
pub mod uses;
pub mod vary;

pub use duration::StepTime;
pub use outlook::{Basis, Choice, Outlook, Question};
