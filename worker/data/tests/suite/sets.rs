//! The data sets, put together from what is committed here and the clips of `worker/video`.

use std::path::{Path, PathBuf};

use coxswain_data::lerobot::{Catalog, frames::FrameStore};
use serde_json::Value;
use tempfile::TempDir;

pub const FRONT: &str = "observation.images.front";
pub const WRIST: &str = "observation.images.wrist";

/// A clip, and the first frame in it.
type First = (&'static str, usize);

/// One layout: where clips go, and what each episode's frames are.
pub struct Layout {
    pub version: &'static str,
    /// Path below the data set, and the clip that lies there.
    pub videos: &'static [(&'static str, &'static str)],
    /// Each episode's length, then clip and first frame in it for front and wrist.
    pub episodes: &'static [(u64, First, First)],
}

pub const V30: Layout = Layout {
    version: "v3.0",
    videos: &[
        ("videos/observation.images.front/chunk-000/file-000.mp4", "av1_joined.mp4"),
        ("videos/observation.images.front/chunk-000/file-001.mp4", "av1_g2.mp4"),
        ("videos/observation.images.wrist/chunk-001/file-003.mp4", "h264_joined.mp4"),
    ],
    episodes: &[
        (12, ("av1_joined.mp4", 0), ("h264_joined.mp4", 10)),
        (17, ("av1_joined.mp4", 12), ("h264_joined.mp4", 40)),
        (10, ("av1_g2.mp4", 4), ("h264_joined.mp4", 0)),
    ],
};

pub const V21: Layout = Layout {
    version: "v2.1",
    videos: &[
        ("videos/chunk-000/observation.images.front/episode_000000.mp4", "av1_g2.mp4"),
        ("videos/chunk-000/observation.images.front/episode_000001.mp4", "av1_joined.mp4"),
        ("videos/chunk-000/observation.images.wrist/episode_000000.mp4", "h264_edit_list.mp4"),
        ("videos/chunk-000/observation.images.wrist/episode_000001.mp4", "h264_g12_b.mp4"),
    ],
    episodes: &[
        (20, ("av1_g2.mp4", 0), ("h264_edit_list.mp4", 0)),
        (29, ("av1_joined.mp4", 0), ("h264_g12_b.mp4", 0)),
    ],
};

impl Layout {
    /// The whole data set in a directory of its own.
    pub fn write(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures");
        let committed = fixtures.join(self.version);
        copy(&committed, dir.path());
        for (path, file) in self.videos {
            put(dir.path(), path, &std::fs::read(clip(file)).unwrap());
        }
        dir
    }

    /// Clip and frame of each sample, for front and wrist.
    pub fn samples(&self) -> Vec<[(&'static str, usize); 2]> {
        let of = |&(length, front, wrist): &(u64, (&'static str, usize), (&'static str, usize))| {
            (0..length as usize).map(move |n| [(front.0, front.1 + n), (wrist.0, wrist.1 + n)])
        };
        self.episodes.iter().flat_map(of).collect()
    }
}

/// An opened data set, and the store of its two cameras' frames.
pub fn open(dir: &Path) -> (Catalog, FrameStore) {
    let catalog = Catalog::open(dir).unwrap();
    let store = FrameStore::new(&catalog, &[FRONT, WRIST]).unwrap();
    (catalog, store)
}

/// A clip of `worker/video`.
pub fn clip(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../video/tests/fixtures").join(file)
}

/// CRC-32 of what swscale makes of each frame of a clip.
pub fn rgb_crcs(file: &str) -> Vec<u32> {
    let golden = std::fs::read_to_string(clip("golden.txt")).unwrap();
    let mut lines = golden.lines().skip_while(|line| !line.starts_with(&format!("clip {file} ")));
    lines.next().expect("the clip is in the list");
    let frames = lines.take_while(|line| !line.starts_with("clip ") && !line.starts_with("colour "));
    frames.map(|line| u32::from_str_radix(line.rsplit(' ').next().unwrap(), 16).unwrap()).collect()
}

pub fn put(dir: &Path, path: &str, bytes: &[u8]) {
    let path = dir.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// Changes `meta/info.json`.
pub fn edit_info(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join("meta/info.json");
    let mut info = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut info);
    std::fs::write(path, info.to_string()).unwrap();
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
        if path.is_dir() {
            std::fs::create_dir_all(to.join(&name)).unwrap();
            copy(&path, &to.join(&name));
        } else {
            std::fs::copy(&path, to.join(&name)).unwrap();
        }
    }
}
