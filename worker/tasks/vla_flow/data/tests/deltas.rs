//! Actions as differences from the state, and chunks whose actions are several rows apart.

use coxswain_data::NormMode;
use coxswain_models::families::shelf;
use proptest::prelude::*;

use super::recording::{Recording, action, state};
use crate::vla_flow::{
    config::VlaSpec,
    data::{Dataset, DeltaActions},
};

/// As recorded but for what is asked for.
fn open(mask: &[bool], stride: usize, mode: NormMode) -> (tempfile::TempDir, Dataset) {
    let recording = Recording::default();
    let dir = recording.write();
    let mut spec = recording.spec(dir.path());
    {
        let mut vla = spec.vla_mut();
        (vla.data.delta_actions, vla.data.action_stride) = (mask.to_vec(), stride);
        (vla.data.normalization.state, vla.data.normalization.action) = (NormMode::Identity, mode);
    }
    let dataset = Dataset::from_spec(&spec, shelf()).unwrap_or_else(|error| panic!("{error}"));
    (dir, dataset)
}

/// Number, first sample and length of each episode.
fn episodes() -> impl Iterator<Item = (usize, u64, usize)> {
    let mut start = 0;
    Recording::default().episodes.into_iter().enumerate().map(move |(number, (length, _))| {
        start += length as u64;
        (number, start - length as u64, length)
    })
}

#[test]
fn a_chunk_is_relative_to_the_state_of_its_first_frame_alone() {
    let (_dir, dataset) = open(&[false, true], 2, NormMode::Identity);
    for (episode, start, length) in episodes() {
        for frame in 0..length {
            let sample = dataset.sample(start + frame as u64).unwrap();
            let last = frame + (length - 1 - frame) / 2 * 2;
            let chunk = (0..4).flat_map(|step| {
                let [first, second] = action(episode, (frame + 2 * step).min(last));
                [first, second - state(episode, frame)[1]]
            });
            assert_eq!(sample.actions, chunk.collect::<Vec<_>>(), "episode {episode}, frame {frame}");
            assert_eq!(sample.action_is_pad, [0, 2, 4, 6].map(|rows| frame + rows >= length));
            assert_eq!(sample.state, state(episode, frame));
        }
    }
}

#[test]
fn differences_are_normalised_by_statistics_of_all_whole_chunks() {
    let (mask, horizon) = ([true, true], 4);
    let (_dir, dataset) = open(&mask, 1, NormMode::MeanStd);
    let stats = dataset.stats().0["action"].clone();
    for dim in 0..2 {
        let mut values: Vec<f64> = episodes()
            .flat_map(|(episode, _, length)| {
                let starts = 0..(length + 1).saturating_sub(horizon);
                starts.flat_map(move |first| {
                    let of = state(episode, first)[dim];
                    (first..first + horizon).map(move |frame| f64::from(action(episode, frame)[dim] - of))
                })
            })
            .collect();
        values.sort_by(f64::total_cmp);
        let (count, close) = (values.len() as f64, |a: f64, b: f64| (a - b).abs() < 1e-9);
        let mean = values.iter().sum::<f64>() / count;
        let std = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count).sqrt();
        let (low, high) = (values[0], values[values.len() - 1]);
        assert!(close(stats["mean"][dim], mean) && close(stats["std"][dim], std), "{stats:?}");
        assert_eq!([stats["min"][dim], stats["max"][dim], stats["count"][0]], [low, high, count]);
        for (name, q) in [("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)] {
            // The value that so many are at most, within a bin of the histogram.
            let wanted = values[(q * count).ceil() as usize - 1];
            let bin = (high - low) / 5000.0;
            assert!((stats[name][dim] - wanted).abs() <= bin, "{name}: {} for {wanted}", stats[name][dim]);
        }
    }
    // What is learned is normalised by them.
    let (_raw_dir, raw) = open(&mask, 1, NormMode::Identity);
    let mut back = dataset.sample(6).unwrap().actions;
    dataset.denormalize_actions(&mut back);
    for (back, raw) in back.iter().zip(raw.sample(6).unwrap().actions) {
        assert!((back - raw).abs() < 1e-4, "{back} for {raw}");
    }
    assert!(!raw.stats().0["action"].contains_key("q50"), "nothing was computed");
}

#[test]
fn what_cannot_be_a_difference_is_refused_by_name() {
    let refused = |mask: &[bool], stride: usize| {
        let recording = Recording::default();
        let dir = recording.write();
        let mut spec = recording.spec(dir.path());
        (spec.vla_mut().data.delta_actions, spec.vla_mut().data.action_stride) = (mask.to_vec(), stride);
        Dataset::from_spec(&spec, shelf()).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let error = refused(&[true, false, true], 1);
    assert!(error.contains("data.delta_actions") && error.contains("3 values"), "{error}");
    let error = refused(&[true], 3);
    assert!(error.contains("10 rows (a whole chunk)") && error.contains("lower data.horizon"), "{error}");
}

#[test]
fn a_damaged_action_is_needed_by_every_chunk_that_it_is_a_part_of() {
    let (_dir, dataset) = open(&[], 3, NormMode::Identity);
    let fault = coxswain_data::DataError::Sample {
        index: 10,
        path: "somewhere".into(),
        episode: 2,
        frame: 4,
        feature: "action".into(),
        fault: String::new(),
    };
    // Sample 10 is frame 4 of the third episode: chunks of ten rows from its first frame on reach it.
    let row = dataset.damaged_row(10, &fault);
    assert_eq!((row.row, row.begin, row.end), (10, 6, 11));
}

proptest! {
    #[test]
    fn what_is_taken_from_an_action_is_what_is_added_to_it(
        mask in prop::collection::vec(any::<bool>(), 0..6), state in prop::collection::vec(-9f32..9.0, 6),
    ) {
        let deltas = DeltaActions::new(&mask);
        let offset = deltas.offset(&state, 6);
        for dim in 0..6 {
            let is_delta = mask.get(dim) == Some(&true);
            prop_assert_eq!(offset[dim], if is_delta { state[dim] } else { 0.0 });
        }
        prop_assert_eq!(deltas.any(), deltas.reach() > 0);
        prop_assert!(mask[deltas.reach().min(mask.len())..].iter().all(|is_delta| !is_delta));
    }
}

#[test]
fn statistics_are_without_an_episode_that_cannot_be_read_and_are_found_once_for_a_run() {
    let recording = Recording::default();
    let (data, run) = (recording.write(), tempfile::tempdir().unwrap());
    let file = data.path().join("data/chunk-000/file-001.parquet");
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[8..middle].fill(0xa5);
    std::fs::write(&file, bytes).unwrap();
    let mut spec = recording.spec(data.path());
    spec.run.output_dir = run.path().display().to_string();
    spec.vla_mut().data.delta_actions = vec![true];
    let open = || Dataset::from_spec(&spec, shelf()).unwrap_or_else(|error| panic!("{error}"));
    let stats = open().stats().0["action"].clone();
    // Of the episodes of 5, 1, 7 and 4 frames the third is lost: there are two whole chunks of 4 in the first
    // and one in the last.
    assert_eq!(stats["count"], [12.0]);
    assert!(open().sample(8).is_err(), "its samples are not");
    let kept = std::fs::read_dir(run.path()).unwrap().next().unwrap().unwrap().path();
    let text = std::fs::read_to_string(&kept).unwrap().replace("12.0", "13.0");
    std::fs::write(&kept, text).unwrap();
    assert_eq!(open().stats().0["action"]["count"], [13.0]);
}
