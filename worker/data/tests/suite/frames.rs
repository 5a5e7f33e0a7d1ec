//! Samples show the frames that FFmpeg and swscale give for them, wherever in whichever video they lie.

use std::collections::HashMap;

use coxswain_data::{
    Role, inspect,
    lerobot::{Catalog, frames::FrameStore},
    orientation::Orientation,
};
use serde_json::json;

use crate::sets::{FRONT, Layout, V21, V30, clip, edit_info, open, put, rgb_crcs};

/// Checks one camera of one sample; says what it decodes to.
fn check(store: &FrameStore, catalog: &Catalog, layout: &Layout, crcs: &HashMap<&str, Vec<u32>>, index: u64) {
    for (camera, (file, frame)) in layout.samples()[index as usize].into_iter().enumerate() {
        let pixels = store.frame(catalog, camera, index).unwrap();
        let found = crc32fast::hash(&pixels.rgb);
        assert_eq!(found, crcs[file][frame], "{} sample {index}: {file} frame {frame}", layout.version);
        assert_eq!(pixels.rgb.len(), pixels.height * pixels.width * 3);
    }
}

fn crcs(layout: &Layout) -> HashMap<&'static str, Vec<u32>> {
    layout.videos.iter().map(|(_, file)| (*file, rgb_crcs(file))).collect()
}

#[test]
fn every_sample_shows_ffmpeg_s_frame_in_both_layouts() {
    for layout in [V30, V21] {
        let dir = layout.write();
        let (catalog, store) = open(dir.path());
        store
            .files(&catalog)
            .for_each(|(camera, file)| store.check_file(&catalog, camera, file, &|_| true).unwrap());
        let samples = catalog.episodes.frames();
        assert_eq!(samples, layout.samples().len() as u64);
        let crcs = crcs(&layout);
        // In order, and then in an order that jumps between episodes and files.
        let jumping = (0..samples).map(|n| n * 31 % samples);
        (0..samples).chain(jumping).for_each(|index| check(&store, &catalog, &layout, &crcs, index));
        assert!(store.frame(&catalog, 0, samples).is_err());
    }
}

#[test]
fn a_data_set_of_symbolic_links_is_read_as_one_of_files() {
    let (dir, blobs, crcs) = (V30.write(), tempfile::tempdir().unwrap(), crcs(&V30));
    // As the cache of Hugging Face's hub is made.
    let paths = ["meta/info.json", "data/chunk-000/file-000.parquet", V30.videos[0].0];
    for (number, path) in paths.into_iter().enumerate() {
        let blob = blobs.path().join(number.to_string());
        std::fs::rename(dir.path().join(path), &blob).unwrap();
        std::os::unix::fs::symlink(blob, dir.path().join(path)).unwrap();
    }
    let (catalog, store) = open(dir.path());
    (0..catalog.episodes.frames()).for_each(|index| check(&store, &catalog, &V30, &crcs, index));
}

#[test]
fn threads_reading_at_once_read_the_same_frames() {
    let (dir, crcs) = (V30.write(), crcs(&V30));
    let (catalog, store) = open(dir.path());
    let samples = catalog.episodes.frames();
    std::thread::scope(|scope| {
        for shift in 0..4 {
            let (catalog, store, crcs) = (&catalog, &store, &crcs);
            scope.spawn(move || {
                (0..2 * samples)
                    .for_each(|n| check(store, catalog, &V30, crcs, (n * 7 + shift * 11) % samples))
            });
        }
    });
}

#[test]
fn an_inspected_data_set_counts_its_videos_and_offers_their_cameras() {
    for layout in [V30, V21] {
        let dir = layout.write();
        let report = inspect(dir.path()).unwrap();
        assert_eq!(report.problems, Vec::<String>::new());
        assert_eq!(report.videos, layout.videos.len());
        let bytes = layout.videos.iter().map(|(_, file)| clip(file).metadata().unwrap().len());
        assert_eq!(report.video_bytes, bytes.sum::<u64>());
        let cameras = report.features.iter().filter(|feature| feature.role == Role::Camera);
        let coded: Vec<_> = cameras.map(|camera| camera.video.as_deref().unwrap()).collect();
        assert_eq!(coded.len(), 2);
        assert!(
            coded[0].starts_with("AV1, keyframe interval ") && coded[1].starts_with("H.264, "),
            "{coded:?}"
        );
        let section = report.run_section(&[]);
        assert!(
            section.contains("cameras: [observation.images.front, observation.images.wrist]"),
            "{section}"
        );
    }
}

#[test]
fn the_fingerprint_follows_the_videos_and_not_the_path() {
    let (one, other) = (V30.write(), V30.write());
    let fingerprint = |dir: &std::path::Path| Catalog::open(dir).unwrap().fingerprint;
    assert_eq!(fingerprint(one.path()), fingerprint(other.path()));
    let (path, _) = V30.videos[1];
    put(other.path(), path, &std::fs::read(clip("av1_joined.mp4")).unwrap());
    assert_ne!(fingerprint(one.path()), fingerprint(other.path()));
    std::fs::remove_file(other.path().join(path)).unwrap();
    assert_ne!(fingerprint(one.path()), fingerprint(other.path()));
}

#[test]
fn a_camera_that_is_not_asked_for_may_be_away() {
    let dir = V30.write();
    std::fs::remove_dir_all(dir.path().join("videos/observation.images.wrist")).unwrap();
    let catalog = Catalog::open(dir.path()).unwrap();
    let store = FrameStore::new(&catalog, &[FRONT]).unwrap();
    store
        .files(&catalog)
        .for_each(|(camera, file)| store.check_file(&catalog, camera, file, &|_| true).unwrap());
    assert!(store.frame(&catalog, 0, 38).is_ok());
}

/// A clip that players rotate: the matrix of its track is this one.
fn rotated(file: &str, matrix: [i32; 4]) -> Vec<u8> {
    let mut bytes = std::fs::read(clip(file)).unwrap();
    let head = bytes.windows(4).position(|kind| kind == b"tkhd").unwrap() + 4;
    let [a, b, c, d] = matrix.map(|number| (number << 16).to_be_bytes());
    for (at, number) in [(0, a), (1, b), (3, c), (4, d)] {
        bytes[head + 40 + 4 * at..][..4].copy_from_slice(&number);
    }
    bytes
}

#[test]
fn a_video_that_players_rotate_is_rotated() {
    let video = V30.videos[1].0;
    let dir = V30.write();
    let (catalog, store) = open(dir.path());
    let stored = store.frame(&catalog, 0, 30).unwrap();
    put(dir.path(), video, &rotated("av1_g2.mp4", [-1, 0, 0, -1]));
    let (catalog, store) = open(dir.path());
    assert_eq!(store.frame(&catalog, 0, 30).unwrap(), Orientation::HALF.apply(stored.clone()));
    put(dir.path(), video, &rotated("av1_g2.mp4", [0, 1, -1, 0]));
    let (catalog, store) = open(dir.path());
    let error = store.frame(&catalog, 0, 30).unwrap_err().to_string();
    assert!(
        error.contains("frames of 128x96 (height x width)") && error.contains("other videos have 96x128"),
        "{error}"
    );
    edit_info(dir.path(), |info| info["features"][FRONT]["shape"] = json!([128, 96, 3]));
    let (catalog, store) = open(dir.path());
    assert_eq!(store.frame(&catalog, 0, 30).unwrap(), Orientation::RIGHT.apply(stored));
    put(dir.path(), video, &rotated("av1_g2.mp4", [-1, 0, 0, 1]));
    let (catalog, store) = open(dir.path());
    let error = store.frame(&catalog, 0, 30).unwrap_err().to_string();
    assert!(error.contains("a mirrored video") && error.contains("ffmpeg"), "{error}");
}
