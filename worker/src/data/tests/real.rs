//! Samples of a data set that the lerobot package wrote.

use super::{mini, spec};
use crate::data::Dataset;

#[test]
fn samples_have_the_promised_sizes_and_their_episode_s_task() {
    let dataset = Dataset::open(&spec(&mini())).unwrap();
    let dims = dataset.dims();
    assert_eq!((dims.state, dims.sensor_window, dims.sensor_channels, dims.action), (4, 16, 6, 4));
    assert_eq!((dataset.len(), dataset.training_len() + dataset.holdout().count() as u64), (239, 239));
    let sample = dataset.sample(64).unwrap();
    assert_eq!((sample.index, sample.episode, sample.frame), (64, 1, 0));
    assert_eq!(sample.image_grids, [[1, 6, 6]]);
    assert_eq!(sample.pixel_values.len(), 36 * 1176);
    assert_eq!(sample.input_ids.iter().filter(|id| **id == 1016).count(), 9);
    assert_eq!((sample.state.len(), sample.sensor.len(), sample.actions.len()), (4, 96, 32));
    assert_eq!(sample.action_is_pad, [false; 8]);
}

#[test]
fn actions_past_the_episode_s_end_repeat_the_last_one_and_count_as_padding() {
    let dataset = Dataset::open(&spec(&mini())).unwrap();
    let range = dataset.episode_samples(0).unwrap();
    let sample = dataset.sample(range.end - 3).unwrap();
    assert_eq!(sample.action_is_pad, [false, false, false, true, true, true, true, true]);
    let rows: Vec<_> = sample.actions.chunks(4).collect();
    assert!(rows[3..].iter().all(|row| *row == rows[2]));
    let next = dataset.sample(range.end - 2).unwrap();
    assert_eq!(&sample.actions[4..8], &next.actions[..4]);
}

#[test]
fn actions_come_back_to_the_data_set_s_units() {
    let mut spec = spec(&mini());
    let normalized = Dataset::open(&spec).unwrap();
    spec.data.normalization.action = coxswain_proto::run_spec::NormMode::Identity;
    let stored = Dataset::open(&spec).unwrap().sample(17).unwrap().actions;
    let mut actions = normalized.sample(17).unwrap().actions;
    assert_ne!(actions, stored);
    normalized.denormalize_actions(&mut actions);
    for (a, b) in actions.iter().zip(&stored) {
        assert!((a - b).abs() < 1e-5, "{a} instead of {b}");
    }
}
