//! Statistics that a run has computed of its data set, kept beside its results.
//!
//! All ranks have to normalise by the same numbers, after a restart as well: the first that has computed them
//! keeps them, and every rank, that one too, takes what the file says. Where there is no directory of the run
//! yet (`cox check`, `cox plan`), nothing is kept.

use std::{
    io,
    path::{Path, PathBuf},
};

use coxswain_data::{
    DataError,
    lerobot::stats::{FeatureStats, Stats},
};
use coxswain_feature_store::Digest;
use coxswain_proto::first;

/// Where statistics of one data set, computed in one way, are kept.
pub(super) struct KeptStats {
    path: PathBuf,
    feature: String,
}

impl KeptStats {
    /// In the run's directory, under a name that has all that the statistics depend on.
    pub fn new(run: &Path, feature: &str, depends_on: &[(&str, &[u8])]) -> Self {
        let name = Digest::of("coxswain action statistics v1", depends_on.iter().copied()).to_string();
        Self { path: run.join(format!("action-stats-{}.json", &name[..16])), feature: feature.to_owned() }
    }

    /// What is kept, or else what `compute` finds and leaves for all others.
    pub fn or(
        &self,
        compute: impl FnOnce() -> Result<FeatureStats, DataError>,
    ) -> Result<FeatureStats, DataError> {
        if let Some(stats) = self.load()? {
            return Ok(stats);
        }
        let stats = compute()?;
        match self.keep(&stats) {
            Ok(()) => Ok(self.load()?.unwrap_or(stats)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(stats),
            Err(error) => Err(DataError::io(&self.path, "write")(error)),
        }
    }

    fn load(&self) -> Result<Option<FeatureStats>, DataError> {
        Ok(Stats::read_file(&self.path)?.and_then(|mut stats| stats.0.remove(&self.feature)))
    }

    /// Appears whole, unless another process was first.
    fn keep(&self, stats: &FeatureStats) -> io::Result<()> {
        let content = Stats([(self.feature.clone(), stats.clone())].into()).to_json();
        first::make(&self.path, 0o666, content.as_bytes()).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn stats(mean: f64) -> FeatureStats {
        [("mean".to_owned(), vec![mean, 0.1 + 0.2])].into()
    }

    #[test]
    fn the_first_that_computes_decides_and_others_take_it() {
        let dir = tempfile::tempdir().unwrap();
        let kept = |recipe: &'static [u8]| KeptStats::new(dir.path(), "action", &[("recipe", recipe)]);
        let first = kept(b"a").or(|| {
            // Another process is done in the meantime.
            kept(b"a").or(|| Ok(stats(1.0)))?;
            Ok(stats(2.0))
        });
        assert_eq!(first.unwrap()["mean"][0], 1.0);
        assert_eq!(kept(b"a").or(|| panic!("it is there")).unwrap()["mean"][0], 1.0);
        assert_eq!(kept(b"b").or(|| Ok(stats(3.0))).unwrap()["mean"][0], 3.0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing else is left");
    }

    #[test]
    fn without_a_directory_nothing_is_kept_and_a_broken_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let nowhere = KeptStats::new(&dir.path().join("run"), "action", &[]);
        assert_eq!(nowhere.or(|| Ok(stats(1.0))).unwrap(), stats(1.0));
        assert!(!dir.path().join("run").exists());
        let kept = KeptStats::new(dir.path(), "action", &[]);
        kept.or(|| Ok(stats(1.0))).unwrap();
        fs::write(&kept.path, "{").unwrap();
        let error = kept.or(|| Ok(stats(1.0))).unwrap_err().to_string();
        assert!(error.contains("action-stats-"), "{error}");
    }
}
