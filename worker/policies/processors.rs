//! Which steps of LeRobot's processors are read.

use coxswain_models::pretrained::error::ModelError;
use serde_json::Value;

use crate::{directory::PolicyDirectory, export::PROCESSORS};

/// What is read of the processors of a kind of policy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadProcessors {
    /// Steps of the processor before a policy, and of the one behind it.
    pub steps: [&'static [&'static str]; 2],
    /// Modes in which states and actions may be normalised; images never are.
    pub modes: &'static [&'static str],
}

impl ReadProcessors {
    /// Refuses processors with steps that are not known here, or by which values would be normalised in
    /// another way; and a directory that has none.
    pub fn check(self, directory: &PolicyDirectory) -> Result<(), ModelError> {
        for (file, known) in PROCESSORS.into_iter().zip(self.steps) {
            let wrong = |problem| ModelError::Config {
                path: directory.dir.join(file),
                field: "steps".into(),
                problem,
            };
            for step in directory.steps(file)? {
                let name = &step.name;
                if !known.contains(&&name[..]) {
                    let known = known.join(", ");
                    return Err(wrong(format!("step {name:?} is not supported; supported steps: {known}")));
                }
                if step.config.get("enabled").and_then(Value::as_bool) == Some(true) {
                    return Err(wrong(format!("{name} is enabled, which is not supported")));
                }
                let modes = step.config.get("norm_map").and_then(Value::as_object);
                for (kind, mode) in modes.into_iter().flatten() {
                    let read = if kind == "VISUAL" { &["IDENTITY"][..] } else { self.modes };
                    if !read.iter().any(|read| mode == read) {
                        let read = read.join(" or ");
                        return Err(wrong(format!("{name} has {mode} for {kind}; only {read} is supported")));
                    }
                }
            }
        }
        Ok(())
    }
}
