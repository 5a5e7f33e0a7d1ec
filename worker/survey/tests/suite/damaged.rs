//! What is wrong is found, with its place and its remedy; and nothing in what is whole.

use std::{fs, path::Path};

use coxswain_survey::{Finding, Frames, Job, Report, Severity, fill};
use serde_json::json;

use crate::sets::{CAMERA, copied, edit, png, recording, repository, with_videos};

fn check(dir: &Path, frames: Frames) -> Report {
    coxswain_survey::check(dir, frames, &|_, _| {})
}

fn with_statistics(dir: tempfile::TempDir) -> tempfile::TempDir {
    fill(&Job { dir: dir.path(), anew: true, force: true, progress: &|_, _| {} }).unwrap().unwrap();
    dir
}

#[track_caller]
fn only(report: &Report) -> &Finding {
    let [one] = &report.findings[..] else { panic!("{:#?}", report.findings) };
    one
}

/// The finding of this kind.
#[track_caller]
fn one<'a>(report: &'a Report, kind: &str) -> &'a Finding {
    let of_kind: Vec<_> = report.findings.iter().filter(|finding| finding.kind == kind).collect();
    let [one] = of_kind[..] else { panic!("{kind}: {:#?}", report.findings) };
    one
}

#[track_caller]
fn says(finding: &Finding, place: (&str, Option<u64>, Option<u64>), parts: &[&str]) {
    assert_eq!((finding.file.as_str(), finding.episode, finding.frame), place, "{finding:?}");
    let text = format!("{}: {}; {}", finding.feature, finding.found, finding.remedy);
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn nothing_is_wrong_with_what_is_whole() {
    let sets = [
        copied(&repository("configs/assets/metaworld-mini")),
        copied(&repository("integration-tests/fixtures/data/metaworld-v21")),
        with_statistics(with_videos()),
        with_statistics(recording(|_, _, _| ())),
    ];
    for set in sets {
        for frames in [Frames::Few, Frames::Every] {
            let report = check(set.path(), frames);
            let errors: Vec<_> =
                report.findings.iter().filter(|finding| finding.severity == Severity::Error).collect();
            assert!(errors.is_empty(), "{errors:#?}");
            assert_eq!(report.decoded == report.pictures, frames == Frames::Every);
        }
    }
}

#[test]
fn rows_that_are_of_another_frame_or_time_are_named() {
    let dir = with_statistics(recording(|_, _, _| ()));
    let stats = dir.path().join("meta/stats.json");
    let swapped = recording(|episode, frame, row| {
        if episode == 1 && (frame == 3 || frame == 4) {
            row.timestamp = (7 - frame) as f32 / 10.0;
        }
    });
    fs::copy(&stats, swapped.path().join("meta/stats.json")).unwrap();
    let report = check(swapped.path(), Frames::Few);
    let place = ("data/chunk-000/file-001.parquet", Some(1), Some(4));
    says(
        one(&report, "time decreases"),
        place,
        &["timestamp: 0.3000 s follows 0.4000 s", "frame_index / fps"],
    );
    let other = recording(|episode, frame, row| {
        if episode == 2 && frame >= 2 {
            row.keys = [2, frame as i64 + 1, 5];
        }
    });
    fs::copy(&stats, other.path().join("meta/stats.json")).unwrap();
    let report = check(other.path(), Frames::Few);
    let place = ("data/chunk-000/file-002.parquet", Some(2), Some(2));
    says(one(&report, "wrong row"), place, &["says episode 2, frame 3", "is episode 2, frame 2", "restore"]);
    assert_eq!(one(&report, "wrong row").more, 1);
    says(one(&report, "no task"), place, &["task_index: task 5 has no text"]);
    edit(&dir.path().join("meta/info.json"), |info| info["fps"] = json!(20));
    let report = check(dir.path(), Frames::Few);
    assert_eq!(report.count(Severity::Error), 0);
    assert_eq!(report.findings.iter().filter(|finding| finding.kind == "wrong rate").count(), 3);
}

#[test]
fn numbers_that_are_none_or_far_from_all_others_or_always_the_same_are_named() {
    let broken = recording(|episode, frame, row| {
        if episode == 0 && frame >= 4 {
            row.action[1] = f32::NAN;
        }
    });
    let report = check(broken.path(), Frames::Few);
    let nan = one(&report, "not finite");
    says(nan, ("data/chunk-000/file-000.parquet", Some(0), Some(4)), &["action: element 1 is NaN", "repair"]);
    assert_eq!(nan.more, 1);
    let odd = with_statistics(recording(|episode, frame, row| {
        row.action[0] = 7.0;
        if episode == 2 && frame == 1 {
            row.state[1] = 1000.0;
        }
    }));
    let report = check(odd.path(), Frames::Few);
    assert_eq!(report.count(Severity::Error), 0, "{:#?}", report.findings);
    let place = ("data/chunk-000/file-002.parquet", Some(2), Some(1));
    says(
        one(&report, "outlying"),
        place,
        &["observation.state: dimension 1", " is 1000, ", "standard deviations"],
    );
    says(one(&report, "constant"), ("", None, None), &["action: dimension 0", " is always 7"]);
}

#[test]
fn files_that_are_cut_off_or_missing_or_in_excess_are_named_and_the_others_are_read() {
    let dir = with_statistics(recording(|_, _, _| ()));
    let file = |n: usize| dir.path().join(format!("data/chunk-000/file-{n:03}.parquet"));
    fs::copy(file(0), file(7)).unwrap();
    says(
        only(&check(dir.path(), Frames::Few)),
        ("data/chunk-000/file-007.parquet", None, None),
        &["the episode table does not name this file"],
    );
    let whole = fs::read(file(1)).unwrap();
    fs::write(file(1), &whole[..whole.len() / 2]).unwrap();
    let report = check(dir.path(), Frames::Every);
    let cut = report.findings.iter().find(|finding| finding.file.ends_with("file-001.parquet")).unwrap();
    says(
        cut,
        ("data/chunk-000/file-001.parquet", None, None),
        &["cannot be read as parquet", "copy or download"],
    );
    assert_eq!(report.decoded, 10, "of the two episodes that are left");
    fs::remove_file(file(1)).unwrap();
    fs::remove_file(file(2)).unwrap();
    let report = check(dir.path(), Frames::Few);
    let found: Vec<_> = report.findings.iter().map(|finding| (finding.kind, finding.file.as_str())).collect();
    assert_eq!(
        found,
        [
            ("missing", "data/chunk-000/file-001.parquet"),
            ("missing", "data/chunk-000/file-002.parquet"),
            ("not used", "data/chunk-000/file-007.parquet"),
        ]
    );
    assert_eq!(report.decoded, 3, "of the episode that is left");
    assert!(report.findings[0].remedy.contains("data.exclude_episodes: [1]"), "{:?}", report.findings[0]);
    let none = tempfile::tempdir().unwrap();
    says(only(&check(none.path(), Frames::Few)), ("meta/info.json", None, None), &["missing", "LeRobot"]);
}

#[test]
fn pictures_that_do_not_decode_are_found_among_those_that_are_asked_for() {
    let dir = with_statistics(recording(|_, _, _| ()));
    let damaged = recording(|episode, frame, row| {
        if episode == 1 && frame == 1 {
            row.image.truncate(60);
        }
        if episode == 2 {
            row.image = png(200);
        }
    });
    fs::copy(dir.path().join("meta/stats.json"), damaged.path().join("meta/stats.json")).unwrap();
    let few = check(damaged.path(), Frames::Few);
    says(only(&few), ("", Some(2), None), &[CAMERA, "a single colour (decoded: 3)", "covered"]);
    let every = check(damaged.path(), Frames::Every);
    let place = ("data/chunk-000/file-001.parquet", Some(1), Some(1));
    says(
        one(&every, "unreadable"),
        place,
        &[CAMERA, "does not decode", "restore the file, or record the frame again"],
    );
}

#[test]
fn a_video_that_is_cut_off_is_named_once_and_others_are_decoded() {
    let dir = with_statistics(with_videos());
    let path = dir.path().join("videos/observation.images.front/chunk-000/file-001.mp4");
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let report = check(dir.path(), Frames::Every);
    let place = ("videos/observation.images.front/chunk-000/file-001.mp4", None, None);
    says(
        one(&report, "video"),
        place,
        &["observation.images.front: not a valid mp4 file", "copy or download"],
    );
    assert_eq!(report.count(Severity::Error), 1);
    assert_eq!(report.decoded, 2 * report.frames - 10, "the third episode's ten frames are lost");
}

#[test]
fn statistics_of_other_data_are_named_with_both_numbers() {
    let dir = copied(&repository("configs/assets/metaworld-mini"));
    let stats = dir.path().join("meta/stats.json");
    edit(&stats, |stats| {
        stats["action"]["mean"][2] = json!(0.75);
        stats["observation.state"]["q01"][1] = json!(99.0);
        stats["observation.sensor"].as_object_mut().unwrap().remove("std");
    });
    let report = check(dir.path(), Frames::Few);
    let wrong: Vec<_> = report.findings.iter().filter(|finding| finding.kind == "wrong statistics").collect();
    assert_eq!(wrong.len(), 2, "{:#?}", report.findings);
    says(
        wrong[0],
        ("meta/stats.json", None, None),
        &["action: mean of dimension 2", "is 0.750000, but ", "in the data", "--anew"],
    );
    says(
        wrong[1],
        ("meta/stats.json", None, None),
        &["observation.state: q01 of dimension 1", " is 99, but q99 is 0."],
    );
    says(one(&report, "no statistics"), ("meta/stats.json", None, None), &["observation.sensor: no std"]);
}
