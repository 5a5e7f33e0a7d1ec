//! A task by its name.

use coxswain_nn::kernels::Tape;
use coxswain_task::TaskOn;

/// A run of a task that this program does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("task.type: this cox does not know the task `{name}`; it knows {known}")]
pub struct UnknownTask {
    /// As the run names it.
    pub name: String,
    /// The tasks that there are.
    pub known: String,
}

impl UnknownTask {
    /// The task of this name among these.
    pub fn unless_found<B: Tape<Base = B>>(
        name: &str,
        tasks: &[&'static dyn TaskOn<B>],
    ) -> Result<&'static dyn TaskOn<B>, Self> {
        tasks.iter().find(|task| task.name() == name).copied().ok_or_else(|| Self {
            name: name.to_owned(),
            known: tasks.iter().map(|task| task.name()).collect::<Vec<_>>().join(", "),
        })
    }
}
