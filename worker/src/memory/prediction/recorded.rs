//! What earlier runs teach: what was predicted, what was measured, and what the next prediction learns of it.
//!
//! ```text
//! end of a run   Record (predicted and measured by category)  ─▶  one file per machine and model, newest
//!                                                                 last
//! next `plan`    RecordedRuns::calibration                           ─▶  measured peak ≈ fixed + offset +
//!                                                                        slope * varying
//! ```
//!
//! Sizes that are exact need no learning; what does is what a constant stands for (the process, the
//! allocator) and the share of activations that the meta step misses. So a calibration is a line through the
//! records: one record gives the offset, two at different micro-batches (or modes, or lengths) give the slope
//! too. Records of runs that are like the one in question count most, and one that the others contradict (a
//! run that something disturbed) hardly at all. Records of another machine or another model say nothing here.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_proto::memory::{Category, MemoryRow};
use serde::{Deserialize, Serialize};

use coxswain_task::memory::{Ask, Place, Prediction, Subject};

/// Records kept per machine and model.
const KEPT: usize = 64;
/// How many of the newest records say how fast the machine is.
const NEWEST: usize = 8;
/// The slope is believed within this factor of one: beyond it the records contradict each other.
const STEEPEST: f64 = 2.0;
/// The least of a predicted peak that a correction leaves. A run whose data threads were behind had less read
/// ahead than the next one may have: what that saved is not to be relied on.
const LEAST: f64 = 0.95;
/// How well a peak repeats, relative to itself: read-ahead and the data set's cache are not at the same point
/// twice.
const NOISE: f64 = 0.01;
/// How far slopes are from one before anything is measured.
const SLOPE_DEVIATION: f64 = 0.1;
/// How far apart the predicted fixed parts of two runs are, relative to the larger, when the one says half as
/// much about the other: another world, another adapter, another precision.
const UNLIKE: f64 = 0.05;
/// How far a record is from the line, in deviations of the typical one, when it loses half its weight.
const DOUBTFUL: f64 = 2.0;
/// Rounds in which records are weighed by their distance from the line of the round before.
const ROUNDS: usize = 8;

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
    pub categories: Vec<MemoryRow>,
    /// Floating-point operations of this rank's products in a second of its steps; none where no step's time
    /// is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flops_per_second: Option<f64>,
}

impl Record {
    /// A run's prediction beside what was measured.
    pub fn new(
        subject: &dyn Subject,
        ask: Ask,
        prediction: &Prediction,
        measured: u64,
        by: &[(Category, u64)],
    ) -> Self {
        let categories = Category::ALL.map(|category| MemoryRow {
            category,
            predicted: prediction.of(category),
            measured: by.iter().find(|(of, _)| *of == category).map(|(_, bytes)| *bytes),
        });
        Self {
            run: subject.spec().run.name.clone(),
            micro_batch: ask.micro_batch,
            world: ask.world,
            fixed: prediction.fixed(),
            varying: prediction.peak() - prediction.fixed(),
            measured,
            categories: categories.into(),
            flops_per_second: None,
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
    /// The line through the records, for a run of which `fixed` bytes are predicted whatever its batch; none
    /// without any record.
    pub fn fit(records: &[Record], fixed: u64) -> Option<Self> {
        let alike = |record: &Record| {
            let apart = record.fixed.abs_diff(fixed) as f64 / record.fixed.max(fixed).max(1) as f64;
            halved_at(apart, UNLIKE)
        };
        let points: Vec<Point> =
            records.iter().map(|record| Point::from_record(record, alike(record))).collect();
        // Where all are unlike it, they are what there is.
        let most = points.iter().map(|point| point.weight).reduce(f64::max)?;
        let mut weights: Vec<f64> = points.iter().map(|point| point.weight / most).collect();
        let mut line = FittedLine::through(&points, &weights);
        for _ in 0..ROUNDS {
            let far: Vec<f64> = points.iter().map(|point| line.distance(point).abs()).collect();
            let deviation = median(&far, &weights).max(line.noise);
            for ((weight, point), far) in weights.iter_mut().zip(&points).zip(&far) {
                *weight = point.weight / most * halved_at(*far, DOUBTFUL * deviation);
            }
            line = FittedLine::through(&points, &weights);
        }
        Some(Self { offset: line.offset, slope: line.slope, records: records.len() })
    }

    /// The peak of a prediction, corrected.
    pub fn peak(&self, prediction: &Prediction) -> u64 {
        let (peak, fixed) = (prediction.peak() as f64, prediction.fixed() as f64);
        (fixed + self.offset + self.slope * (peak - fixed)).max(LEAST * peak) as u64
    }
}

/// A record as a point of the line: what depends on the batch, as predicted and as measured.
#[derive(Clone, Copy, Debug)]
struct Point {
    predicted: f64,
    measured: f64,
    peak: f64,
    weight: f64,
}

impl Point {
    fn from_record(record: &Record, weight: f64) -> Self {
        let measured = record.measured as f64 - record.fixed as f64;
        Self { predicted: record.varying as f64, measured, peak: record.measured as f64, weight }
    }
}

/// `measured = offset + slope * predicted`.
#[derive(Clone, Copy, Debug)]
struct FittedLine {
    offset: f64,
    slope: f64,
    /// How well the peaks it goes through repeat, in bytes.
    noise: f64,
}

impl FittedLine {
    /// The line of least squares, with a prior: slopes are about one, and peaks repeat to about a percent.
    /// Points that lie close together then say little about the slope, as they should.
    fn through(points: &[Point], weights: &[f64]) -> Self {
        let mean = |of: &dyn Fn(&Point) -> f64| {
            let total: f64 = weights.iter().sum();
            points.iter().zip(weights).map(|(point, weight)| weight * of(point)).sum::<f64>() / total
        };
        let sum = |of: &dyn Fn(&Point) -> f64| -> f64 {
            points.iter().zip(weights).map(|(point, weight)| weight * of(point)).sum()
        };
        let (x, y) = (mean(&|point| point.predicted), mean(&|point| point.measured));
        let noise = NOISE * mean(&|point| point.peak);
        let prior = (noise / SLOPE_DEVIATION).powi(2);
        let spread = sum(&|point| (point.predicted - x).powi(2));
        let product = sum(&|point| (point.predicted - x) * (point.measured - y));
        let slope = (product + prior) / (spread + prior).max(f64::MIN_POSITIVE);
        let slope = if (1.0 / STEEPEST..=STEEPEST).contains(&slope) { slope } else { 1.0 };
        Self { offset: y - slope * x, slope, noise }
    }

    fn distance(&self, point: &Point) -> f64 {
        point.measured - self.offset - self.slope * point.predicted
    }
}

/// One at no distance, half at `half`, falling with the square.
fn halved_at(distance: f64, half: f64) -> f64 {
    1.0 / (1.0 + (distance / half.max(f64::MIN_POSITIVE)).powi(2))
}

/// The least of `values` that at least half of the weight does not exceed.
fn median(values: &[f64], weights: &[f64]) -> f64 {
    let mut pairs: Vec<(f64, f64)> = values.iter().copied().zip(weights.iter().copied()).collect();
    pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let half = weights.iter().sum::<f64>() / 2.0;
    let mut below = 0.0;
    let found = pairs.iter().find(|(_, weight)| {
        below += weight;
        below >= half
    });
    found.or(pairs.last()).map_or(0.0, |(value, _)| *value)
}

/// The records of one machine and model.
#[derive(Clone, Debug)]
pub struct RecordedRuns {
    path: PathBuf,
    records: Vec<Record>,
}

impl RecordedRuns {
    /// The directory of this machine's records: in the user's cache directory (`XDG_CACHE_HOME`, else
    /// `~/.cache`). None where there is no such directory to be.
    pub fn home() -> Option<PathBuf> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
        Some(cache.join("coxswain").join("memory"))
    }

    /// The records below `dir`. A file that cannot be read counts as empty: it is a cache.
    pub fn load(dir: &Path, subject: &dyn Subject, place: Place) -> Self {
        let place = match place {
            Place::Host { .. } => "host",
            Place::Gpu => "GPU",
        };
        let host =
            nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
        let model = blake3::hash(subject.model().as_bytes()).to_hex();
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

    /// What they teach about a run that is predicted so.
    pub fn calibration(&self, prediction: &Prediction) -> Option<Calibration> {
        Calibration::fit(&self.records, prediction.fixed())
    }

    /// Operations a second of a rank in a world of so many, the median of the newest runs that say it, and
    /// how many these are.
    pub fn speed(&self, world: u64) -> Option<(f64, usize)> {
        let alike = self.records.iter().rev().filter(|record| record.world == world);
        let speeds: Vec<_> = alike.filter_map(|record| record.flops_per_second).take(NEWEST).collect();
        (!speeds.is_empty()).then(|| (median(&speeds, &vec![1.0; speeds.len()]), speeds.len()))
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
        Record {
            run: "r".into(),
            micro_batch: 1,
            world: 1,
            fixed,
            varying,
            measured,
            categories: Vec::new(),
            flops_per_second: None,
        }
    }

    #[test]
    fn the_newest_runs_of_a_world_say_how_fast_it_is() {
        let of = |world, flops_per_second| Record { world, flops_per_second, ..record(1, 1, 1) };
        let mut records = vec![of(1, Some(9e9)); 4];
        records.extend([of(2, Some(1e9)), of(1, None)]);
        records.extend([1e9, 2e9, 3e9, 2e9, 2e9, 2e9, 2e9, 2e9].map(|speed| of(1, Some(speed))));
        let runs = RecordedRuns { path: PathBuf::new(), records };
        assert_eq!((runs.speed(1), runs.speed(2), runs.speed(4)), (Some((2e9, 8)), Some((1e9, 1)), None));
    }

    #[test]
    fn two_points_make_a_line_and_one_an_offset() {
        assert_eq!(Calibration::fit(&[], 100), None);
        let one = Calibration::fit(&[record(100, 50, 170)], 100).expect("a record");
        assert_eq!((one.offset, one.slope), (20.0, 1.0));
        let two =
            Calibration::fit(&[record(100, 1000, 1220), record(100, 3000, 3420)], 100).expect("records");
        assert!((two.slope - 1.1).abs() < 0.005 && (two.offset - 20.0).abs() < 10.0, "{two:?}");
        // Two percent apart, and off by one percent: no reason to believe in a slope of two.
        let close = Calibration::fit(&[record(0, 1000, 1000), record(0, 1020, 1040)], 0).expect("records");
        assert!((close.slope - 1.0).abs() < 0.05, "{close:?}");
    }

    #[test]
    fn records_that_contradict_each_other_give_no_slope() {
        let calibration =
            Calibration::fit(&[record(100, 100, 500), record(100, 200, 300)], 100).expect("records");
        assert_eq!(calibration.slope, 1.0);
    }

    #[test]
    fn runs_that_had_less_read_ahead_hardly_lower_the_next_prediction() {
        let mut prediction = Prediction::default();
        prediction.set(Category::Input, 2000);
        let peak = |measured: u64| {
            let found = Calibration::fit(&[record(0, 2000, measured)], 0).expect("a record");
            found.peak(&prediction)
        };
        assert_eq!([1500, 1950, 2200].map(peak), [1900, 1950, 2200]);
    }

    #[test]
    fn runs_that_something_disturbed_do_not_bend_the_line() {
        let mut records: Vec<Record> =
            (1..=6).map(|batch| record(3000, 300 * batch, 3050 + 300 * batch)).collect();
        records.extend([record(3000, 600, 5400), record(3000, 600, 5500)]);
        let found = Calibration::fit(&records, 3000).expect("records");
        assert!((found.offset - 50.0).abs() < 20.0 && (found.slope - 1.0).abs() < 0.01, "{found:?}");
    }

    #[test]
    fn a_run_is_corrected_by_those_that_are_like_it() {
        let two_ranks = (0..8).map(|_| record(3230, 590, 3880));
        let bfloat16 = (0..40).map(|_| record(1970, 1190, 3450));
        let records: Vec<Record> = two_ranks.chain(bfloat16).collect();
        let peak = |fixed: u64, varying: f64| {
            let found = Calibration::fit(&records, fixed).expect("records");
            fixed as f64 + found.offset + found.slope * varying
        };
        assert!((peak(3230, 590.0) / 3880.0 - 1.0).abs() < 0.01, "{}", peak(3230, 590.0));
        assert!((peak(1970, 1190.0) / 3450.0 - 1.0).abs() < 0.01, "{}", peak(1970, 1190.0));
    }
}
