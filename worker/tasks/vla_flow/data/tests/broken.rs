//! Bad input: every fault of a data set is refused with the file, the field or sample, and a remedy.

use crate::vla_flow::config::VlaSpec;
use coxswain_models::families::shelf;
use std::path::Path;

use coxswain_data::NormMode;
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::Samples;
use serde_json::{Value, json};

use super::recording::{Recording, edit};
use crate::vla_flow::data::Dataset;
use coxswain_data::{DataError, inspect, lerobot::rows::Part};

/// Opens the recording's data set after `spoil` had its way with directory and spec.
fn open_spoiled(
    recording: &Recording,
    spoil: impl FnOnce(&Path, &mut RunSpec),
) -> Result<Dataset, DataError> {
    let dir = recording.write();
    let mut spec = recording.spec(dir.path());
    spoil(dir.path(), &mut spec);
    let opened = Dataset::from_spec(&spec, shelf());
    // Rows are read later than this, so the directory has to live on.
    drop(dir.keep());
    opened
}

#[track_caller]
pub(super) fn refused<T>(result: Result<T, DataError>, says: &[&str]) {
    let text = match result {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    };
    for part in says {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[track_caller]
fn refused_at_open(spoil: impl FnOnce(&Path, &mut RunSpec), says: &[&str]) {
    refused(open_spoiled(&Recording::default(), spoil), says);
}

#[test]
fn a_missing_data_set_or_camera_is_named_with_what_there_is() {
    refused_at_open(|_, s| s.data.path = "/nowhere".into(), &["/nowhere/meta/info.json", "data.path"]);
    refused_at_open(
        |_, s| s.vla_mut().data.cameras = vec!["observation.image.front".into()],
        &[
            "info.json",
            "data.cameras names `observation.image.front`",
            "did you mean `observation.images.front`?",
            "observation.images.wrist",
        ],
    );
    refused_at_open(
        |_, s| s.vla_mut().data.state = "observation.sate".into(),
        &["data.state", "`observation.state`"],
    );
    refused_at_open(
        |_, s| s.vla_mut().data.sensor = Some("force".into()),
        &["data.sensor names `force`", "observation.sensor"],
    );
    refused_at_open(
        |_, s| s.vla_mut().data.action = "observation.images.front".into(),
        &["features.observation.images.front", "dtype image", "data.action"],
    );
}

#[test]
fn a_video_that_the_episodes_do_not_place_is_refused_with_the_remedy() {
    let as_video = |info: Value| {
        move |dir: &Path, _: &mut RunSpec| {
            edit(dir, "meta/info.json", |i| {
                i["features"]["observation.images.front"]["dtype"] = json!("video");
                i["features"]["observation.images.front"]["info"] = info;
            })
        }
    };
    let unplaced = ["file-000.parquet", "videos/observation.images.front/chunk_index", "restore"];
    refused_at_open(as_video(json!({"video.codec": "av1"})), &unplaced);
}

#[test]
fn versions_and_metadata_that_cannot_be_read_are_refused() {
    let version = |v: &'static str| {
        move |dir: &Path, _: &mut RunSpec| edit(dir, "meta/info.json", |i| i["codebase_version"] = json!(v))
    };
    refused_at_open(version("v1.6"), &["info.json", "codebase_version", "v1.6", "convert"]);
    refused_at_open(
        |d, _| std::fs::write(d.join("meta/info.json"), "{ not json").unwrap(),
        &["info.json", "line 1"],
    );
    refused_at_open(
        |d, _| std::fs::remove_file(d.join("meta/tasks.parquet")).unwrap(),
        &["tasks.parquet", "missing", "restore the data set's folder `meta`"],
    );
    refused_at_open(
        |d, _| edit(d, "meta/info.json", |i| i["data_path"] = json!("data/{what}.parquet")),
        &["info.json", "data_path", "{what}"],
    );
    refused_at_open(|d, _| edit(d, "meta/info.json", |i| i["total_frames"] = json!(99)), &["99", "17"]);
    refused_at_open(
        |d, _| edit(d, "meta/info.json", |i| i["total_frames"] = json!(0)),
        &["total_frames", "record"],
    );
}

#[test]
fn an_empty_episode_is_named() {
    let recording = Recording { episodes: vec![(5, 0), (0, 0), (3, 0)], ..Default::default() };
    refused(
        open_spoiled(&recording, |_, _| ()),
        &["meta/episodes", "episode 1 is empty", "delete the episode"],
    );
}

#[test]
fn statistics_that_are_missing_or_of_another_length_are_named() {
    refused_at_open(
        |d, _| std::fs::remove_file(d.join("meta/stats.json")).unwrap(),
        &["stats.json", "observation.state", "no statistics", "identity"],
    );
    refused_at_open(
        |d, s| {
            s.vla_mut().data.normalization.action = NormMode::Quantiles;
            edit(d, "meta/stats.json", |v| drop(v["action"].as_object_mut().unwrap().remove("q99")));
        },
        &["stats.json", "action.q99", "missing"],
    );
    refused_at_open(
        |d, _| edit(d, "meta/stats.json", |v| v["action"]["std"] = json!([1.0, 2.0, 3.0])),
        &["action.std", "3 values for a feature of width 2"],
    );
    refused_at_open(
        |d, _| edit(d, "meta/stats.json", |v| v["action"]["std"] = json!([1.0, null])),
        &["stats.json", "action.std", "element 1 is not a finite number"],
    );
    // What nobody normalises may be anything, Python's `NaN` among it.
    let opened = open_spoiled(&Recording::default(), |d, _| {
        let path = d.join("meta/stats.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let odd = r#"{"depth": {"std": [NaN], "min": null, "unit": "m"}, "comment": "by hand", "#;
        std::fs::write(&path, text.replacen('{', odd, 1)).unwrap();
        let report = inspect(d).unwrap();
        assert_eq!(report.problems, Vec::<String>::new());
    });
    assert!(opened.is_ok_and(|d| d.sample(0).is_ok()));
    // Without normalisation nobody needs statistics.
    let opened = open_spoiled(&Recording::default(), |d, s| {
        std::fs::remove_file(d.join("meta/stats.json")).unwrap();
        s.vla_mut().data.normalization.state = NormMode::Identity;
        s.vla_mut().data.normalization.action = NormMode::Identity;
        s.vla_mut().data.normalization.sensor = NormMode::Identity;
    });
    assert!(opened.is_ok_and(|d| d.sample(0).is_ok()));
}

#[test]
fn a_dimension_that_never_changes_is_no_fault_and_a_warning() {
    let still = |d: &Path| {
        edit(d, "meta/stats.json", |v| {
            let action = &mut v["action"];
            action["std"][1] = json!(0.0);
            for extreme in ["min", "max"] {
                action[extreme][1] = action["mean"][1].clone();
            }
        });
    };
    let warnings = |spoil: &dyn Fn(&Path)| {
        open_spoiled(&Recording::default(), |d, _| spoil(d)).expect("it can be trained on").warnings()
    };
    assert_eq!(warnings(&|_| ()), Vec::<String>::new());
    let told = warnings(&still);
    assert!(told.len() == 1 && told[0].starts_with("action: dimension 1 never changes"), "{told:?}");
}

#[test]
fn values_that_normalization_makes_far_too_large_are_a_warning() {
    // A gripper that closes in one of two hundred frames: both quantiles are those of the open one.
    let opened = open_spoiled(&Recording::default(), |d, s| {
        s.vla_mut().data.normalization.action = NormMode::Quantiles;
        edit(d, "meta/stats.json", |v| {
            for (name, value) in [("min", 0.0), ("max", 1.0), ("q01", 0.0), ("q99", 0.0)] {
                v["action"][name] = json!([value, value]);
            }
            v["action"]["q99"][0] = json!(1.0);
        });
    });
    let told = opened.expect("it can be trained on").warnings();
    let parts = [
        "action: dimension 1 has a value of 1.0,",
        "`quantiles` (q01 0 and q99 0)",
        "2.0e8",
        "data.normalization.action",
    ];
    assert!(told.len() == 1 && parts.iter().all(|part| told[0].contains(part)), "{told:?}");
}

#[test]
fn truncated_and_missing_data_files_are_named_at_open() {
    let file = "data/chunk-000/file-001.parquet";
    let cut = |keep: fn(u64) -> u64| {
        move |dir: &Path, _: &mut RunSpec| {
            let target = std::fs::OpenOptions::new().write(true).open(dir.join(file)).unwrap();
            target.set_len(keep(target.metadata().unwrap().len())).unwrap();
        }
    };
    refused_at_open(cut(|n| n - 9), &[file, "cannot be read as parquet", "download"]);
    refused_at_open(cut(|_| 0), &[file, "cannot be read as parquet"]);
    refused_at_open(
        |d, _| std::fs::remove_file(d.join(file)).unwrap(),
        &[file, "there is no such file", "data.exclude_episodes: [2]"],
    );
}

#[test]
fn a_data_file_garbled_in_the_middle_is_named_when_it_is_read() {
    let file = "data/chunk-000/file-000.parquet";
    let dataset = open_spoiled(&Recording::default(), |dir, _| {
        let mut bytes = std::fs::read(dir.join(file)).unwrap();
        let middle = bytes.len() / 2;
        bytes[8..middle].fill(0xa5);
        std::fs::write(dir.join(file), bytes).unwrap();
    });
    let dataset = dataset.expect("the footer is intact");
    refused(dataset.sample(0), &["file-000.parquet"]);
}

#[test]
fn metadata_and_data_of_different_recordings_do_not_mix() {
    let other = Recording { episodes: vec![(6, 0), (1, 0), (6, 1), (4, 2)], ..Default::default() };
    let mix = |dir: &Path, _: &mut RunSpec| {
        let theirs = other.write();
        let file = "data/chunk-000/file-000.parquet";
        std::fs::copy(theirs.path().join(file), dir.join(file)).unwrap();
    };
    refused_at_open(mix, &["file-000.parquet", "7 rows", "metadata says 6"]);
    // The same number of rows, cut into episodes differently: seen when the row is read.
    let shifted = Recording { episodes: vec![(4, 0), (2, 0), (7, 1), (4, 2)], ..Default::default() };
    let dataset = open_spoiled(&Recording::default(), |dir, _| {
        let theirs = shifted.write();
        let file = "data/chunk-000/file-000.parquet";
        std::fs::copy(theirs.path().join(file), dir.join(file)).unwrap();
    });
    refused(dataset.unwrap().sample(4), &["sample 4 (episode 0, frame 4)", "episode 1, frame 0"]);
}

#[test]
fn a_value_that_is_not_there_is_named_by_feature_sample_and_file() {
    for feature in ["observation.state", "observation.sensor", "action"] {
        let recording = Recording { missing: Some((feature, 8)), ..Default::default() };
        let dataset = open_spoiled(&recording, |_, _| ()).unwrap();
        refused(
            dataset.sample(8),
            &["file-001.parquet", "sample 8 (episode 2, frame 2)", feature, "a value is missing (null)"],
        );
    }
}

#[test]
fn nan_and_infinity_are_named_by_feature_sample_and_file() {
    for (feature, value, shown) in [
        ("observation.state", f32::NAN, "NaN"),
        ("action", f32::INFINITY, "inf"),
        ("observation.sensor", f32::NEG_INFINITY, "-inf"),
    ] {
        let recording = Recording { poison: Some((feature, 8, value)), ..Default::default() };
        let dataset = open_spoiled(&recording, |_, _| ()).unwrap();
        refused(
            dataset.sample(8),
            &["file-001.parquet", "sample 8 (episode 2, frame 2)", feature, shown, "delete the episode"],
        );
        assert!(dataset.sample(9).is_ok(), "only the sample itself is affected");
        // An earlier sample whose chunk of actions reaches the bad one names the bad one.
        if feature == "action" {
            refused(dataset.sample(6), &["sample 8 (episode 2, frame 2)"]);
        }
    }
}

#[test]
fn a_damaged_row_is_named_with_all_samples_that_need_it() {
    for feature in ["observation.state", "action"] {
        let recording = Recording { poison: Some((feature, 8, f32::NAN)), ..Default::default() };
        let dataset = open_spoiled(&recording, |_, _| ()).unwrap();
        let damaged = dataset.sample(8).map(drop).expect_err("it is poisoned");
        let row = dataset.damaged_row(8, &damaged);
        assert_eq!(row.row, 8);
        let named = (0..dataset.training_len()).filter(|number| (row.begin..row.end).contains(number));
        let named: Vec<_> = named.filter_map(|number| dataset.training_sample(number)).collect();
        let failing = |sample: &u64| dataset.sample(*sample).is_err();
        let training = (0..dataset.training_len()).filter_map(|number| dataset.training_sample(number));
        let failing: Vec<_> = training.filter(failing).collect();
        assert_eq!(named, failing, "{feature}");
        // It is the same row for every sample that asks.
        for &sample in &failing {
            let fault = dataset.sample(sample).map(drop).expect_err("it needs the row");
            assert_eq!(dataset.damaged_row(sample, &fault), row, "{feature} of sample {sample}");
        }
    }
}

#[test]
fn rows_that_do_not_have_the_promised_shape_are_named() {
    let recording = Recording { state_width: 2, ..Default::default() };
    let dataset = open_spoiled(&recording, |_, _| ()).unwrap();
    refused(dataset.sample(0), &["observation.state", "length 2, but info.json says 3"]);
    refused_at_open(
        |d, _| edit(d, "meta/info.json", |i| i["features"]["ghost"] = i["features"]["action"].take()),
        &["info.json", "action"],
    );
    refused_at_open(
        |d, s| {
            edit(d, "meta/info.json", |i| i["features"]["ghost"] = i["features"]["action"].clone());
            edit(d, "meta/stats.json", |v| v["ghost"] = v["action"].clone());
            s.vla_mut().data.action = "ghost".into();
        },
        &["parquet", "column ghost", "missing"],
    );
}

#[test]
fn images_of_another_size_than_the_metadata_says_are_refused_at_open() {
    let reshape = |shape: serde_json::Value, names: serde_json::Value| {
        open_spoiled(&Recording::default(), move |d, _| {
            edit(d, "meta/info.json", |i| {
                i["features"]["observation.images.front"]["shape"] = shape;
                i["features"]["observation.images.front"]["names"] = names;
            })
        })
    };
    // Channel first, and nobody says so.
    assert!(reshape(json!([3, 30, 40]), json!(null)).is_ok_and(|d| d.sample(0).is_ok()));
    refused(
        reshape(json!([3, 30, 40]), json!(["height", "width", "channels"])),
        &["info.json", "features.observation.images.front.shape", "3x30", "images are 30x40", "names"],
    );
    refused(reshape(json!([60, 80, 3]), json!(null)), &["60x80", "images are 30x40"]);
}

#[test]
fn a_decoder_that_panics_is_a_fault_of_its_sample() {
    let dataset = open_spoiled(&Recording::default(), |_, _| ()).unwrap();
    let at = dataset.at(8).unwrap();
    refused::<()>(
        at.surviving(|| panic!("index out of bounds: {}", 7)),
        &["file-001.parquet", "sample 8 (episode 2, frame 2)", "panicked (index out of bounds: 7)"],
    );
}

#[test]
fn whatever_panics_while_a_window_is_decoded_is_a_fault_of_its_row() {
    let dataset = open_spoiled(&Recording::default(), |_, _| ()).unwrap();
    // A row that no row group has is outside of what parquet's reader can be asked for.
    let block = dataset.rows.block(&dataset.catalog, 0, 10_000, Part::Numbers);
    refused(block.map(drop), &["file-000.parquet", "(decoding)", "a decoder panicked (index out of bounds"]);
}

#[test]
fn garbled_pages_leave_samples_without_keys_whatever_decoders_make_of_them() {
    let file = "data/chunk-000/file-000.parquet";
    for (piece, byte) in (0..24).flat_map(|piece| [(piece, 0xff), (piece, 0x80), (piece, 0x0b)]) {
        let dataset = open_spoiled(&Recording::default(), |dir, _| {
            let mut bytes = std::fs::read(dir.join(file)).unwrap();
            let footer = u32::from_le_bytes(bytes[bytes.len() - 8..][..4].try_into().unwrap()) as usize;
            let data = 4..bytes.len() - 8 - footer;
            let size = data.len() / 24;
            bytes[data.start + piece * size..][..size.min(40)].fill(byte);
            std::fs::write(dir.join(file), bytes).unwrap();
        });
        let (dataset, store) = (dataset.expect("the footer is intact"), tempfile::tempdir().unwrap());
        let store = coxswain_feature_store::Store::open(store.path(), None).unwrap();
        let keys = dataset.sample_keys(&store).expect("what is garbled is no fault of the store");
        assert!(keys.get(8).is_some(), "of another file");
    }
}

#[test]
fn who_can_do_without_a_sample_is_told_which_are_missing() {
    let recording = Recording { image: Some((3, None)), ..Default::default() };
    let readable = open_spoiled(&recording, |_, _| ()).unwrap();
    let readable = (&readable as &dyn Samples).readable(&[2, 3, 4]);
    assert_eq!(readable.samples.iter().map(|sample| sample.index()).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(readable.faults.len(), 1);
    assert!(readable.faults[0].to_string().contains("no image bytes"));
}

#[test]
fn images_that_do_not_decode_or_are_not_there_are_named() {
    let spoiled = |bytes: Option<Vec<u8>>| {
        let recording = Recording { image: Some((3, bytes)), ..Default::default() };
        open_spoiled(&recording, |_, _| ()).unwrap().sample(3)
    };
    let whole = super::recording::png(7, 30, 40);
    let at = ["file-000.parquet", "sample 3 (episode 0, frame 3)", "observation.images.front"];
    let says = |more: &'static str| [&at[..], &[more]].concat();
    refused(spoiled(Some(whole[..whole.len() / 2].to_vec())), &says("does not decode"));
    refused(spoiled(Some(b"GIF89a".to_vec())), &says("a GIF; convert it"));
    refused(spoiled(Some(b"version https://git-lfs.github.com/spec/v1".to_vec())), &says("`git lfs pull`"));
    refused(spoiled(Some(Vec::new())), &says("the image has no bytes"));
    refused(spoiled(None), &says("no image bytes"));
    refused(
        spoiled(Some(super::recording::png(7, 31, 40))),
        &says("31x40 (height x width), but info.json says 30x40"),
    );
}

#[test]
fn a_task_without_text_is_named() {
    for task in [77, -1] {
        let recording = Recording { task: Some((2, task)), ..Default::default() };
        let dataset = open_spoiled(&recording, |_, _| ()).unwrap();
        refused(
            dataset.sample(2),
            &["sample 2", "task_index", &format!("task {task} has no text"), "meta/tasks"],
        );
    }
}

#[test]
fn holding_out_everything_or_what_is_not_there_is_refused() {
    refused_at_open(|_, s| s.data.holdout_episodes = vec![0, 1, 2, 3], &["leave no episode", "at least one"]);
    refused_at_open(
        |_, s| s.data.holdout_episodes = vec![4],
        &["no episode 4; there are 4", "data.holdout_episodes"],
    );
}

#[test]
fn inspection_lists_problems_instead_of_stopping_at_the_first() {
    let dir = Recording::default().write();
    std::fs::write(dir.path().join("data/chunk-000/file-001.parquet"), b"PAR1").unwrap();
    edit(dir.path(), "meta/stats.json", |v| drop(v.as_object_mut().unwrap().remove("observation.sensor")));
    let report = inspect(dir.path()).unwrap();
    let all = report.problems.join("\n");
    for part in ["file-001.parquet", "no statistics of observation.sensor"] {
        assert!(all.contains(part), "{part:?} is not in {all}");
    }
}
