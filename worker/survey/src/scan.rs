//! An episode's rows, once through for what is wrong with them and for their moments, and once more for
//! quantiles where they are asked for.

use std::ops::Range;

use coxswain_data::{
    DataError,
    lerobot::{
        Catalog,
        episodes::Episode,
        feature::dimension,
        rows::{Block, Columns, Limits, NO_INTEGER, Part, RowStore},
    },
};

use crate::findings::Finding;
use crate::moments::{Dim, Histogram, Moments};

/// Columns that are read with every window, as integers.
const KEYS: [&str; 3] = ["episode_index", "frame_index", "task_index"];
const TIMESTAMP: &str = "timestamp";
/// How far apart two frames may be from what the rate says, in seconds: LeRobot's own tolerance.
const TOLERANCE_S: f64 = 1e-4;
/// What helps where a row lacks a number.
const REPAIR: &str = "repair the recording or delete the episode";

/// A feature of numbers.
pub struct Numeric {
    /// Name.
    pub name: String,
    /// Axes of one frame's value.
    pub shape: Vec<usize>,
    /// Names of its dimensions; none where there is not one for each.
    pub names: Vec<String>,
    source: Source,
}

enum Source {
    /// This column of a block.
    Column(usize),
    /// One of [`KEYS`].
    Key(usize),
}

impl Numeric {
    /// Dimensions that have statistics of their own: the last axis, over which the others count as values.
    pub fn dims(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// A dimension, by its number and its name.
    pub fn dimension(&self, dim: usize) -> String {
        dimension(dim, if self.shape.len() == 1 { &self.names } else { &[] })
    }

    /// Whether it is one of LeRobot's own columns.
    pub fn is_bookkeeping(&self) -> bool {
        coxswain_data::lerobot::info::BOOKKEEPING.contains(&self.name.as_str())
    }

    /// The values of some rows of a block: row, element and value.
    fn each(&self, block: &Block, rows: Range<usize>, mut take: impl FnMut(usize, usize, f64)) {
        match self.source {
            Source::Key(key) => {
                let there = rows.filter(|row| block.keys[key][*row] != NO_INTEGER);
                there.for_each(|row| take(row, 0, block.keys[key][row] as f64));
            }
            Source::Column(column) => {
                let width = self.shape.iter().product::<usize>();
                for row in rows {
                    let values = &block.numbers[column][row * width..][..width];
                    values.iter().enumerate().for_each(|(at, value)| take(row, at, f64::from(*value)));
                }
            }
        }
    }
}

/// What an episode holds.
pub struct Scan {
    /// By feature and dimension; none where the rows cannot be read.
    pub features: Option<Vec<Vec<Dim>>>,
    /// What is wrong.
    pub findings: Vec<Finding>,
}

/// Reads episodes, from many threads.
pub struct Scanner<'a> {
    catalog: &'a Catalog,
    rows: RowStore,
    /// All features of numbers, in the order of `info.json`.
    pub features: Vec<Numeric>,
    timestamp: Option<usize>,
}

impl<'a> Scanner<'a> {
    /// A scanner of all features of numbers of a data set.
    pub fn new(catalog: &'a Catalog) -> Self {
        let mut columns = Columns { numbers: Vec::new(), cameras: Vec::new() };
        let mut features = Vec::new();
        for (name, feature) in catalog.info.features.iter().filter(|(_, f)| f.is_number() && f.width() > 0) {
            let source = match KEYS.iter().position(|key| key == name) {
                Some(key) => Source::Key(key),
                None => {
                    columns.numbers.push((name.clone(), feature.shape.clone()));
                    Source::Column(columns.numbers.len() - 1)
                }
            };
            let (name, shape, names) = (name.clone(), feature.shape.clone(), feature.element_names());
            features.push(Numeric { name, shape, names, source });
        }
        let timestamp = columns.numbers.iter().position(|(name, _)| name == TIMESTAMP);
        Self { catalog, rows: RowStore::new(columns, Limits::default()), features, timestamp }
    }

    /// Whether a data file can be opened and has the rows that the episode table puts there.
    pub fn check_file(&self, file: u32) -> Result<(), DataError> {
        self.rows.check_file(self.catalog, file)
    }

    /// Reads episode `number`.
    pub fn scan(&self, number: u64, with_quantiles: bool) -> Scan {
        let mut rows = Rows { of: self, number, clock: None, findings: Vec::new() };
        let mut moments: Vec<Vec<Moments>> =
            self.features.iter().map(|feature| vec![Moments::default(); feature.dims()]).collect();
        let read = self.each_block(number, |block, here, first| {
            rows.check(block, here.clone(), first);
            for (feature, dims) in self.features.iter().zip(&mut moments) {
                feature.each(block, here.clone(), |row, at, value| {
                    let frame = first + (row - here.start) as u64;
                    if value.is_finite() {
                        return dims[at % feature.dims()].add_values(value, 1, frame);
                    }
                    match block.misfit(block.first_row + row as u64, &feature.name) {
                        // Of all its elements the same is to be said.
                        Some(misfit) if at == 0 => rows.no_value(&feature.name, misfit.to_string(), frame),
                        Some(_) => {}
                        None => rows.not_finite(feature, at, value, frame),
                    }
                });
            }
        });
        let mut findings = rows.findings;
        if let Err(error) = read {
            findings.push(Finding::of(&error, &self.catalog.root, "unreadable"));
            return Scan { features: None, findings };
        }
        let spread = with_quantiles.then(|| self.spread(number, &moments));
        let dims = |(feature, dims): (usize, Vec<Moments>)| -> Vec<Dim> {
            let spread = |at: usize| spread.as_ref().map(|spread| &spread[feature][at]);
            dims.into_iter().enumerate().map(|(at, moments)| Dim::new(moments, spread(at))).collect()
        };
        Scan { features: Some(moments.into_iter().enumerate().map(dims).collect()), findings }
    }

    fn spread(&self, number: u64, moments: &[Vec<Moments>]) -> Vec<Vec<Histogram>> {
        let mut spread: Vec<Vec<_>> =
            moments.iter().map(|dims| dims.iter().map(Histogram::new).collect()).collect();
        // What was read a moment ago reads the same, out of the cache as a rule.
        let _ = self.each_block(number, |block, here, _| {
            for (feature, dims) in self.features.iter().zip(&mut spread) {
                feature.each(block, here.clone(), |_, at, value| {
                    if value.is_finite() {
                        dims[at % feature.dims()].add_values(value, 1);
                    }
                });
            }
        });
        spread
    }

    /// The values of a feature in an episode, by element.
    pub fn series(&self, number: u64, feature: usize) -> Result<Vec<Vec<f32>>, DataError> {
        let feature = &self.features[feature];
        let mut series = vec![Vec::new(); feature.shape.iter().product()];
        self.each_block(number, |block, here, _| {
            feature.each(block, here, |_, element, value| series[element].push(value as f32));
        })?;
        Ok(series)
    }

    /// The windows of an episode: a block, the rows of it that are the episode's, and the frame of the first.
    fn each_block(
        &self,
        number: u64,
        mut take: impl FnMut(&Block, Range<usize>, u64),
    ) -> Result<(), DataError> {
        let Episode { file, first_row, length, .. } = self.catalog.episodes.episodes[number as usize];
        let mut row = first_row;
        while row < first_row + length {
            let block = self.rows.block(self.catalog, file, row, Part::Numbers)?;
            let end = (block.first_row + block.rows as u64).min(first_row + length);
            let here = (row - block.first_row) as usize..(end - block.first_row) as usize;
            take(&block, here, row - first_row);
            row = end;
        }
        Ok(())
    }
}

/// Rows of an episode, checked one after the other.
struct Rows<'a> {
    of: &'a Scanner<'a>,
    number: u64,
    /// Time of the frame before.
    clock: Option<f64>,
    findings: Vec<Finding>,
}

impl Rows<'_> {
    fn check(&mut self, block: &Block, here: Range<usize>, first: u64) {
        for (row, frame) in here.zip(first..) {
            match block.missing_key(block.first_row + row as u64) {
                Some((key, misfit)) => self.no_value(key, misfit.to_string(), frame),
                None => self.check_keys(block.keys.each_ref().map(|key| key[row]), frame),
            }
            if let Some(column) = self.of.timestamp {
                self.check_time(f64::from(block.numbers[column][row]), frame);
            }
        }
    }

    fn check_keys(&mut self, [episode, number, task]: [i64; 3], frame: u64) {
        if (episode, number) != (self.number as i64, frame as i64) {
            let found = format!(
                "says episode {episode}, frame {number}; by the episode table this row is episode {}, frame {frame}",
                self.number
            );
            let remedy = "metadata and data are of different recordings: restore the one that was replaced";
            self.add(Finding::error("wrong row", found, remedy).feature("episode_index, frame_index"), frame);
        }
        if !self.of.catalog.tasks.contains_key(&task) {
            let found = format!("task {task} has no text in meta/tasks");
            self.add(Finding::error("no task", found, "restore the task list").feature("task_index"), frame);
        }
    }

    /// Times count from the episode's beginning, at the rate of `info.json`. Training counts frames and does
    /// not read them; LeRobot finds frames of videos by them.
    fn check_time(&mut self, time: f64, frame: u64) {
        let fps = self.of.catalog.info.fps;
        // What float32 can tell apart at this time.
        let tolerance = TOLERANCE_S + 2.0 * f64::from(f32::EPSILON) * time.abs();
        let restore = "rewrite the timestamps as frame_index / fps, or restore the file";
        let finding = match self.clock {
            // What is not finite is found as a number.
            _ if !time.is_finite() => None,
            None if time.abs() > tolerance => Some(Finding::warning(
                "late start",
                format!("the episode begins at {time:.4} s, not at 0"),
                restore,
            )),
            Some(before) if time <= before => {
                let found =
                    format!("{time:.4} s follows {before:.4} s: rows are out of order, or written twice");
                Some(Finding::error("time decreases", found, restore))
            }
            Some(before) if (time - before - 1.0 / fps).abs() > tolerance => {
                let found = format!(
                    "{:.4} s after the previous frame; at {fps} frames a second it should be {:.4} s",
                    time - before,
                    1.0 / fps
                );
                Some(Finding::warning(
                    "wrong rate",
                    found,
                    "correct fps in info.json, or resample the episode",
                ))
            }
            _ => None,
        };
        if let Some(finding) = finding {
            self.add(finding.feature(TIMESTAMP), frame);
        }
        if time.is_finite() {
            self.clock = Some(time);
        }
    }

    fn not_finite(&mut self, feature: &Numeric, element: usize, value: f64, frame: u64) {
        let found = format!("element {element} is {value}");
        self.add(Finding::error("not finite", found, REPAIR).feature(&feature.name), frame);
    }

    fn no_value(&mut self, column: &str, found: String, frame: u64) {
        self.add(Finding::error("no value", found, REPAIR).feature(column), frame);
    }

    fn add(&mut self, finding: Finding, frame: u64) {
        let episode = self.of.catalog.episodes.episodes[self.number as usize];
        let finding = finding.episode(self.number).frame(frame);
        // A path that cannot be made was refused when the files were opened.
        let path = self.of.catalog.data_path(episode.file).unwrap_or_default();
        let finding = finding.file(&self.of.catalog.root, &path);
        let same = |one: &&mut Finding| (one.kind, &one.feature) == (finding.kind, &finding.feature);
        match self.findings.iter_mut().find(same) {
            Some(first) => first.more += 1,
            None => self.findings.push(finding),
        }
    }
}
