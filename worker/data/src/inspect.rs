//! A data set described, before any run file exists: what is in it, what a run could name, and what stands in
//! the way.
//!
//! Needs no checkpoint. Every data file's footer and every video's table is read, so a truncated file shows;
//! images, frames and values are not decoded.

use std::{fmt, path::Path};

use coxswain_proto::human;
use coxswain_video::Codec;
use serde::Serialize;

use super::lerobot::Catalog;
use super::lerobot::frames::FrameStore;
use super::lerobot::rows::{Columns, Limits, RowStore};
use super::lerobot::{
    feature::Feature,
    info::{BOOKKEEPING, Version},
};
use super::{
    error::DataError,
    yaml::{yaml_names, yaml_scalar},
};

/// What actions are called, or what their parts begin with: LeRobot's name, and openpi's.
const ACTIONS: [&str; 2] = ["action", "actions"];
/// Task texts listed; the rest are counted.
const TASKS_SHOWN: usize = 8;
/// Problems listed; a data set with more has one cause.
const PROBLEMS_SHOWN: usize = 20;

/// What `inspect` found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The data set's directory, as given.
    pub path: String,
    /// Layout on disk.
    pub version: Version,
    /// Robot, if named.
    pub robot: Option<String>,
    /// Frames per second.
    pub fps: f64,
    /// Episodes.
    pub episodes: u64,
    /// Frames of all episodes: samples, if nothing is held out.
    pub frames: u64,
    /// Shortest, median and longest episode, in frames.
    pub episode_frames: [u64; 3],
    /// Distinct tasks.
    pub tasks: usize,
    /// The first few task texts.
    pub task_texts: Vec<String>,
    /// Data files.
    pub files: usize,
    /// Bytes of all data files.
    pub bytes: u64,
    /// Videos, of all cameras.
    pub videos: usize,
    /// Bytes of all videos.
    pub video_bytes: u64,
    /// Digest that keys the order of samples.
    pub fingerprint: String,
    /// Features in file order.
    pub features: Vec<FeatureReport>,
    /// What would stop a run, or the features that a run cannot use, with the remedy.
    pub problems: Vec<String>,
}

/// One feature.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FeatureReport {
    /// Name.
    pub name: String,
    /// As `info.json` spells it.
    pub dtype: String,
    /// Axes of one frame's value.
    pub shape: Vec<usize>,
    /// What a run can do with it.
    pub role: Role,
    /// Normalisations that its statistics allow.
    pub normalization: Vec<&'static str>,
    /// How a camera's first video is coded, in words; none for what is no video, or cannot be read.
    pub video: Option<String>,
}

/// What a run can do with a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A picture in colour for every row: an image in it, or a frame of a video.
    Camera,
    /// A depth map, which is not decoded.
    Depth,
    /// What was done: its name says so.
    Action,
    /// Numbers.
    Vector,
    /// Readings over time, `[window, channels]`.
    Window,
    /// LeRobot's own columns.
    Bookkeeping,
    /// Text and anything else.
    Other,
}

fn role(name: &str, feature: &Feature) -> Role {
    match feature {
        _ if BOOKKEEPING.contains(&name) => Role::Bookkeeping,
        f if f.is_depth() => Role::Depth,
        f if f.is_camera() => Role::Camera,
        f if !f.is_number() => Role::Other,
        _ if ACTIONS.contains(&name.split('.').next().unwrap_or(name)) => Role::Action,
        f if f.shape.len() == 2 => Role::Window,
        f if f.shape.len() == 1 => Role::Vector,
        _ => Role::Other,
    }
}

/// Describes the data set at `dir`. Fails only when its metadata cannot be read at all.
pub fn inspect(dir: &Path) -> Result<Report, DataError> {
    let catalog = Catalog::open(dir)?;
    let features: Vec<_> =
        catalog.info.features.iter().map(|(name, f)| describe(&catalog, name, f)).collect();
    let mut lengths: Vec<u64> = catalog.episodes.episodes.iter().map(|e| e.length).collect();
    lengths.sort_unstable();
    let mut texts: Vec<&String> = catalog.tasks.values().collect();
    texts.sort_unstable();
    texts.dedup();
    Ok(Report {
        path: dir.display().to_string(),
        version: catalog.info.version,
        robot: catalog.info.robot.clone(),
        fps: catalog.info.fps,
        episodes: catalog.info.episodes,
        frames: catalog.info.frames,
        episode_frames: [lengths[0], lengths[lengths.len() / 2], lengths[lengths.len() - 1]],
        tasks: texts.len(),
        task_texts: texts.into_iter().take(TASKS_SHOWN).cloned().collect(),
        files: catalog.episodes.files.len(),
        bytes: catalog.data_bytes,
        videos: catalog.videos.iter().map(|table| table.files.len()).sum(),
        video_bytes: catalog.video_bytes,
        fingerprint: catalog.fingerprint.to_string(),
        problems: problems(&catalog, &features),
        features,
    })
}

fn describe(catalog: &Catalog, name: &str, feature: &Feature) -> FeatureReport {
    let stats = catalog.stats.as_ref().and_then(|s| s.0.get(name));
    let finite = |values: &Vec<f64>| values.iter().all(|value| value.is_finite());
    let has = |stat: &str| stats.and_then(|s| s.get(stat)).is_some_and(finite);
    let modes = [("mean_std", "mean", "std"), ("min_max", "min", "max"), ("quantiles", "q01", "q99")];
    let role = role(name, feature);
    let numeric = matches!(role, Role::Action | Role::Vector | Role::Window);
    FeatureReport {
        name: name.to_string(),
        dtype: feature.dtype.clone(),
        shape: feature.shape.clone(),
        role,
        normalization: modes.iter().filter(|(_, a, b)| numeric && has(a) && has(b)).map(|m| m.0).collect(),
        video: if feature.is_video() { coding(catalog, name) } else { None },
    }
}

fn coding(catalog: &Catalog, camera: &str) -> Option<String> {
    let (codec, frames) = FrameStore::new(catalog, &[camera]).ok()?.coding(catalog, 0).ok()?;
    let codec = match codec {
        Codec::Av1 => "AV1",
        Codec::H264 => "H.264",
    };
    Some(format!("{codec}, keyframe interval {frames}"))
}

fn problems(catalog: &Catalog, features: &[FeatureReport]) -> Vec<String> {
    let mut problems = Vec::new();
    for feature in features {
        match feature.role {
            Role::Depth => problems.push(catalog.info.depth(&feature.name).to_string()),
            Role::Action | Role::Vector | Role::Window if feature.normalization.is_empty() => {
                problems.push(format!("{}: no statistics of {}", catalog.stats_path.display(), feature.name))
            }
            _ => {}
        }
    }
    if !features.iter().any(|f| f.role == Role::Action) {
        let info = catalog.info.path.display();
        problems.push(format!("{info}: no numeric feature is called action, actions or action.*"));
    }
    let of = |roles: &[Role]| {
        let mine = features.iter().filter(|f| roles.contains(&f.role));
        mine.map(|f| (f.name.clone(), f.shape.clone())).collect::<Vec<_>>()
    };
    let is_image = |name: &String| catalog.info.feature(name).is_some_and(Feature::is_image);
    let cameras = of(&[Role::Camera]).into_iter().map(|(name, _)| name).filter(is_image).collect();
    let store = RowStore::new(
        Columns { numbers: of(&[Role::Action, Role::Vector, Role::Window]), cameras },
        Limits::default(),
    );
    let files = 0..catalog.episodes.files.len() as u32;
    problems.extend(files.filter_map(|f| store.check_file(catalog, f).err()).map(|e| e.to_string()));
    problems.extend(video_problems(catalog));
    problems.truncate(PROBLEMS_SHOWN);
    problems
}

fn video_problems(catalog: &Catalog) -> Vec<String> {
    let features = catalog.info.features.iter();
    let mine = features.filter(|(_, feature)| feature.is_video() && feature.is_camera());
    let cameras: Vec<&str> = mine.map(|(name, _)| name.as_str()).collect();
    match FrameStore::new(catalog, &cameras) {
        Ok(store) => (store.files(catalog))
            .filter_map(|(camera, file)| store.check_file(catalog, camera, file, &|_| true).err())
            .map(|error| error.to_string())
            .take(PROBLEMS_SHOWN)
            .collect(),
        Err(error) => vec![error.to_string()],
    }
}

impl Report {
    /// The features that a run takes for `usual`: the one of that name, or of openpi's (`state`, `actions`);
    /// or else all its parts (`action.joints`, `action.gripper`), which a run takes side by side; or else the
    /// first of this role.
    pub fn choose(&self, role: Role, usual: &str) -> Vec<&FeatureReport> {
        let of = || self.features.iter().filter(|feature| feature.role == role);
        let last = usual.rsplit('.').next().unwrap_or(usual);
        let names = [usual, last, &format!("{last}s")];
        if let Some(whole) = names.iter().find_map(|name| of().find(|feature| feature.name == *name)) {
            return vec![whole];
        }
        let is_part = |name: &str| name.strip_prefix(usual).is_some_and(|part| part.starts_with('.'));
        let parts: Vec<_> = of().filter(|feature| is_part(&feature.name)).collect();
        // Windows are of one feature.
        match parts.is_empty() || role == Role::Window {
            true => of().take(1).collect(),
            false => parts,
        }
    }

    /// The `data:` section of a run file that uses this data set. `keys` are the task's: for each the role of
    /// the feature it names, and the usual name of that feature.
    pub fn run_section(&self, keys: &[(&str, Role, &str)]) -> String {
        let of = |role| self.features.iter().filter(move |f| f.role == role).map(|f| f.name.as_str());
        let cameras: Vec<_> = of(Role::Camera).map(yaml_scalar).collect();
        let mut out =
            format!("data:\n  path: {}\n  cameras: [{}]\n", yaml_scalar(&self.path), cameras.join(", "));
        for &(key, role, usual) in keys {
            let names: Vec<_> = self.choose(role, usual).iter().map(|one| one.name.as_str()).collect();
            if !names.is_empty() {
                out.push_str(&format!("  {key}: {}\n", yaml_names(&names)));
            }
        }
        out
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let robot = self.robot.as_deref().unwrap_or("unnamed robot");
        let [min, median, max] = self.episode_frames;
        writeln!(f, "{}: LeRobot {}, {robot}, {} fps", self.path, self.version, self.fps)?;
        writeln!(
            f,
            "  episodes: {}, frames: {} ({min} to {max} per episode, median {median})",
            self.episodes, self.frames
        )?;
        let files = if self.files == 1 { "1 data file" } else { &format!("{} data files", self.files) };
        writeln!(f, "  {files}, {}", human::bytes(self.bytes))?;
        if self.videos > 0 {
            let videos = if self.videos == 1 { "1 video" } else { &format!("{} videos", self.videos) };
            writeln!(f, "  {videos}, {}", human::bytes(self.video_bytes))?;
        }
        writeln!(f, "  fingerprint {}", self.fingerprint)?;
        writeln!(f, "  tasks ({}):", self.tasks)?;
        self.task_texts.iter().try_for_each(|text| writeln!(f, "    {text}"))?;
        if self.tasks > self.task_texts.len() {
            writeln!(f, "    ... and {} more", self.tasks - self.task_texts.len())?;
        }
        writeln!(f, "  features:")?;
        let widest = self.features.iter().map(|x| x.name.len()).max().unwrap_or(0);
        for feature in self.features.iter().filter(|x| x.role != Role::Bookkeeping) {
            let FeatureReport { name, dtype, shape, normalization, video, .. } = feature;
            let shape = shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(" x ");
            let remark = video.clone().unwrap_or_else(|| normalization.join(" "));
            writeln!(f, "    {name:widest$}  {dtype:8} {shape:14} {remark}")?;
        }
        for problem in &self.problems {
            writeln!(f, "  problem: {problem}")?;
        }
        Ok(())
    }
}
