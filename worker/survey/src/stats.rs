//! Statistics that a data set lacks, computed as LeRobot does ([`crate::moments`]) and written whole or not
//! at all.
//!
//! | layout | file | what is written |
//! |---|---|---|
//! | v3.0, v2.0 | `meta/stats.json` | what is there, and what it lacks |
//! | v2.1 | `meta/episodes_stats.jsonl` | all of it, an episode a line |
//!
//! A file that has some already is left alone: the new one lies beside it, until asked otherwise. Pictures
//! are sampled as LeRobot samples them; the deviation of their colours is the true one, where LeRobot's own
//! squares bytes in bytes (up to 0.4.x) and writes some hundredth of it.

use std::{
    fs::File,
    io::{BufWriter, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use coxswain_data::{
    DataError,
    lerobot::Catalog,
    place,
    text::{read_json, read_text},
};
use serde_json::{Map, Value, json};

use crate::{
    check::{Progress, in_order},
    findings::{Finding, Severity},
    frames::{Cameras, Colours, Frames},
    moments::{Dim, QUANTILES, Total},
    scan::{Scan, Scanner},
};

const MOMENTS: [&str; 5] = ["min", "max", "mean", "std", "count"];

/// What is to be computed.
pub struct Job<'a> {
    /// The data set.
    pub dir: &'a Path,
    /// What is there, too.
    pub anew: bool,
    /// Puts the new file in the old one's place.
    pub force: bool,
    /// Told of episodes.
    pub progress: Progress<'a>,
}

/// A feature, and its statistics that are not there.
#[derive(Clone, Debug, PartialEq)]
pub struct MissingStats {
    /// The feature.
    pub feature: String,
    /// Names.
    pub statistics: Vec<&'static str>,
}

/// What has been written.
#[derive(Debug)]
pub struct StatsOutcome {
    /// Where.
    pub path: PathBuf,
    /// The data set's own file, if that one was left alone.
    pub beside: Option<PathBuf>,
    /// What was computed.
    pub computed: Vec<MissingStats>,
}

/// Statistics of numbers and pictures that a data set lacks, or all.
pub fn missing(catalog: &Catalog, all: bool) -> Vec<MissingStats> {
    let names = || MOMENTS.into_iter().chain(QUANTILES.map(|(name, _)| name));
    let features = catalog.info.features.iter();
    let counted =
        features.filter(|(_, feature)| feature.is_camera() || (feature.is_number() && feature.width() > 0));
    let of = |name: &String| {
        let there = catalog.stats.as_ref().and_then(|stats| stats.0.get(name)).filter(|_| !all);
        let lacks = |stat: &&str| there.is_none_or(|stats| !stats.contains_key(*stat));
        MissingStats { feature: name.clone(), statistics: names().filter(lacks).collect() }
    };
    let missing = counted.map(|(name, _)| of(name));
    missing.filter(|missing| !missing.statistics.is_empty()).collect()
}

/// Computes and writes what is missing; nothing if nothing is.
pub fn fill(job: &Job<'_>) -> Result<Option<StatsOutcome>, DataError> {
    if place::is_remote(job.dir) {
        let remedy = "copy the data set to a disk, run `cox data stats` there, and upload what it writes";
        let found = "statistics are written into the data set's directory, but buckets are read-only here";
        return Err(DataError::invalid(job.dir, "(address)", found, remedy));
    }
    let catalog = Catalog::open(job.dir)?;
    let per_episode = catalog.stats_path.extension().is_some_and(|ending| ending == "jsonl");
    let missing_now = missing(&catalog, job.anew);
    if missing_now.is_empty() {
        return Ok(None);
    }
    // A line of v2.1 has all statistics of its episode.
    let computed = if per_episode { missing(&catalog, true) } else { missing_now };
    let own = &catalog.stats_path;
    let (path, beside) = match catalog.stats.is_some() && !job.force {
        true => (
            own.with_extension(if per_episode { "computed.jsonl" } else { "computed.json" }),
            Some(own.clone()),
        ),
        false => (own.clone(), None),
    };
    if beside.is_some() && path.exists() {
        let remedy = "delete it, or give --force to overwrite the data set's own statistics";
        return Err(DataError::invalid(&path, "(file)", "already exists", remedy));
    }
    let kept = match catalog.stats.is_none() || per_episode || job.anew {
        true => Map::new(),
        false => own_statistics(own)?,
    };
    let mut out = Partial::new(&path)?;
    let totals = episodes(&catalog, job.progress, &computed, |episode, features| match per_episode {
        true => out.line(&json!({"episode_index": episode, "stats": features})),
        false => Ok(()),
    })?;
    if !per_episode {
        out.line(&Value::Object(merged(kept, &computed, &totals)))?;
    }
    out.publish()?;
    Ok(Some(StatsOutcome { path, beside, computed }))
}

fn own_statistics(path: &Path) -> Result<Map<String, Value>, DataError> {
    if read_text(path)?.contains("NaN") {
        let remedy = "recompute all statistics: `cox data stats --anew --force`";
        return Err(DataError::invalid(path, "(file)", "contains NaN", remedy));
    }
    read_json(path)
}

/// What is there, with what it lacked.
fn merged(
    mut kept: Map<String, Value>,
    computed: &[MissingStats],
    totals: &Map<String, Value>,
) -> Map<String, Value> {
    for MissingStats { feature, statistics } in computed {
        let entry = kept.entry(feature.clone()).or_insert_with(|| json!({}));
        for statistic in statistics {
            entry[*statistic] = totals[feature][*statistic].clone();
        }
    }
    kept
}

/// A feature's numbers while episodes go by.
struct Feature {
    name: String,
    is_picture: bool,
    totals: Vec<Total>,
    /// Frames, or pictures that were decoded.
    count: u64,
}

impl Feature {
    fn json(&self, dims: &[Dim], count: u64) -> Value {
        let scale = if self.is_picture { 255.0 } else { 1.0 };
        let list = |value: &dyn Fn(&Dim) -> f64| -> Value {
            let values = dims.iter().map(|dim| value(dim) / scale);
            // LeRobot's shape of a picture's statistics: channels, and two axes of one.
            values.map(|value| if self.is_picture { json!([[value]]) } else { json!(value) }).collect()
        };
        let mut out = Map::new();
        out.insert("min".into(), list(&|dim| dim.moments.min));
        out.insert("max".into(), list(&|dim| dim.moments.max));
        out.insert("mean".into(), list(&|dim| dim.moments.mean));
        out.insert("std".into(), list(&|dim| dim.moments.std()));
        out.insert("count".into(), json!([count]));
        for (at, (name, _)) in QUANTILES.iter().enumerate() {
            out.insert((*name).into(), list(&|dim| dim.quantiles[at]));
        }
        Value::Object(out)
    }

    fn add_episode(&mut self, episode: u64, dims: &[Dim], count: u64) -> Value {
        self.totals.resize_with(dims.len(), Total::default);
        self.totals.iter_mut().zip(dims).for_each(|(total, dim)| total.add_episode(episode, dim));
        self.count += count;
        self.json(dims, count)
    }

    fn whole(&self) -> Value {
        let dims: Vec<Dim> = self
            .totals
            .iter()
            .map(|total| Dim { moments: total.moments, quantiles: total.quantiles() })
            .collect();
        self.json(&dims, self.count)
    }
}

/// Goes through all episodes, handing over each one's statistics, and returns those of the data set.
fn episodes(
    catalog: &Catalog,
    progress: Progress<'_>,
    computed: &[MissingStats],
    mut each: impl FnMut(u64, Map<String, Value>) -> Result<(), DataError>,
) -> Result<Map<String, Value>, DataError> {
    let scanner = Scanner::new(catalog);
    let cameras = Cameras::new(catalog, rayon::current_num_threads())?;
    let is_asked = |name: &str| computed.iter().any(|missing| missing.feature == name);
    let feature =
        |name: &str, is_picture| Feature { name: name.into(), is_picture, totals: Vec::new(), count: 0 };
    let mut numbers: Vec<_> = scanner.features.iter().map(|of| feature(&of.name, false)).collect();
    let asked: Vec<usize> =
        (0..cameras.cameras.len()).filter(|of| is_asked(&cameras.cameras[*of].name)).collect();
    let mut pictures: Vec<_> = asked.iter().map(|of| feature(&cameras.cameras[*of].name, true)).collect();
    let done = AtomicU64::new(0);
    let see = |episode: u64| {
        let frames = Frames::Sampled.of(catalog.episodes.episodes[episode as usize].length);
        let looked = asked.iter().map(|camera| cameras.look(*camera, episode, &frames));
        let seen = (scanner.scan(episode, true), looked.collect::<Vec<_>>());
        progress(done.fetch_add(1, Ordering::Relaxed) + 1, catalog.info.episodes);
        seen
    };
    let take = |episode, (scan, looked): (Scan, Vec<(Colours, Vec<Finding>)>)| {
        let mut wrong = scan.findings.iter().chain(looked.iter().flat_map(|(_, findings)| findings));
        if let Some(finding) = wrong.find(|finding| finding.severity == Severity::Error) {
            return ControlFlow::Break(damaged(catalog, finding));
        }
        let mut stats = Map::new();
        let length = catalog.episodes.episodes[episode as usize].length;
        for (feature, dims) in numbers.iter_mut().zip(scan.features.into_iter().flatten()) {
            let of = feature.add_episode(episode, &dims, length);
            stats.insert(feature.name.clone(), of);
        }
        for (feature, (colours, _)) in pictures.iter_mut().zip(&looked) {
            let of = feature.add_episode(episode, &colours.dims(), colours.pictures);
            stats.insert(feature.name.clone(), of);
        }
        match each(episode, stats) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(error),
        }
    };
    if let ControlFlow::Break(error) = in_order(catalog.info.episodes, see, take) {
        return Err(error);
    }
    let whole = |feature: &Feature| (feature.name.clone(), feature.whole());
    Ok(numbers.iter().chain(&pictures).map(whole).collect())
}

fn damaged(catalog: &Catalog, finding: &Finding) -> DataError {
    let place = finding.episode.map_or_else(String::new, |episode| format!("episode {episode}: "));
    let path = catalog.root.join(&finding.file);
    let found = format!("{}; statistics would be those of damaged data", finding.found);
    DataError::invalid(
        &path,
        format!("{place}{}", finding.feature),
        found,
        "`cox data check` lists what to repair",
    )
}

/// A file that appears whole or not at all.
struct Partial {
    path: PathBuf,
    partial: PathBuf,
    out: Option<BufWriter<File>>,
}

impl Partial {
    fn new(path: &Path) -> Result<Self, DataError> {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".partial-{}", std::process::id()));
        let partial = path.with_file_name(name);
        let file = File::create(&partial).map_err(|error| {
            let remedy = "make a copy of links (`cp -rs $PWD/SET COPY`) and run `cox data stats COPY`";
            DataError::invalid(path, "(file)", format!("cannot be written: {error}"), remedy)
        })?;
        Ok(Self { path: path.to_path_buf(), partial, out: Some(BufWriter::new(file)) })
    }

    fn line(&mut self, value: &Value) -> Result<(), DataError> {
        match &mut self.out {
            Some(out) => writeln!(out, "{value}").map_err(DataError::io(&self.partial, "write")),
            None => Ok(()),
        }
    }

    fn publish(mut self) -> Result<(), DataError> {
        let Some(mut out) = self.out.take() else { return Ok(()) };
        let written = out.flush().and_then(|()| out.get_ref().sync_all());
        written
            .and_then(|()| std::fs::rename(&self.partial, &self.path))
            .map_err(DataError::io(&self.path, "write"))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After `publish` there is none; before, what went wrong is told already.
        let _ = std::fs::remove_file(&self.partial);
    }
}
