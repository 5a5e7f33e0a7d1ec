//! What to change where one sample alone does not fit.

use coxswain_proto::run_spec::{Recompute, RunSpec};
use coxswain_task::Task;

/// Settings of this run that would take less, most effective first.
pub(super) fn advice(task: &dyn Task, spec: &RunSpec) -> String {
    let mut settings: Vec<String> = Vec::new();
    if spec.train.recompute != Recompute::Full {
        settings.push("train.recompute: full".into());
    }
    settings.extend(task.frugal_settings(spec));
    if spec.memory.capacity.is_some() {
        settings.push("a larger memory.capacity".into());
    }
    settings.push("a smaller model or smaller samples (such as shorter prompts)".into());
    settings.join(", or ")
}
