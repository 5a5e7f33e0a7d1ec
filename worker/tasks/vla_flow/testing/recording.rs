//! A small v3.0 data set made on the spot, so that it can be made wrong in exactly one place.

use crate::vla_flow::config::VlaSpec;
use std::path::Path;

use coxswain_proto::run_spec::RunSpec;
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::table::{Column, write_table};

/// What is recorded. Values are functions of (episode, frame), so that tests can say what a sample must hold.
#[derive(Clone)]
pub struct Recording {
    /// Length and data file of each episode.
    pub episodes: Vec<(usize, usize)>,
    /// Name, height and width of each camera.
    pub cameras: Vec<(&'static str, usize, usize)>,
    /// Replaces element 0 of a numeric feature in a sample.
    pub poison: Option<(&'static str, usize, f32)>,
    /// Leaves out element 0 of a numeric feature in a sample.
    pub missing: Option<(&'static str, usize)>,
    /// Replaces what the first camera has of a sample.
    pub image: Option<(usize, Option<Vec<u8>>)>,
    /// The task of an episode, by its number.
    pub episode_task: fn(usize) -> String,
    /// Replaces the task index of a sample.
    pub task: Option<(usize, i64)>,
    /// Elements actually written for the state.
    pub state_width: usize,
    /// How files of rows are written.
    pub properties: WriterProperties,
    /// A row group for every episode, as LeRobot writes them, or one for the whole file.
    pub group_per_episode: bool,
    /// Every camera sees the same in all frames, which a file has once.
    pub still: bool,
}

/// Readings of a sensor in a sample.
pub const WINDOW: usize = 3;
/// Values of a reading.
pub const CHANNELS: usize = 2;

impl Default for Recording {
    fn default() -> Self {
        Self {
            episodes: vec![(5, 0), (1, 0), (7, 1), (4, 2)],
            cameras: vec![("observation.images.front", 30, 40), ("observation.images.wrist", 28, 28)],
            poison: None,
            missing: None,
            image: None,
            episode_task: task,
            task: None,
            state_width: 3,
            properties: WriterProperties::default(),
            group_per_episode: true,
            still: false,
        }
    }
}

/// What is recorded of the robot.
pub fn state(episode: usize, frame: usize) -> [f32; 3] {
    [episode as f32, frame as f32, 0.5]
}

/// What it did.
pub fn action(episode: usize, frame: usize) -> [f32; 2] {
    [10.0 * episode as f32 + frame as f32, -(frame as f32)]
}

/// What its sensor felt.
pub fn sensor(episode: usize, frame: usize) -> [f32; WINDOW * CHANNELS] {
    std::array::from_fn(|i| (100 * episode + 10 * frame + i) as f32)
}

/// What an episode is about.
pub fn task(episode: usize) -> String {
    format!("task of episode {episode}")
}

/// A flat image whose shade names its sample and camera.
pub fn png(shade: u8, height: usize, width: usize) -> Vec<u8> {
    png_of(&vec![shade; 3 * height * width], height, width)
}

/// An image of these pixels.
pub fn png_of(pixels: &[u8], height: usize, width: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().and_then(|mut w| w.write_image_data(pixels)).expect("a png in memory");
    bytes
}

struct Frame {
    episode: usize,
    frame: usize,
    sample: usize,
}

impl Recording {
    /// Writes the data set to a new directory.
    pub fn write(&self) -> TempDir {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let files = self.episodes.iter().map(|(_, file)| file + 1).max().unwrap_or(0);
        for file in 0..files {
            self.write_file(dir.path(), file);
        }
        self.write_metadata(dir.path());
        dir
    }

    /// A run that names everything here.
    pub fn spec(&self, dir: &Path) -> RunSpec {
        let mut spec = super::spec(dir);
        spec.vla_mut().data.cameras = self.cameras.iter().map(|(name, ..)| name.to_string()).collect();
        spec.data.holdout_episodes = Vec::new();
        spec.vla_mut().data.horizon = 4;
        spec
    }

    fn frames(&self) -> Vec<Frame> {
        let all = self.episodes.iter().enumerate();
        let pairs = all.flat_map(|(episode, (length, _))| (0..*length).map(move |frame| (episode, frame)));
        pairs.enumerate().map(|(sample, (episode, frame))| Frame { episode, frame, sample }).collect()
    }

    fn write_file(&self, dir: &Path, file: usize) {
        let path = dir.join(format!("data/chunk-{:03}/file-{file:03}.parquet", file / 2));
        std::fs::create_dir_all(path.parent().expect("below data")).expect("a directory");
        let frames = self.frames();
        let mut groups: Vec<Vec<&Frame>> = Vec::new();
        for (episode, _) in self.episodes.iter().enumerate().filter(|(_, (_, f))| *f == file) {
            let mine = frames.iter().filter(|f| f.episode == episode);
            match groups.last_mut() {
                Some(group) if !self.group_per_episode => group.extend(mine),
                _ => groups.push(mine.collect()),
            }
        }
        groups.retain(|group| !group.is_empty());
        let groups: Vec<_> = groups.iter().map(|group| self.columns(group)).collect();
        write_table(&path, &groups, self.properties.clone());
    }

    fn columns(&self, frames: &[&Frame]) -> Vec<(String, Column)> {
        let int = |f: fn(&Frame) -> usize| Column::Integers(frames.iter().map(|x| f(x) as i64).collect());
        let tasks = frames.iter().map(|f| match self.task {
            Some((sample, task)) if sample == f.sample => task,
            _ => f.episode as i64,
        });
        let rows = |feature: &str, of: &dyn Fn(&Frame) -> Vec<f32>| -> Vec<Vec<Option<f32>>> {
            let row = |f: &&Frame| {
                let mut values: Vec<_> = of(f).into_iter().map(Some).collect();
                if let Some((name, sample, value)) = self.poison
                    && (name, sample) == (feature, f.sample)
                {
                    values[0] = Some(value);
                }
                if self.missing == Some((feature, f.sample)) {
                    values[0] = None;
                }
                values
            };
            frames.iter().map(row).collect()
        };
        let states = rows("observation.state", &|f| {
            state(f.episode, f.frame).into_iter().cycle().take(self.state_width).collect()
        });
        let windows = rows("observation.sensor", &|f| sensor(f.episode, f.frame).into());
        let mut columns: Vec<(String, Column)> = vec![
            ("observation.state".into(), Column::Lists(states)),
            ("observation.sensor".into(), Column::ListsOfLists(windows, CHANNELS)),
            ("action".into(), Column::Lists(rows("action", &|f| action(f.episode, f.frame).into()))),
        ];
        for (number, (name, height, width)) in self.cameras.iter().enumerate() {
            let encode = |f: &&Frame| match &self.image {
                Some((sample, bytes)) if *sample == f.sample && number == 0 => bytes.clone(),
                _ if self.still => Some(png(number as u8, *height, *width)),
                _ => Some(png((f.sample * 10 + number) as u8, *height, *width)),
            };
            columns.push((name.to_string(), Column::Images(frames.iter().map(encode).collect())));
        }
        columns.push(("frame_index".into(), int(|f| f.frame)));
        columns.push(("episode_index".into(), int(|f| f.episode)));
        columns.push(("index".into(), int(|f| f.sample)));
        columns.push(("task_index".into(), Column::Integers(tasks.collect())));
        columns
    }

    fn write_metadata(&self, dir: &Path) {
        let meta = dir.join("meta");
        std::fs::create_dir_all(meta.join("episodes/chunk-000")).expect("a directory");
        let of = |f: &dyn Fn(usize, &(usize, usize)) -> usize| {
            Column::Integers(self.episodes.iter().enumerate().map(|(n, e)| f(n, e) as i64).collect())
        };
        let episodes = vec![
            ("episode_index".into(), of(&|n, _| n)),
            ("length".into(), of(&|_, e| e.0)),
            ("data/chunk_index".into(), of(&|_, e| e.1 / 2)),
            ("data/file_index".into(), of(&|_, e| e.1)),
        ];
        let properties = WriterProperties::default;
        write_table(&meta.join("episodes/chunk-000/file-000.parquet"), &[episodes], properties());
        let texts = Column::Texts((0..self.episodes.len()).map(|n| (self.episode_task)(n)).collect());
        let tasks = vec![("task_index".into(), of(&|n, _| n)), ("task".into(), texts)];
        write_table(&meta.join("tasks.parquet"), &[tasks], properties());
        let vector = |n: usize| json!({"dtype": "float32", "shape": [n], "names": null});
        let mut features = json!({
            "observation.state": vector(3), "action": vector(2),
            "observation.sensor": {"dtype": "float32", "shape": [WINDOW, CHANNELS], "names": null},
        });
        for (name, height, width) in &self.cameras {
            features[*name] = json!({"dtype": "image", "shape": [height, width, 3], "names": ["height", "width", "channels"]});
        }
        for name in coxswain_data::lerobot::info::BOOKKEEPING {
            features[name] = json!({"dtype": "int64", "shape": [1], "names": null});
        }
        let info = json!({
            "codebase_version": "v3.0", "robot_type": "test", "fps": 10, "chunks_size": 1000,
            "total_episodes": self.episodes.len(),
            "total_frames": self.episodes.iter().map(|e| e.0).sum::<usize>(),
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "features": features,
        });
        write_json(&meta.join("info.json"), &info);
        let stats = |n: usize| {
            let all = |v: f64| vec![v; n];
            json!({"mean": all(1.0), "std": all(2.0), "min": all(-4.0), "max": all(4.0), "count": [17],
                   "q01": all(-2.0), "q99": all(2.0), "q10": all(-1.0), "q90": all(3.0)})
        };
        let stats =
            json!({"observation.state": stats(3), "action": stats(2), "observation.sensor": stats(CHANNELS)});
        write_json(&meta.join("stats.json"), &stats);
    }
}

/// Changes one of a data set's JSON files.
pub fn edit(dir: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = dir.join(file);
    let text = std::fs::read_to_string(&path).expect("a metadata file");
    let mut value = serde_json::from_str(&text).expect("JSON");
    change(&mut value);
    write_json(&path, &value);
}

fn write_json(path: &Path, value: &Value) {
    std::fs::write(path, value.to_string()).expect("a file");
}
