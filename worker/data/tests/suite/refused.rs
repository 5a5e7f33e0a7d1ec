//! Videos that cannot be used are named, with what is wrong and what helps, and cost no more than the frames
//! that need them.

use std::{fs, path::Path};

use coxswain_data::{DataError, inspect, lerobot::Catalog};
use coxswain_video::Video;
use serde_json::json;

use crate::sets::{FRONT, Layout, V21, V30, clip, edit_info, open, put};

#[track_caller]
fn says(error: impl ToString, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// What checking all videos says first.
#[track_caller]
fn refused(dir: &Path, parts: &[&str]) {
    let (catalog, store) = open(dir);
    let mut files = store.files(&catalog);
    let error = files.find_map(|(camera, file)| store.check_file(&catalog, camera, file, &|_| true).err());
    says(error.expect("a video is refused"), parts);
    let report = inspect(dir).unwrap();
    says(report.problems.join("\n"), parts);
}

fn with(layout: &Layout, video: usize, bytes: &[u8]) -> tempfile::TempDir {
    let dir = layout.write();
    put(dir.path(), layout.videos[video].0, bytes);
    dir
}

#[test]
fn a_video_that_is_cut_off_or_missing_is_named_and_others_are_read() {
    let bytes = fs::read(clip("av1_g2.mp4")).unwrap();
    for keep in [0, 20, bytes.len() / 2, bytes.len() - 10] {
        let dir = with(&V30, 1, &bytes[..keep]);
        refused(
            dir.path(),
            &["front/chunk-000/file-001.mp4: ", FRONT, "not a whole mp4 file", "copy or download"],
        );
        let (catalog, store) = open(dir.path());
        assert!(store.frame(&catalog, 0, 28).is_ok());
        assert!(store.frame(&catalog, 0, 29).is_err());
        assert!(store.frame(&catalog, 1, 29).is_ok());
    }
    let dir = V21.write();
    fs::remove_file(dir.path().join(V21.videos[2].0)).unwrap();
    refused(dir.path(), &["wrist/episode_000000.mp4: ", "cannot be read: No such file"]);
}

#[test]
fn a_pointer_of_git_lfs_is_named_with_the_command_that_brings_the_file() {
    let dir = V30.write();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n";
    put(dir.path(), "meta/episodes/chunk-000/file-000.parquet", pointer);
    says(Catalog::open(dir.path()).map(drop).unwrap_err(), &["file-000.parquet", "`git lfs pull`"]);
}

#[test]
fn other_codecs_and_depth_are_refused_by_name_with_the_command_that_converts() {
    let cases = [
        ("no_hevc.mp4", "HEVC (H.265) is not decoded here"),
        ("no_depth.mp4", "a depth map (HEVC, 12 bit grey) is not decoded here"),
        ("no_vp9.mp4", "VP9 is not decoded here"),
    ];
    for (file, what) in cases {
        let dir = with(&V30, 0, &fs::read(clip(file)).unwrap());
        refused(
            dir.path(),
            &["file-000.mp4: observation.images.front: ", what, "`ffmpeg -i IN.mp4 -c:v libx264"],
        );
    }
    let dir = V30.write();
    edit_info(dir.path(), |info| info["features"][FRONT]["info"]["video.is_depth_map"] = json!(true));
    let catalog = Catalog::open(dir.path()).unwrap();
    let named = catalog.info.require("cameras", FRONT, |feature| feature.is_camera());
    let parts =
        ["info.json", FRONT, "a depth map, which is not decoded", "leave it out of data.cameras", "ffmpeg"];
    says(named.unwrap_err(), &parts);
    says(inspect(dir.path()).unwrap().problems.join("\n"), &parts);
}

#[test]
fn a_damaged_frame_is_an_error_of_its_samples_and_no_others() {
    let mut bytes = fs::read(clip("av1_g2.mp4")).unwrap();
    let video = Video::open(&clip("av1_g2.mp4")).unwrap();
    let of = video.index().samples()[8];
    bytes[of.offset as usize..][..of.size as usize].fill(0xff);
    let dir = with(&V30, 1, &bytes);
    let (catalog, store) = open(dir.path());
    // Episode 2 begins at frame 4 of this video, and frames 8 and 9 are one group.
    for index in 29..39 {
        let frame = store.frame(&catalog, 0, index);
        assert_eq!(frame.is_err(), (33..35).contains(&index), "sample {index}");
    }
    let error = store.frame(&catalog, 0, 34).unwrap_err();
    says(
        &error,
        &[
            "file-001.mp4: sample 34 (episode 2, frame 5): observation.images.front: frame 9 of the video: damaged picture",
        ],
    );
    assert!(matches!(error, DataError::Sample { index: 34, .. }));
}

#[test]
fn a_video_of_another_recording_is_named_with_its_episode() {
    let dir = with(&V30, 0, &fs::read(clip("av1_g2.mp4")).unwrap());
    let short = ["file-000.mp4", "episode 1", "its 17 frames begin at frame 12", "the video has 20 frames"];
    refused(dir.path(), &short);
    let dir = V21.write();
    edit_info(dir.path(), |info| info["fps"] = json!(30));
    refused(
        dir.path(),
        &["episode_000000.mp4", "frame 19 is expected at 0.633 s", "30 frames a second", "0.950 s"],
    );
    let dir = V30.write();
    edit_info(dir.path(), |info| info["features"][FRONT]["shape"] = json!([128, 96, 3]));
    refused(dir.path(), &["info.json", "front.shape", "128x96 (height x width)", "are 96x128", "`names`"]);
}

#[test]
fn metadata_that_places_no_frames_is_refused() {
    let opened = |change: fn(&mut serde_json::Value)| {
        let dir = V30.write();
        edit_info(dir.path(), change);
        Catalog::open(dir.path()).map(drop).unwrap_err()
    };
    let overlap = [
        "meta/episodes",
        "videos/observation.images.front/from_timestamp",
        "episode 1 begins at 0.6 s",
        "within episode 0",
    ];
    says(opened(|info| info["fps"] = json!(10)), &overlap);
    says(opened(|info| info["fps"] = json!(0)), &["info.json", "fps", "found by it"]);
    says(opened(|info| info["fps"] = json!(-30)), &["info.json", "fps", "found by it"]);
    let outside = ["_path", "relative to it, without `..`"];
    says(opened(|info| info["video_path"] = json!("/etc/passwd")), &outside);
    says(opened(|info| info["data_path"] = json!("data/../../file-{file_index:03d}.parquet")), &outside);
    says(
        opened(|info| drop(info.as_object_mut().unwrap().remove("video_path"))),
        &["video_path", "missing", "expected e.g."],
    );
    says(opened(|info| info["video_path"] = json!("{video_key:03d}")), &["video_path", "{video_key:03d}"]);
    let unplaced = |info: &mut serde_json::Value| {
        let front = info["features"][FRONT].clone();
        info["features"]["observation.images.top"] = front;
    };
    says(
        opened(unplaced),
        &["file-000.parquet", "videos/observation.images.top/chunk_index", "restore the metadata"],
    );
}

#[test]
fn a_video_that_changes_under_way_is_an_error_and_not_another_picture() {
    let dir = V30.write();
    let (catalog, store) = open(dir.path());
    assert!(store.frame(&catalog, 0, 29).is_ok());
    put(dir.path(), V30.videos[1].0, &fs::read(clip("av1_joined.mp4")).unwrap());
    says(
        store.frame(&catalog, 0, 30).unwrap_err(),
        &["sample 30", "changed since it was indexed", "start again"],
    );
}
