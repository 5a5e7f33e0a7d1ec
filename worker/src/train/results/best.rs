//! The best checkpoint so far, by the first of the task's measures on held-out samples.
//!
//! ```text
//! RUN/best.json              which step, which measure, its value, where its checkpoint is; written last
//! RUN/best/..                what the run would leave had it ended there: the task's artifacts
//! RUN/checkpoints/step-..    its checkpoint, which is not pruned while it is the best
//! ```
//!
//! All of it appears by rename, so that a program that reads it while training goes on sees one step's.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_nn::files::replace;
use coxswain_proto::ids::Step;
use serde::{Deserialize, Serialize};

use super::checkpoint;
use crate::train::HeldOutError;

/// `best.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Steps done.
    pub step: u64,
    /// By what it is the best; less is better.
    pub measure: String,
    /// How much that was.
    pub value: f64,
    /// On so many held-out samples, with draws under this key: a value on others is not compared with it.
    pub samples: u64,
    /// See `samples`.
    pub seed: u64,
    /// Checkpoint, relative to the output directory.
    pub checkpoint: String,
    /// Artifacts, relative to the output directory.
    pub artifacts: String,
}

impl Best {
    /// File, in a run's output directory.
    pub const FILE: &'static str = "best.json";
    /// Artifacts, in a run's output directory.
    pub const ARTIFACTS: &'static str = "best";

    /// The state after `step` steps, by the first measure of what was found with draws under `seed`; none if
    /// there is no measure.
    pub(in crate::train) fn from_measures(step: Step, found: &HeldOutError, seed: u64) -> Option<Self> {
        let (measure, value) = found.first()?;
        Some(Self {
            step: step.0,
            measure: measure.to_owned(),
            value,
            samples: found.samples,
            seed,
            checkpoint: format!("checkpoints/{}", step.checkpoint_dir()),
            artifacts: Self::ARTIFACTS.to_owned(),
        })
    }

    /// Whether both were found on the same samples, with the same draws.
    pub(in crate::train) fn compares_with(&self, other: &Self) -> bool {
        (&self.measure, self.samples, self.seed) == (&other.measure, other.samples, other.seed)
    }

    /// The best checkpoint of a run; none if it has none, or that one is not there any more.
    pub fn load(output_dir: &Path) -> Option<Self> {
        let best: Self = serde_json::from_slice(&fs::read(output_dir.join(Self::FILE)).ok()?).ok()?;
        checkpoint::Store::new(output_dir).checkpoint(best.step).is_ok().then_some(best)
    }

    /// An empty directory, for the artifacts that are to be published.
    pub(in crate::train) fn stage(output_dir: &Path) -> io::Result<PathBuf> {
        let staged = staging(output_dir);
        clear(&staged)?;
        fs::create_dir_all(&staged)?;
        Ok(staged)
    }

    /// Puts the artifacts that are staged, and those that `export` writes beside them, in the place of those
    /// before, then says so. Whatever happens, nothing stays staged.
    pub(in crate::train) fn publish(
        &self,
        output_dir: &Path,
        export: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<()> {
        let staged = staging(output_dir);
        let exported = export(&staged).and_then(|()| {
            checkpoint::take_place(&staged, &self.artifacts(output_dir))?;
            let text = serde_json::to_vec_pretty(self).expect("a plain struct of numbers and strings");
            replace(&output_dir.join(Self::FILE), |path| fs::write(path, &text))
        });
        // What is left there would be in the way of the next one.
        let _ = clear(&staged);
        exported
    }

    fn artifacts(&self, output_dir: &Path) -> PathBuf {
        output_dir.join(&self.artifacts)
    }
}

fn staging(output_dir: &Path) -> PathBuf {
    output_dir.join(format!(".tmp-{}", Best::ARTIFACTS))
}

fn clear(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_better_one_takes_the_place_of_the_one_before_and_one_that_fails_leaves_it() {
        let dir = tempfile::tempdir().unwrap();
        let publish = |step: u64, fails: bool| {
            let found = serde_json::json!({ "samples": 8, "mse": 1.0 / step as f64 });
            let found = serde_json::from_value(found).unwrap();
            fs::write(Best::stage(dir.path()).unwrap().join("beside"), step.to_string()).unwrap();
            Best::from_measures(Step(step), &found, 7).unwrap().publish(dir.path(), |into| {
                fs::write(into.join("weights"), step.to_string())?;
                if fails { Err(io::Error::other("a full disk")) } else { Ok(()) }
            })
        };
        let there = || {
            let told: Best = serde_json::from_slice(&fs::read(dir.path().join(Best::FILE)).unwrap()).unwrap();
            let [weights, beside] = ["best/weights", "best/beside"]
                .map(|name| fs::read_to_string(dir.path().join(name)).unwrap());
            assert_eq!(weights, beside, "what was staged belongs to it");
            (told.step, weights)
        };
        publish(2, false).unwrap();
        assert_eq!(there(), (2, "2".into()));
        publish(4, false).unwrap();
        assert_eq!(there(), (4, "4".into()));
        publish(6, true).unwrap_err();
        assert_eq!(there(), (4, "4".into()));
        let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|of| of.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["best", "best.json"]);
        assert_eq!(Best::load(dir.path()), None, "its checkpoint is not there");
    }
}
