//! Samples of a data set whose cameras are videos: what `worker/data` reads of it, as the model takes it.

use coxswain_models::families::shelf;
use coxswain_nn::kernels::sizes::Sizes;
use std::path::{Path, PathBuf};

use coxswain_data::lerobot::{Catalog, frames::FrameStore};
use coxswain_feature_store::{SampleKey, Store};
use coxswain_models::pretrained::pictures::Rgb;
use coxswain_proto::run_spec::{EpisodeRange, RunSpec};
use tempfile::TempDir;

use super::{assets, spec};
use crate::vla_flow::{
    config::VlaSpec,
    data::{Dataset, Outline},
};

const CAMERAS: [&str; 2] = ["observation.images.front", "observation.images.wrist"];
/// Episodes of 12, 17 and 10 frames; the last is alone in the second video of `front`.
const VIDEOS: [(&str, &str); 3] = [
    ("observation.images.front/chunk-000/file-000.mp4", "av1_joined.mp4"),
    ("observation.images.front/chunk-000/file-001.mp4", "av1_g2.mp4"),
    ("observation.images.wrist/chunk-001/file-003.mp4", "h264_joined.mp4"),
];

/// A file below `worker`.
fn below_worker(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
    std::fs::copy(from, to).unwrap();
}

/// The v3.0 set of `worker/data`'s tests, with its videos.
fn recorded() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let meta = ["info.json", "stats.json", "tasks.parquet", "episodes/chunk-000/file-000.parquet"];
    let meta = meta.map(|file| format!("meta/{file}"));
    for file in meta.iter().map(String::as_str).chain(["data/chunk-000/file-000.parquet"]) {
        copy(&below_worker("data/tests/fixtures/v3.0").join(file), &dir.path().join(file));
    }
    VIDEOS.into_iter().for_each(|(place, clip)| put(dir.path(), place, clip));
    dir
}

/// Puts a clip where a video of the data set is.
fn put(dir: &Path, place: &str, clip: &str) {
    copy(&below_worker("video/tests/fixtures").join(clip), &dir.join("videos").join(place));
}

fn run(dir: &Path) -> RunSpec {
    let mut spec = spec(dir);
    spec.vla_mut().data.cameras = CAMERAS.map(String::from).into();
    spec.vla_mut().data.sensor = None;
    spec.data.holdout_episodes = Vec::new();
    spec
}

fn keys(dir: &Path, store: &Path) -> (Vec<Option<SampleKey>>, u64) {
    let dataset = Dataset::from_spec(&run(dir), shelf()).unwrap();
    let keys = dataset.sample_keys(&Store::open(store, None).unwrap()).unwrap();
    ((0..dataset.len()).map(|index| keys.get(index)).collect(), keys.inputs_read)
}

#[test]
fn a_sample_holds_the_frames_of_all_cameras_as_the_processor_cuts_them() {
    let dir = recorded();
    let dataset = Dataset::from_spec(&run(dir.path()), shelf()).unwrap();
    let catalog = Catalog::open(dir.path()).unwrap();
    let frames = FrameStore::new(&catalog, &CAMERAS).unwrap();
    let model = assets().join("tiny-vla");
    let family = shelf::<Sizes>().vision_language.of(&model).unwrap();
    let processor = family.images(&model, Default::default()).unwrap();
    for index in [38, 0, 12, 11, 29] {
        let sample = dataset.sample(index).unwrap();
        let mut values = Vec::new();
        for camera in 0..CAMERAS.len() {
            let pixels = frames.frame(&catalog, camera, index).unwrap();
            let image = Rgb { height: pixels.height, width: pixels.width, pixels: pixels.rgb };
            let patches = processor.process(image).unwrap();
            assert_eq!(sample.image_shapes[camera], patches.shape);
            values.extend(patches.pixel_values);
        }
        assert_eq!(*sample.pixel_values, values, "sample {index}");
    }
    assert_eq!(
        dataset.image_shapes().unwrap(),
        Outline::from_spec(&run(dir.path()), shelf()).unwrap().images
    );
}

#[test]
fn cameras_come_in_the_order_that_the_run_names_them() {
    let dir = recorded();
    let mut swapped = run(dir.path());
    swapped.vla_mut().data.cameras.reverse();
    let (one, other) = (
        Dataset::from_spec(&run(dir.path()), shelf()).unwrap(),
        Dataset::from_spec(&swapped, shelf()).unwrap(),
    );
    let (one, other) = (one.sample(20).unwrap(), other.sample(20).unwrap());
    let front = one.image_shapes[0].iter().product::<u32>() as usize * 1176;
    assert_eq!(one.pixel_values[..front], other.pixel_values[other.pixel_values.len() - front..]);
}

#[test]
fn keys_follow_the_video_s_bytes_and_not_where_it_lies() {
    let (dir, copied, store) = (recorded(), recorded(), tempfile::tempdir().unwrap());
    let (first, hashed) = keys(dir.path(), store.path());
    assert_eq!((first.len(), hashed), (39, 3));
    assert!(first.iter().all(Option::is_some));
    assert_eq!(first.iter().collect::<std::collections::HashSet<_>>().len(), 39);
    let single = Dataset::from_spec(&run(dir.path()), shelf()).unwrap();
    for index in [0, 11, 12, 38] {
        assert_eq!(Some(single.sample_key(index).unwrap()), first[index as usize]);
    }
    // Where it lies does not matter; another video changes the names of its own frames.
    assert_eq!(keys(copied.path(), store.path()).0, first);
    put(copied.path(), VIDEOS[1].0, "av1_joined.mp4");
    let changed = keys(copied.path(), store.path()).0;
    let differ: Vec<usize> = (0..39).filter(|index| changed[*index] != first[*index]).collect();
    assert_eq!(differ, (29..39).collect::<Vec<_>>());
}

#[test]
fn a_run_whose_video_is_cut_off_is_refused_before_it_begins() {
    let dir = recorded();
    let path = dir.path().join("videos").join(VIDEOS[0].0);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let parts = ["file-000.mp4: observation.images.front: not a valid mp4 file", "copy or download it again"];
    super::broken::refused(Dataset::from_spec(&run(dir.path()), shelf()), &parts);
}

#[test]
fn a_video_of_episodes_that_are_not_asked_for_may_be_missing_or_of_another_recording() {
    let dir = recorded();
    let path = dir.path().join("videos").join(VIDEOS[1].0);
    let mut spec = run(dir.path());
    let whole = Dataset::from_spec(&spec, shelf()).unwrap().sample(0).unwrap();
    spec.vla_mut().data.exclude_episodes = vec![EpisodeRange { first: 2, last: 2 }];
    for spoil in [
        |path: &Path| std::fs::write(path, b"no video").unwrap(),
        |path: &Path| std::fs::remove_file(path).unwrap(),
    ] {
        spoil(&path);
        let dataset = Dataset::from_spec(&spec, shelf()).expect("only episode 2 is in it");
        assert_eq!(dataset.sample(0).unwrap().pixel_values, whole.pixel_values);
        super::broken::refused(Dataset::from_spec(&run(dir.path()), shelf()), &["file-001.mp4"]);
    }
}

#[test]
fn memory_for_decoders_is_foreseen_only_with_video() {
    let dir = recorded();
    let outline = |spec: &RunSpec| Outline::from_spec(spec, shelf()).unwrap().video_bytes;
    assert_eq!(outline(&super::spec(&super::mini())), 0);
    let pixels = 96 * 128 + 120 * 160;
    assert_eq!(outline(&run(dir.path())), 32 * 39 * 2 + 3 * 12 * pixels * 3 / 2);
}
