//! The truth loop: what was predicted, what was measured, and what the next prediction learns from it.
//!
//! ```text
//! end of a run   Record (predicted and measured by category)  ─▶  one file per machine and model, newest last
//! next `plan`    Truth::calibration                           ─▶  measured peak ≈ fixed + offset + slope * varying
//! ```
//!
//! Sizes that are exact need no learning; what does is what a constant stands for (the process, the allocator) and the share of
//! activations that the shadow step misses. So a calibration is a line through the records: one record gives the offset, two at
//! different micro-batches (or modes, or lengths) give the slope too. Records of another machine or another model say nothing here.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_proto::memory::{Category, Compared};
use serde::{Deserialize, Serialize};

use super::{Ask, Place, Prediction, Subject};

/// Records kept per machine and model.
const KEPT: usize = 64;
/// The slope is believed within this factor of one: beyond it the records contradict each other.
const STEEPEST: f64 = 2.0;
/// How well a peak repeats, relative to itself: read-ahead and the data set's cache are not at the same point twice.
const NOISE: f64 = 0.01;
/// How far slopes are from one before anything is measured.
const SLOPE_DEVIATION: f64 = 0.1;

/// One run's memory on one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The run's name.
    pub run: String,
    /// Samples of a forward pass.
    pub micro_batch: u64,
    /// Ranks.
    pub world: u64,
    /// Predicted without calibration: what does not depend on the batch.
    pub fixed: u64,
    /// Predicted without calibration: what does.
    pub varying: u64,
    /// Measured peak.
    pub measured: u64,
    /// By category: predicted, and measured where a category can be told apart.
    pub categories: Vec<Compared>,
}

impl Record {
    /// A run's prediction beside what was measured.
    pub fn new(
        subject: &Subject,
        ask: Ask,
        prediction: &Prediction,
        measured: u64,
        by: &[(Category, u64)],
    ) -> Self {
        let categories = Category::ALL.map(|category| Compared {
            category,
            predicted: prediction.of(category),
            measured: by.iter().find(|(of, _)| *of == category).map(|(_, bytes)| *bytes),
        });
        Self {
            run: subject.spec.run.name.clone(),
            micro_batch: ask.micro_batch,
            world: ask.world,
            fixed: prediction.fixed(),
            varying: prediction.peak() - prediction.fixed(),
            measured,
            categories: categories.into(),
        }
    }
}

/// A correction learned from records.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Bytes beside what is predicted.
    pub offset: f64,
    /// Factor of what depends on the batch.
    pub slope: f64,
    /// Records it was learned from.
    pub records: usize,
}

impl Calibration {
    /// The line through the records; none without any.
    pub fn of(records: &[Record]) -> Option<Self> {
        let count = records.len() as f64;
        let points: Vec<(f64, f64)> =
            records.iter().map(|r| (r.varying as f64, r.measured as f64 - r.fixed as f64)).collect();
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let (x, y) = (mean(|p| p.0), mean(|p| p.1));
        let spread: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
        // A line of least squares with a prior: slopes are about one, and peaks repeat to about a percent. Points that lie close
        // together then say little about the slope, as they should.
        let noise = NOISE * records.iter().map(|r| r.measured as f64).sum::<f64>() / count;
        let prior = (noise / SLOPE_DEVIATION).powi(2);
        let product: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
        let slope = (product + prior) / (spread + prior).max(f64::MIN_POSITIVE);
        let slope = if (1.0 / STEEPEST..=STEEPEST).contains(&slope) { slope } else { 1.0 };
        (!records.is_empty()).then_some(Self { offset: y - slope * x, slope, records: records.len() })
    }

    /// The peak of a prediction, corrected.
    pub fn peak(&self, prediction: &Prediction) -> u64 {
        let varying = (prediction.peak() - prediction.fixed()) as f64;
        (prediction.fixed() as f64 + self.offset + self.slope * varying).max(0.0) as u64
    }
}

/// The records of one machine and model.
#[derive(Clone, Debug)]
pub struct Truth {
    path: PathBuf,
    records: Vec<Record>,
}

impl Truth {
    /// The records of this machine, in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`). None where there is no such
    /// directory to be.
    pub fn of_this_machine(subject: &Subject, place: Place) -> Option<Self> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
        Some(Self::open(&cache.join("coxswain").join("memory"), subject, place))
    }

    /// The records below `dir`. A file that cannot be read counts as empty: it is a cache.
    pub fn open(dir: &Path, subject: &Subject, place: Place) -> Self {
        let place = match place {
            Place::Host { .. } => "host",
            Place::Card => "card",
        };
        let host =
            nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
        let model = blake3::hash(format!("{:?}", subject.config).as_bytes()).to_hex();
        let path = dir.join(format!("{host}-{place}-{}.json", &model[..16]));
        let records = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Self { path, records: records.unwrap_or_default() }
    }

    /// Where they are kept.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What was recorded, oldest first.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// What they teach.
    pub fn calibration(&self) -> Option<Calibration> {
        Calibration::of(&self.records)
    }

    /// Adds a record and writes the file anew, by rename.
    pub fn add(&mut self, record: Record) -> io::Result<()> {
        self.records.push(record);
        let excess = self.records.len().saturating_sub(KEPT);
        self.records.drain(..excess);
        if let Some(dir) = self.path.parent() {
            fs::create_dir_all(dir)?;
        }
        let staged = self.path.with_extension(format!("{}.tmp", std::process::id()));
        let text = serde_json::to_vec_pretty(&self.records).map_err(io::Error::other)?;
        fs::write(&staged, text).and_then(|()| fs::rename(&staged, &self.path)).inspect_err(|_| {
            let _ = fs::remove_file(&staged);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(fixed: u64, varying: u64, measured: u64) -> Record {
        Record { run: "r".into(), micro_batch: 1, world: 1, fixed, varying, measured, categories: Vec::new() }
    }

    #[test]
    fn two_points_make_a_line_and_one_an_offset() {
        assert_eq!(Calibration::of(&[]), None);
        let one = Calibration::of(&[record(100, 50, 170)]).expect("a record");
        assert_eq!((one.offset, one.slope), (20.0, 1.0));
        let two = Calibration::of(&[record(100, 1000, 1220), record(100, 3000, 3420)]).expect("records");
        assert!((two.slope - 1.1).abs() < 0.005 && (two.offset - 20.0).abs() < 10.0, "{two:?}");
        // Two percent apart, and off by one percent: no reason to believe in a slope of two.
        let close = Calibration::of(&[record(0, 1000, 1000), record(0, 1020, 1040)]).expect("records");
        assert!((close.slope - 1.0).abs() < 0.05, "{close:?}");
    }

    #[test]
    fn records_that_contradict_each_other_give_no_slope() {
        let calibration = Calibration::of(&[record(100, 100, 500), record(100, 200, 300)]).expect("records");
        assert_eq!(calibration.slope, 1.0);
    }
}
