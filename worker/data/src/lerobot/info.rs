//! `meta/info.json`: version, sizes, and where data files lie. Rules of one feature are in [`feature`].
//!
//! [`feature`]: super::feature
//!
//! Unknown keys are ignored, as LeRobot does: later versions and forks add their own.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use coxswain_proto::limits::MAX_FEATURE_VALUES;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    feature::Feature,
    template::{TemplateValue, expand, leaves, numbered},
};
use crate::{error::DataError, place, text::read_json};

/// Columns that LeRobot keeps for itself.
pub const BOOKKEEPING: [&str; 5] = ["timestamp", "frame_index", "episode_index", "index", "task_index"];

/// Layouts of a LeRobot data set on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Version {
    /// One parquet file per episode, metadata in JSON lines, statistics of all episodes together.
    #[serde(rename = "v2.0")]
    V2_0,
    /// One parquet file per episode as in v2.0, with statistics of each episode.
    #[serde(rename = "v2.1")]
    V2_1,
    /// Many episodes per parquet file, metadata in parquet.
    #[serde(rename = "v3.0")]
    V3_0,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V2_0 => "v2.0",
            Self::V2_1 => "v2.1",
            Self::V3_0 => "v3.0",
        })
    }
}

/// What `info.json` says.
#[derive(Clone, Debug)]
pub struct Info {
    /// The file itself.
    pub path: PathBuf,
    /// Layout.
    pub version: Version,
    /// Frames per second.
    pub fps: f64,
    /// Robot, if named.
    pub robot: Option<String>,
    /// Episodes.
    pub episodes: u64,
    /// Frames of all episodes.
    pub frames: u64,
    /// Episodes in one chunk directory (v2.1, v2.0).
    pub chunk_size: u64,
    /// Features in file order.
    pub features: Vec<(String, Feature)>,
    data_path: String,
    video_path: Option<String>,
}

#[derive(Deserialize)]
struct Raw {
    codebase_version: String,
    #[serde(default)]
    robot_type: Option<String>,
    total_episodes: u64,
    total_frames: u64,
    #[serde(default = "default_chunk_size")]
    chunks_size: u64,
    fps: f64,
    data_path: String,
    #[serde(default)]
    video_path: Option<String>,
    features: Map<String, Value>,
}

fn default_chunk_size() -> u64 {
    1000
}

impl Info {
    /// Reads `meta/info.json` below `root`.
    pub fn read(root: &Path) -> Result<Self, DataError> {
        let path = root.join("meta/info.json");
        if place::bytes(&path)?.is_none() {
            let remedy = match place::is_remote(root) || root.is_dir() {
                true => "data.path must name a LeRobot directory of v3.0, v2.1 or v2.0".to_owned(),
                false if root.is_file() => "a LeRobot data set is a directory; to check data of another \
                                            format, pass the run file: `cox data check CONFIG`"
                    .to_owned(),
                false => {
                    let place = std::path::absolute(root).unwrap_or_else(|_| root.to_path_buf());
                    format!("there is no directory {}: correct data.path", place.display())
                }
            };
            return Err(DataError::invalid(&path, "(file)", "missing", remedy));
        }
        let value: Value = read_json(&path)?;
        refuse_other_storage(&path, &value)?;
        refuse_quoted_numbers(&path, &value)?;
        let raw: Raw = read_json(&path)?;
        let version = match raw.codebase_version.as_str() {
            "v3.0" => Version::V3_0,
            "v2.1" => Version::V2_1,
            "v2.0" => Version::V2_0,
            other => {
                return Err(DataError::invalid(
                    &path,
                    "codebase_version",
                    format!("{other:?}"),
                    "v3.0, v2.1 and v2.0 are supported: convert an older data set with LeRobot's scripts; \
                     for a newer one, use a newer cox",
                ));
            }
        };
        let mut features = Vec::with_capacity(raw.features.len());
        for (name, value) in raw.features {
            let feature: Feature = serde_json::from_value(value).map_err(|e| {
                DataError::invalid(&path, format!("features.{name}"), e.to_string(), "needs dtype and shape")
            })?;
            if !feature.is_possible() {
                let found = format!("{:?}, more than {MAX_FEATURE_VALUES} values in a frame", feature.shape);
                let field = format!("features.{name}.shape");
                return Err(DataError::invalid(&path, field, found, "restore info.json from the recording"));
            }
            features.push((name, feature));
        }
        if raw.total_episodes == 0 || raw.total_frames == 0 {
            let found = format!("{} episodes, {} frames", raw.total_episodes, raw.total_frames);
            return Err(DataError::invalid(&path, "total_frames", found, "record at least one episode"));
        }
        if !(raw.fps > 0.0 && raw.fps.is_finite()) {
            let remedy = "it is used to find frames: set it to the recording's frames per second";
            return Err(DataError::invalid(&path, "fps", raw.fps.to_string(), remedy));
        }
        for (field, template) in
            [("data_path", Some(&raw.data_path)), ("video_path", raw.video_path.as_ref())]
        {
            if let Some(outside) = template.filter(|template| leaves(template)) {
                let remedy =
                    "files of a data set must be in its directory: name them relative to it, without `..`";
                return Err(DataError::invalid(&path, field, format!("{outside:?}"), remedy));
            }
        }
        Ok(Self {
            path,
            version,
            fps: raw.fps,
            robot: raw.robot_type,
            episodes: raw.total_episodes,
            frames: raw.total_frames,
            chunk_size: raw.chunks_size.max(1),
            features,
            data_path: raw.data_path,
            video_path: raw.video_path,
        })
    }

    /// Where task texts are, beside the file.
    pub fn tasks_path(&self) -> PathBuf {
        self.path.with_file_name(match self.version {
            Version::V3_0 => "tasks.parquet",
            Version::V2_1 | Version::V2_0 => "tasks.jsonl",
        })
    }

    /// The feature of this name.
    pub fn feature(&self, name: &str) -> Option<&Feature> {
        self.features.iter().find(|(n, _)| n == name).map(|(_, f)| f)
    }

    /// The feature that `data.<key>` names, if it is there and `fits`; otherwise an error listing those that
    /// would do.
    pub fn require(
        &self,
        key: &'static str,
        name: &str,
        fits: impl Fn(&Feature) -> bool,
    ) -> Result<&Feature, DataError> {
        let candidates = self.candidates(&fits);
        let available = if candidates.is_empty() { "none".to_owned() } else { candidates.join(", ") };
        match self.feature(name) {
            Some(feature) if fits(feature) => Ok(feature),
            Some(feature) if feature.is_depth() && key == "cameras" => Err(self.depth(name)),
            Some(feature) => Err(DataError::invalid(
                &self.path,
                format!("features.{name}"),
                format!(
                    "dtype {} and shape {:?} cannot be used for data.{key}",
                    feature.dtype, feature.shape
                ),
                format!("suitable features: {available}"),
            )),
            None => Err(DataError::UnknownFeature {
                path: self.path.clone(),
                key,
                name: name.into(),
                available,
                suggestion: nearest(name, &candidates),
            }),
        }
    }

    /// The error of a run that names the depth map `name` as a camera.
    pub fn depth(&self, name: &str) -> DataError {
        let remedy = "leave it out of data.cameras, or convert it to an ordinary video: \
                      `ffmpeg -i IN.mp4 -vf normalize -c:v libx264 -pix_fmt yuv420p -g 2 OUT.mp4`, and set is_depth_map: false";
        DataError::invalid(
            &self.path,
            format!("features.{name}"),
            "a depth map, which is not supported",
            remedy,
        )
    }

    fn candidates(&self, fits: impl Fn(&Feature) -> bool) -> Vec<String> {
        let usable = |(n, f): &&(String, Feature)| !BOOKKEEPING.contains(&n.as_str()) && fits(f);
        self.features.iter().filter(usable).map(|(n, _)| n.clone()).collect()
    }

    /// Data file `file` of chunk `chunk`, relative to the data set; in v2.1 and v2.0 `file` is the episode.
    pub fn data_file(&self, chunk: u64, file: u64) -> Result<String, DataError> {
        expand(&self.data_path, |name| numbered(name, chunk, file)).ok_or_else(|| {
            DataError::invalid(
                &self.path,
                "data_path",
                format!("{:?}", self.data_path),
                "expected e.g. data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            )
        })
    }

    /// Video `file` of chunk `chunk` of a camera, relative to the data set; in v2.1 and v2.0 `file` is the
    /// episode.
    pub fn video_file(&self, camera: &str, chunk: u64, file: u64) -> Result<String, DataError> {
        let invalid = |found: String| {
            let remedy = "expected e.g. videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4";
            DataError::invalid(&self.path, "video_path", found, remedy)
        };
        let template = self.video_path.as_deref().ok_or_else(|| invalid("missing".into()))?;
        let fill = |name: &str| match name {
            "video_key" => Some(TemplateValue::Text(camera)),
            _ => numbered(name, chunk, file),
        };
        expand(template, fill).ok_or_else(|| invalid(format!("{template:?}")))
    }
}

/// LeRobot says how rows and videos are stored, if not in files of their own.
fn refuse_other_storage(path: &Path, info: &Value) -> Result<(), DataError> {
    let format = info.get("storage_format").and_then(Value::as_str);
    let Some(other) = format.filter(|format| !matches!(*format, "parquet" | "default")) else {
        return Ok(());
    };
    let found = format!("{other:?}: a storage format of another library");
    let remedy =
        "only parquet and mp4 are supported: set data.path to the data set that this one was converted from";
    Err(DataError::invalid(path, "storage_format", found, remedy))
}

/// A number in quotation marks is a text.
fn refuse_quoted_numbers(path: &Path, info: &Value) -> Result<(), DataError> {
    for field in ["fps", "total_episodes", "total_frames", "chunks_size"] {
        let text = info.get(field).and_then(Value::as_str);
        if let Some(number) = text.filter(|text| text.parse::<f64>().is_ok()) {
            let remedy = format!("write a number without quotes: `\"{field}\": {number}`");
            return Err(DataError::invalid(path, field, format!("the text {number:?}"), remedy));
        }
    }
    Ok(())
}

/// The candidate closest to `name`, if it is close at all.
fn nearest(name: &str, candidates: &[String]) -> Option<String> {
    let scored = candidates.iter().map(|c| (strsim::jaro_winkler(name, c), c));
    let (score, best) = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (score > 0.7).then(|| best.clone())
}

#[cfg(test)]
mod tests {
    use coxswain_proto::limits::MAX_METADATA_BYTES;

    use super::*;

    #[test]
    fn a_shape_that_no_frame_has_is_refused_by_its_feature() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("meta")).unwrap();
        let read = |shape: Value| {
            let info = serde_json::json!({
                "codebase_version": "v3.0", "total_episodes": 1, "total_frames": 1, "fps": 10, "data_path": "",
                "features": {"action": {"dtype": "float32", "shape": shape}},
            });
            std::fs::write(dir.path().join("meta/info.json"), info.to_string()).unwrap();
            Info::read(dir.path())
        };
        assert_eq!(read(serde_json::json!([7, 2])).unwrap().features[0].1.width(), 14);
        for shape in [serde_json::json!([1u64 << 40, 1u64 << 40]), serde_json::json!([1u64 << 29])] {
            let error = read(shape).unwrap_err().to_string();
            assert!(
                error.contains("features.action.shape") && error.contains("values in a frame"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_named_as_it_was_looked_for() {
        let error = Info::read(Path::new("no/such")).unwrap_err().to_string();
        let place = std::env::current_dir().unwrap().join("no/such");
        assert!(error.contains(&format!("there is no directory {}: ", place.display())), "{error}");
        let error = Info::read(Path::new("Cargo.toml")).unwrap_err().to_string();
        assert!(error.contains("a LeRobot data set is a directory; ") && error.contains("CONFIG"), "{error}");
    }

    #[test]
    fn another_storage_format_is_named_whatever_else_the_file_lacks() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("meta")).unwrap();
        let info = r#"{"codebase_version": "v3.0", "storage_format": "lance", "fps": 10}"#;
        std::fs::write(dir.path().join("meta/info.json"), info).unwrap();
        let error = Info::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("storage_format: \"lance\"") && error.contains("parquet and mp4"), "{error}");
    }

    #[test]
    fn metadata_without_an_end_is_not_read_to_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("meta")).unwrap();
        let file = std::fs::File::create(dir.path().join("meta/info.json")).unwrap();
        // Takes no room on the disk.
        file.set_len(MAX_METADATA_BYTES + 1).unwrap();
        let error = Info::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("info.json: cannot read: it has more than"), "{error}");
    }
}
