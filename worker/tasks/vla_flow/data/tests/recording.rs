//! A small v3.0 data set made on the spot, so that it can be made wrong in exactly one place.

use std::{fs::File, io::Cursor, path::Path, sync::Arc};

use arrow::array::{
    Array, ArrayRef, BinaryBuilder, Int64Array, ListArray, ListBuilder, PrimitiveBuilder, RecordBatch,
    StringArray, StructArray,
};
use arrow::datatypes::{DataType, Field, Float32Type};
use coxswain_proto::run_spec::RunSpec;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};
use tempfile::TempDir;

/// What is recorded. Values are functions of (episode, frame), so that tests can say what a sample must hold.
#[derive(Clone)]
pub struct Recording {
    /// Length and data file of each episode.
    pub episodes: Vec<(usize, usize)>,
    /// Name, height and width of each camera.
    pub cameras: Vec<(&'static str, usize, usize)>,
    /// Replaces element 0 of a numeric feature in a sample.
    pub poison: Option<(&'static str, usize, f32)>,
    /// Replaces what the first camera has of a sample.
    pub image: Option<(usize, Option<Vec<u8>>)>,
    /// The task of an episode, by its number.
    pub episode_task: fn(usize) -> String,
    /// Replaces the task index of a sample.
    pub task: Option<(usize, i64)>,
    /// Elements actually written for the state.
    pub state_width: usize,
    pub properties: WriterProperties,
    /// A row group for every episode, as LeRobot writes them, or one for the whole file.
    pub group_per_episode: bool,
}

pub const WINDOW: usize = 3;
pub const CHANNELS: usize = 2;

impl Default for Recording {
    fn default() -> Self {
        Self {
            episodes: vec![(5, 0), (1, 0), (7, 1), (4, 2)],
            cameras: vec![("observation.images.front", 30, 40), ("observation.images.wrist", 28, 28)],
            poison: None,
            image: None,
            episode_task: task,
            task: None,
            state_width: 3,
            properties: WriterProperties::default(),
            group_per_episode: true,
        }
    }
}

pub fn state(episode: usize, frame: usize) -> [f32; 3] {
    [episode as f32, frame as f32, 0.5]
}

pub fn action(episode: usize, frame: usize) -> [f32; 2] {
    [10.0 * episode as f32 + frame as f32, -(frame as f32)]
}

pub fn sensor(episode: usize, frame: usize) -> [f32; WINDOW * CHANNELS] {
    std::array::from_fn(|i| (100 * episode + 10 * frame + i) as f32)
}

pub fn task(episode: usize) -> String {
    format!("task of episode {episode}")
}

/// A flat image whose shade names its sample and camera.
pub fn png(shade: u8, height: usize, width: usize) -> Vec<u8> {
    let image = image::RgbImage::from_pixel(width as u32, height as u32, image::Rgb([shade; 3]));
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, image::ImageFormat::Png).expect("a png in memory");
    bytes.into_inner()
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
        let mut writer: Option<ArrowWriter<File>> = None;
        let frames = self.frames();
        for (episode, _) in self.episodes.iter().enumerate().filter(|(_, (_, f))| *f == file) {
            let mine: Vec<&Frame> = frames.iter().filter(|f| f.episode == episode).collect();
            if mine.is_empty() {
                continue;
            }
            let batch = self.batch(&mine);
            let writer = writer.get_or_insert_with(|| {
                let target = File::create(&path).expect("a file");
                ArrowWriter::try_new(target, batch.schema(), Some(self.properties.clone())).expect("a writer")
            });
            writer.write(&batch).expect("a batch");
            if self.group_per_episode {
                writer.flush().expect("a row group");
            }
        }
        writer.expect("every file has an episode").close().expect("a footer");
    }

    fn batch(&self, frames: &[&Frame]) -> RecordBatch {
        let int = |f: fn(&Frame) -> usize| -> ArrayRef {
            Arc::new(frames.iter().map(|x| f(x) as i64).collect::<Int64Array>())
        };
        let tasks = frames.iter().map(|f| match self.task {
            Some((sample, task)) if sample == f.sample => task,
            _ => f.episode as i64,
        });
        let poisoned = |feature: &str, f: &Frame, mut values: Vec<f32>| {
            if let Some((name, sample, value)) = self.poison
                && (name, sample) == (feature, f.sample)
            {
                values[0] = value;
            }
            values
        };
        let vectors = |name: &str, of: &dyn Fn(&Frame) -> Vec<f32>| -> ArrayRef {
            list(frames.iter().map(|f| poisoned(name, f, of(f))))
        };
        let states = vectors("observation.state", &|f| {
            state(f.episode, f.frame).into_iter().cycle().take(self.state_width).collect()
        });
        let actions = vectors("action", &|f| action(f.episode, f.frame).into());
        let windows = nested(
            frames.iter().map(|f| poisoned("observation.sensor", f, sensor(f.episode, f.frame).into())),
        );
        let mut columns: Vec<(String, ArrayRef)> = vec![
            ("observation.state".into(), states),
            ("observation.sensor".into(), windows),
            ("action".into(), actions),
        ];
        for (number, (name, height, width)) in self.cameras.iter().enumerate() {
            let encode = |f: &&Frame| match &self.image {
                Some((sample, bytes)) if *sample == f.sample && number == 0 => bytes.clone(),
                _ => Some(png((f.sample * 10 + number) as u8, *height, *width)),
            };
            columns.push((name.to_string(), images(frames.iter().map(encode))));
        }
        columns.push(("frame_index".into(), int(|f| f.frame)));
        columns.push(("episode_index".into(), int(|f| f.episode)));
        columns.push(("index".into(), int(|f| f.sample)));
        columns.push(("task_index".into(), Arc::new(tasks.collect::<Int64Array>())));
        RecordBatch::try_from_iter(columns).expect("columns of one length")
    }

    fn write_metadata(&self, dir: &Path) {
        let meta = dir.join("meta");
        std::fs::create_dir_all(meta.join("episodes/chunk-000")).expect("a directory");
        let of = |f: &dyn Fn(usize, &(usize, usize)) -> usize| -> ArrayRef {
            let values = self.episodes.iter().enumerate().map(|(n, e)| f(n, e) as i64);
            Arc::new(values.collect::<Int64Array>())
        };
        let episodes = [
            ("episode_index", of(&|n, _| n)),
            ("length", of(&|_, e| e.0)),
            ("data/chunk_index", of(&|_, e| e.1 / 2)),
            ("data/file_index", of(&|_, e| e.1)),
        ];
        write_table(&meta.join("episodes/chunk-000/file-000.parquet"), episodes);
        let texts: ArrayRef =
            Arc::new((0..self.episodes.len()).map(|n| Some((self.episode_task)(n))).collect::<StringArray>());
        write_table(&meta.join("tasks.parquet"), [("task_index", of(&|n, _| n)), ("task", texts)]);
        let vector = |n: usize| json!({"dtype": "float32", "shape": [n], "names": null});
        let mut features = json!({
            "observation.state": vector(3), "action": vector(2),
            "observation.sensor": {"dtype": "float32", "shape": [WINDOW, CHANNELS], "names": null},
        });
        for (name, height, width) in &self.cameras {
            features[*name] = json!({"dtype": "image", "shape": [height, width, 3], "names": ["height", "width", "channels"]});
        }
        for name in crate::data::lerobot::info::BOOKKEEPING {
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
                   "q01": all(-2.0), "q99": all(2.0)})
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

fn write_table<const N: usize>(path: &Path, columns: [(&str, ArrayRef); N]) {
    let batch = RecordBatch::try_from_iter(columns).expect("columns of one length");
    let mut writer =
        ArrowWriter::try_new(File::create(path).expect("a file"), batch.schema(), None).expect("a writer");
    writer.write(&batch).expect("a batch");
    writer.close().expect("a footer");
}

fn list(rows: impl Iterator<Item = Vec<f32>>) -> ArrayRef {
    let mut builder = ListBuilder::new(PrimitiveBuilder::<Float32Type>::new());
    for row in rows {
        builder.values().append_slice(&row);
        builder.append(true);
    }
    Arc::new(builder.finish())
}

fn nested(rows: impl Iterator<Item = Vec<f32>>) -> ArrayRef {
    let mut builder = ListBuilder::new(ListBuilder::new(PrimitiveBuilder::<Float32Type>::new()));
    for row in rows {
        for reading in row.chunks(CHANNELS) {
            builder.values().values().append_slice(reading);
            builder.values().append(true);
        }
        builder.append(true);
    }
    let lists: ListArray = builder.finish();
    Arc::new(lists)
}

fn images(rows: impl Iterator<Item = Option<Vec<u8>>>) -> ArrayRef {
    let mut bytes = BinaryBuilder::new();
    rows.for_each(|row| bytes.append_option(row));
    let bytes: ArrayRef = Arc::new(bytes.finish());
    let paths: ArrayRef = Arc::new(StringArray::from(vec!["frame.png"; bytes.len()]));
    Arc::new(StructArray::from(vec![
        (Arc::new(Field::new("bytes", DataType::Binary, true)), bytes),
        (Arc::new(Field::new("path", DataType::Utf8, true)), paths),
    ]))
}
