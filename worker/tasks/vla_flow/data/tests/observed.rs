//! What a sample has of an observation: features side by side, none of them, past frames, windows of rows,
//! texts that are cut.

use coxswain_data::{DataError, NormMode};
use coxswain_feature_store::Store;
use coxswain_models::families::shelf;
use coxswain_proto::run_spec::RunSpec;
use serde::Deserialize;

use super::{
    broken::refused,
    mini,
    recording::{Recording, action, edit, state},
    spec,
};
use crate::vla_flow::{
    config::{SensorFeature, VlaSettings, VlaSpec},
    data::{Dataset, Outline, PolicyFile},
};

const STATE: &str = "observation.state";

fn names(of: &[&str]) -> crate::vla_flow::config::FeatureList {
    of.iter().map(|&name| name.to_owned()).collect()
}

/// A run on the recording, and the recording.
fn run(recording: &Recording, change: impl FnOnce(&mut VlaSettings)) -> (tempfile::TempDir, RunSpec) {
    let dir = recording.write();
    let mut spec = recording.spec(dir.path());
    change(&mut spec.vla_mut());
    (dir, spec)
}

fn open(change: impl FnOnce(&mut VlaSettings)) -> (tempfile::TempDir, Dataset) {
    let (dir, spec) = run(&Recording::default(), |vla| {
        let modes = &mut vla.data.normalization;
        [modes.state, modes.action, modes.sensor] = [NormMode::Identity; 3];
        change(vla);
    });
    let dataset = Dataset::from_spec(&spec, shelf()).unwrap_or_else(|error| panic!("{error}"));
    (dir, dataset)
}

fn refused_at_open(change: impl FnOnce(&mut VlaSettings), says: &[&str]) {
    let (_dir, spec) = run(&Recording::default(), change);
    refused(Dataset::from_spec(&spec, shelf()), says);
}

fn policy(dataset: &Dataset) -> PolicyFile {
    let files = coxswain_task::Samples::files(dataset);
    let file = files.iter().find(|file| file.path == PolicyFile::PATH).unwrap();
    serde_json::from_str(&file.text).unwrap()
}

#[test]
fn features_side_by_side_are_one_in_the_order_of_the_list() {
    let (_dir, dataset) = open(|vla| {
        vla.data.state = names(&["action", STATE]);
        vla.data.action = names(&[STATE, "action"]);
        vla.data.delta_actions = vec![false, true, false, true];
    });
    assert_eq!((dataset.dims().state, dataset.dims().action), (5, 5));
    let (episode, frame) = (2, 3);
    let sample = dataset.sample(6 + frame as u64).unwrap();
    let both = |first: &[f32], second: &[f32]| [first, second].concat();
    let seen = both(&action(episode, frame), &state(episode, frame));
    assert_eq!(sample.state, seen);
    for step in 0..3 {
        let mut learned = both(&state(episode, frame + step), &action(episode, frame + step));
        learned[1] -= seen[1];
        learned[3] -= seen[3];
        assert_eq!(sample.actions[5 * step..][..5], learned, "step {step}");
    }
    let file = policy(&dataset);
    let of_state = file.state.unwrap();
    let parts: Vec<_> = of_state.parts.iter().map(|part| (part.name.as_str(), &part.shape[..])).collect();
    assert_eq!((file.format, of_state.shape), (3, vec![5]));
    assert_eq!(parts, [("action", &[2][..]), (STATE, &[3])]);
}

#[test]
fn statistics_are_joined_as_the_features_are_and_each_is_normalised_by_its_own() {
    let (dir, mut spec) = run(&Recording::default(), |vla| vla.data.state = names(&["action", STATE]));
    edit(dir.path(), "meta/stats.json", |stats| {
        stats["action"]["mean"] = vec![7.0, 8.0].into();
        stats["action"]["std"] = vec![4.0, 5.0].into();
        stats["action"].as_object_mut().unwrap().remove("q01");
    });
    let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
    let (seen, recorded) =
        (dataset.sample(1).unwrap().state, [action(0, 1).to_vec(), state(0, 1).to_vec()].concat());
    let expected: Vec<f32> = recorded
        .iter()
        .zip([(7.0, 4.0), (8.0, 5.0), (1.0, 2.0), (1.0, 2.0), (1.0, 2.0)])
        .map(|(value, (mean, std))| (value - mean) / (std + 1e-8))
        .collect();
    assert_eq!(seen, expected);
    let stats = dataset.stats();
    let joined = &stats.0["action + observation.state"];
    assert_eq!(joined["mean"], [7.0, 8.0, 1.0, 1.0, 1.0]);
    assert!(!joined.contains_key("q01"), "one of them has none");
    spec.vla_mut().data.normalization.state = NormMode::Quantiles;
    refused(Dataset::from_spec(&spec, shelf()), &["action.q01", "missing"]);
}

#[test]
fn a_policy_without_a_state_has_none_anywhere() {
    let (_dir, dataset) = open(|vla| vla.data.state = names(&[]));
    let sample = dataset.sample(3).unwrap();
    assert_eq!((dataset.dims().state, sample.state.len()), (0, 0));
    assert_eq!((policy(&dataset).state, policy(&dataset).format), (None, 3));
    assert!(dataset.preview(0, 2).unwrap().plots.iter().all(|plot| plot.title.starts_with("action")));
    refused_at_open(
        |vla| (vla.data.state, vla.data.delta_actions) = (names(&[]), vec![true]),
        &["data.delta_actions", "the state 0"],
    );
    refused_at_open(
        |vla| vla.data.state = "observation.pose".into(),
        &["data.state names", "data.state: none"],
    );
}

#[test]
fn past_frames_come_first_and_before_an_episode_is_its_first_frame() {
    let (_dir, dataset) = open(|vla| vla.observation.history = vec![-3, -1]);
    let (_other, plain) = open(|_| {});
    assert_eq!((dataset.dims().state, dataset.image_shapes().unwrap().len()), (9, 6));
    for (index, episode, frames) in
        [(0, 0, [0, 0, 0]), (2, 0, [0, 1, 2]), (4, 0, [1, 3, 4]), (5, 1, [0, 0, 0]), (12, 2, [3, 5, 6])]
    {
        let (sample, first) = (dataset.sample(index).unwrap(), index - frames[2] as u64);
        let states: Vec<f32> = frames.iter().flat_map(|&frame| state(episode, frame)).collect();
        assert_eq!(sample.state, states, "sample {index}");
        let pixels: Vec<f32> = frames
            .iter()
            .flat_map(|&f| plain.sample(first + f as u64).unwrap().pixel_values.to_vec())
            .collect();
        assert_eq!(*sample.pixel_values, pixels, "sample {index}");
        assert_eq!(sample.actions, plain.sample(index).unwrap().actions, "sample {index}");
        let is_pad = [frames[2] < 3, frames[2] < 1, false];
        assert_eq!(sample.frame_is_pad(&dataset.settings.observation), is_pad, "sample {index}");
    }
    let strips: Vec<_> = dataset.preview(0, 2).unwrap().strips.into_iter().map(|strip| strip.title).collect();
    assert_eq!(strips.len(), 6);
    assert!(strips[0].starts_with("observation.images.front, 3 frames before"), "{strips:?}");
}

#[derive(Deserialize)]
struct Golden {
    history: Vec<i64>,
    window: usize,
    samples: Vec<GoldenSample>,
}

#[derive(Deserialize)]
struct GoldenSample {
    index: u64,
    state: Vec<Vec<f32>>,
    is_pad: Vec<bool>,
    images_of: Vec<Vec<u64>>,
    window: Vec<Vec<f32>>,
}

/// Against LeRobot: `integration-tests/fixtures/make_history.py`.
#[test]
fn history_and_windows_are_those_of_lerobots_delta_timestamps() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/data/history.json");
    let golden: Golden = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut spec = spec(&mini());
    {
        let modes = &mut spec.vla_mut().data.normalization;
        [modes.state, modes.action, modes.sensor] = [NormMode::Identity; 3];
    }
    let plain = Dataset::from_spec(&spec, shelf()).unwrap();
    {
        let mut vla = spec.vla_mut();
        vla.observation.history = golden.history;
        vla.data.sensor = Some(SensorFeature { key: "action".into(), window: Some(golden.window) });
    }
    let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
    assert_eq!(golden.samples.len(), 20);
    for theirs in golden.samples {
        let (index, ours) = (theirs.index, dataset.sample(theirs.index).unwrap());
        assert_eq!(ours.state, theirs.state.concat(), "sample {index}");
        assert_eq!(ours.sensor, theirs.window.concat(), "sample {index}");
        assert_eq!(ours.frame_is_pad(&dataset.settings.observation), theirs.is_pad, "sample {index}");
        let each = ours.pixel_values.len() / theirs.images_of.len();
        for (image, of) in ours.pixel_values.chunks(each).zip(theirs.images_of) {
            assert_eq!(image, &plain.sample(of[0]).unwrap().pixel_values[..], "sample {index}");
        }
    }
}

#[test]
fn the_last_rows_of_a_column_are_a_window_of_readings() {
    let windowed = |key: &str, window| Some(SensorFeature { key: key.into(), window: Some(window) });
    let (_dir, dataset) = open(|vla| vla.data.sensor = windowed("action", 3));
    let dims = dataset.dims();
    assert_eq!((dims.sensor_window, dims.sensor_channels), (3, 2));
    for (index, frames) in [(0, [0, 0, 0]), (1, [0, 0, 1]), (4, [2, 3, 4])] {
        let readings: Vec<f32> = frames.iter().flat_map(|&frame| action(0, frame)).collect();
        assert_eq!(dataset.sample(index).unwrap().sensor, readings, "sample {index}");
    }
    assert_eq!(policy(&dataset).sensor.unwrap().shape, [3, 2]);
    refused_at_open(
        |vla| vla.data.sensor = windowed("observation.sensor", 3),
        &["features.observation.sensor.shape", "a window of its own"],
    );
    refused_at_open(
        |vla| vla.data.sensor = windowed("observation.images.front", 3),
        &["features.observation.images.front", "cannot be used for data.sensor"],
    );
    refused_at_open(
        |vla| vla.data.sensor = windowed("action", 8),
        &["data.sensor.window reaches over 8 rows"],
    );
}

#[test]
fn what_is_asked_of_the_past_has_to_be_in_some_episode() {
    open(|vla| vla.observation.history = vec![-6]);
    refused_at_open(
        |vla| vla.observation.history = vec![-7, -1],
        &["observation.history reaches over 8 rows", "the longest episode has 7"],
    );
    refused_at_open(
        |vla| vla.data.state = names(&[STATE, "force"]),
        &["data.state names `force`", "observation.state"],
    );
    refused_at_open(
        |vla| vla.data.action = names(&["action", "observation.images.front"]),
        &["features.observation.images.front", "cannot be used for data.action"],
    );
}

#[test]
fn a_row_is_missing_to_the_samples_that_look_back_on_it() {
    let poisoned =
        |feature: &'static str| Recording { poison: Some((feature, 8, f32::NAN)), ..Recording::default() };
    let blamed = |recording: &Recording, change: fn(&mut VlaSettings), index| {
        let (_dir, spec) = run(recording, change);
        let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
        let error = dataset.sample(index).map(drop).expect_err("the row is damaged");
        assert!(matches!(&error, DataError::Sample { index: 8, .. }), "{error}");
        let row = dataset.damaged_row(index, &error);
        (row.row, row.begin, row.end)
    };
    // Episode 2 has samples 6 to 12.
    let history: fn(&mut VlaSettings) = |vla| vla.observation.history = vec![-2];
    assert_eq!(blamed(&poisoned(STATE), history, 8), (8, 8, 11));
    assert_eq!(blamed(&poisoned(STATE), history, 10), (8, 8, 11));
    assert_eq!(blamed(&poisoned("action"), history, 7), (8, 6, 9));
    let window: fn(&mut VlaSettings) = |vla| {
        vla.data.action = STATE.into();
        vla.data.sensor = Some(SensorFeature { key: "action".into(), window: Some(6) });
    };
    assert_eq!(blamed(&poisoned("action"), window, 9), (8, 8, 13));
}

#[test]
fn names_of_samples_have_the_images_of_the_past() {
    let (_dir, dataset) = open(|vla| vla.observation.history = vec![-1]);
    let (_other, plain) = open(|_| {});
    let store = tempfile::tempdir().unwrap();
    let keys = dataset.sample_keys(&Store::open(store.path(), None).unwrap()).unwrap();
    for index in 0..dataset.len() {
        let one = dataset.sample_key(index).unwrap();
        assert_eq!(keys.get(index), Some(one), "sample {index}");
        assert_ne!(one, plain.sample_key(index).unwrap());
    }
    let (_dir, cut) = open(|vla| vla.observation.max_text_tokens = Some(2));
    assert_ne!(cut.preprocessing(), plain.preprocessing());
}

#[test]
fn empty_texts_of_tasks_are_told_once() {
    let recording = Recording {
        episode_task: |episode| if episode % 2 == 1 { "  ".into() } else { format!("task {episode}") },
        ..Recording::default()
    };
    let (_dir, spec) = run(&recording, |_| {});
    let warnings = coxswain_task::Samples::warnings(&Dataset::from_spec(&spec, shelf()).unwrap());
    let told: Vec<_> = warnings.iter().filter(|line| line.contains("is empty")).collect();
    let [told] = told[..] else { panic!("{warnings:?}") };
    let wanted =
        "meta/tasks.parquet: the text of task_index 1 is empty (2 of 4 task texts are empty): frames with";
    assert!(told.contains(wanted), "{told}");
}

#[test]
fn long_texts_are_cut_and_a_warning_counts_them() {
    let (_dir, plain) = open(|_| {});
    let whole = plain.sample(0).unwrap().input_ids;
    let (_dir, spec) = run(&Recording::default(), |vla| vla.observation.max_text_tokens = Some(2));
    let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
    let cut = dataset.sample(0).unwrap().input_ids;
    assert!(cut.len() < whole.len());
    let warnings = coxswain_task::Samples::warnings(&dataset);
    let told = warnings.iter().find(|line| line.contains("max_text_tokens"));
    assert!(
        told.is_some_and(|line| line.contains("cut after 2 tokens, which shortens 4 of 4 task texts")),
        "{warnings:?}"
    );
    assert_eq!(Outline::from_spec(&spec, shelf()).unwrap().prompt_tokens, cut.len());
    let history = run(&Recording::default(), |vla| vla.observation.history = vec![-1]);
    let (seen, outline) =
        (Dataset::from_spec(&history.1, shelf()).unwrap(), Outline::from_spec(&history.1, shelf()).unwrap());
    assert_eq!((outline.dims, outline.images), (seen.dims(), seen.image_shapes().unwrap()));
    assert_eq!(outline.prompt_tokens, seen.sample(0).unwrap().input_ids.len());
}
