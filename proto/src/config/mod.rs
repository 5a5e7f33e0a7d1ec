//! From a YAML file and dotted overrides to a checked [`RunSpec`].
//!
//! ```text
//! text ──tree──▶ Node with places ──overrides──▶ Node ──de──▶ RunSpec ──check──▶ checked RunSpec
//!                                                  └─ unknown keys, wrong types     └─ contradictions
//! ```
//!
//! Every complaint names the file, line and column (or the override) it is about, the dotted path of the field, and what to do.
//! Unknown keys are reported all at once, and so are contradictions; of wrong types only the first is.
//!
//! What this does not do: look at the file system beyond reading the file itself. Whether the model and the data set exist and fit
//! each other is for the worker's checks.

mod check;
mod de;
mod error;
mod keys;
mod overrides;
mod tree;

use std::path::Path;

pub use self::{
    error::{ConfigError, Place, Problem},
    keys::known_keys,
};
use crate::{limits::MAX_CONFIG_BYTES, run_spec::RunSpec};

/// Reads any value from YAML, with the same complaints; `source_name` stands for the file in them.
pub fn from_yaml<T: for<'de> serde::Deserialize<'de>>(
    text: &str,
    source_name: &str,
) -> Result<T, ConfigError> {
    de::from_tree(&tree::parse(text, source_name)?)
}

impl RunSpec {
    /// Reads the file at `path`, lays `overrides` (`a.b=value`, later ones win) over it, and checks the result.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, ConfigError> {
        let name = path.display().to_string();
        let unreadable = |source| ConfigError::Unreadable { file: name.clone(), source };
        let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
        if bytes > MAX_CONFIG_BYTES {
            return Err(ConfigError::TooLarge { file: name, bytes, limit: MAX_CONFIG_BYTES });
        }
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        Self::from_yaml(&text, &name, overrides)
    }

    /// As [`RunSpec::load`], from text; `source_name` stands for the file in errors.
    pub fn from_yaml(text: &str, source_name: &str, overrides: &[String]) -> Result<Self, ConfigError> {
        let mut root = tree::parse(text, source_name)?;
        for given in overrides {
            overrides::apply(&mut root, given)?;
        }
        let spec: Self = de::from_tree(&root)?;
        match spec.check() {
            Ok(()) => Ok(spec),
            Err(ConfigError::Invalid(mut problems)) => {
                for problem in &mut problems {
                    problem.place = Some(root.nearest(&problem.path).place.clone());
                }
                Err(ConfigError::Invalid(problems))
            }
            Err(other) => Err(other),
        }
    }
}

#[cfg(test)]
mod tests;
