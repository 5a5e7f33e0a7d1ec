//! Videos that cannot be used are named, with what is wrong and what helps, and cost no more than the frames
//! that need them.

use std::{fs, path::Path};

use coxswain_data::{DataError, NormMode, Normalizer, inspect, lerobot::Catalog};
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
    for keep in [20, bytes.len() / 2, bytes.len() - 10] {
        let dir = with(&V30, 1, &bytes[..keep]);
        refused(
            dir.path(),
            &["front/chunk-000/file-001.mp4: ", FRONT, "not a valid mp4 file", "copy or download"],
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
    let dir = with(&V30, 1, pointer);
    refused(dir.path(), &["front/chunk-000/file-001.mp4: ", FRONT, "a Git LFS pointer", "`git lfs pull`"]);
    let dir = with(&V30, 1, b"");
    refused(dir.path(), &["front/chunk-000/file-001.mp4: ", FRONT, "is empty", "copy or download it again"]);
}

#[test]
fn other_codecs_and_depth_are_refused_by_name_with_the_command_that_converts() {
    let cases = [
        ("no_hevc.mp4", "HEVC (H.265) is not supported"),
        ("no_depth.mp4", "a depth map (HEVC, 12 bit grey) is not supported"),
        ("no_vp9.mp4", "VP9 is not supported"),
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
        ["info.json", FRONT, "a depth map, which is not supported", "leave it out of data.cameras", "ffmpeg"];
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
    let short =
        ["file-000.mp4", "episode 1", "its 17 frames begin at frame 12", "the video has only 20 frames"];
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
fn a_video_of_another_size_than_the_others_is_to_blame_itself() {
    let dir = with(&V30, 1, &fs::read(clip("h264_joined.mp4")).unwrap());
    let parts = [
        "front/chunk-000/file-001.mp4: observation.images.front: frames of 120x160 (height x width)",
        "but info.json and other videos have 96x128",
        "leave its episodes out with `data.exclude_episodes: [2]`, or re-encode it",
        "scale=128:96",
    ];
    refused(dir.path(), &parts);
}

#[test]
fn a_shape_that_the_rows_have_not_is_blamed_before_statistics_of_the_rows() {
    let dir = V30.write();
    let normalizer = |width: usize| {
        let catalog = Catalog::open(dir.path()).unwrap();
        Normalizer::new(&catalog, "action", width, NormMode::MeanStd).map(drop)
    };
    assert!(normalizer(2).is_ok());
    edit_info(dir.path(), |info| info["features"]["action"]["shape"] = json!([7]));
    let error = normalizer(7).unwrap_err().to_string();
    says(&error, &["info.json: features.action.shape: [7], but the data has rows of length 2; correct"]);
    assert!(!error.contains("cox data stats"), "{error}");
    edit_info(dir.path(), |info| info["features"]["action"]["shape"] = json!([2]));
    put(dir.path(), "meta/stats.json", br#"{"action": {"mean": [1, 2, 3], "std": [1, 2, 3]}}"#);
    says(
        normalizer(2).unwrap_err(),
        &["stats.json: action.mean: 3 values", "`cox data stats --anew --force`"],
    );
}

#[test]
fn statistics_that_are_empty_are_none_and_broken_ones_have_a_remedy() {
    let dir = V30.write();
    put(dir.path(), "meta/stats.json", b"\n");
    let catalog = Catalog::open(dir.path()).unwrap();
    assert_eq!(catalog.stats, None);
    let error = Normalizer::new(&catalog, "action", 2, NormMode::MeanStd).map(drop).unwrap_err();
    says(error, &["stats.json: action: no statistics", "`cox data stats`"]);
    put(dir.path(), "meta/stats.json", b"{\"action\": ");
    says(
        Catalog::open(dir.path()).map(drop).unwrap_err(),
        &[
            "stats.json: line 1: EOF",
            "restore the file, or remove it and compute the statistics with `cox data stats`",
        ],
    );
    let dir = V21.write();
    put(dir.path(), "meta/episodes_stats.jsonl", b"");
    assert_eq!(Catalog::open(dir.path()).unwrap().stats, None);
}

#[test]
fn leaving_episodes_out_is_no_way_where_none_would_be_left() {
    let missing = |layout: &Layout, path: &str| {
        let dir = layout.write();
        fs::remove_file(dir.path().join(path)).unwrap();
        Catalog::open(dir.path()).unwrap().missing_file(0).to_string()
    };
    let only = missing(&V30, "data/chunk-000/file-000.parquet");
    assert!(only.contains("copy or download it") && !only.contains("exclude_episodes"), "{only}");
    let one = missing(&V21, "data/chunk-000/episode_000000.parquet");
    says(one, &["copy or download it, or leave this file's episodes out with `data.exclude_episodes: [0]`"]);
}

#[test]
fn an_episode_that_is_lost_is_named_with_the_way_to_count_the_others_anew() {
    let dir = V21.write();
    let path = dir.path().join("meta/episodes.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.split_once('\n').unwrap().1).unwrap();
    let parts = ["episodes.jsonl", "episode 1 where 0 was expected", "docs/guide/renumber_episodes.py"];
    says(Catalog::open(dir.path()).map(drop).unwrap_err(), &parts);
}

#[test]
fn metadata_that_is_missing_is_to_be_restored() {
    for (layout, path) in [
        (&V21, "meta/episodes.jsonl"),
        (&V21, "meta/tasks.jsonl"),
        (&V30, "meta/episodes"),
        (&V30, "meta/tasks.parquet"),
    ] {
        let dir = layout.write();
        let lost = dir.path().join(path);
        if lost.is_dir() {
            fs::remove_dir_all(&lost).unwrap()
        } else {
            fs::remove_file(&lost).unwrap()
        }
        says(
            Catalog::open(dir.path()).map(drop).unwrap_err(),
            &[path, "missing; restore the data set's folder `meta`"],
        );
    }
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
        "episode 0 (from 0 s)",
        "episode 1 (from 0.6 s) overlap",
    ];
    says(opened(|info| info["fps"] = json!(10)), &overlap);
    says(opened(|info| info["fps"] = json!(0)), &["info.json", "fps", "used to find frames"]);
    says(opened(|info| info["fps"] = json!(-30)), &["info.json", "fps", "used to find frames"]);
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
fn numbers_in_quotation_marks_and_other_versions_are_told_with_the_way() {
    let opened = |field: &str, value: &str| {
        let dir = V30.write();
        edit_info(dir.path(), |info| info[field] = json!(value));
        Catalog::open(dir.path()).map(drop).unwrap_err()
    };
    for (field, number) in [("fps", "10"), ("total_frames", "39")] {
        let told =
            format!("{field}: the text \"{number}\"; write a number without quotes: `\"{field}\": {number}`");
        says(opened(field, number), &["info.json", &told]);
    }
    for version in ["v1.6", "v3.1", "v4", "v4.0"] {
        let told = format!("codebase_version: \"{version}\"; v3.0, v2.1 and v2.0 are supported");
        says(opened("codebase_version", version), &["info.json", &told, "for a newer one, use a newer cox"]);
    }
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
