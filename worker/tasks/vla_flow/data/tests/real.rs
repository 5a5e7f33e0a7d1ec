//! Samples of a data set that the lerobot package wrote.

use super::{mini, spec};
use crate::vla_flow::config::VlaSpec;
use crate::vla_flow::{VlaFlow, data::Dataset};
use burn::backend::Flex;
use coxswain_models::families::shelf;
use coxswain_task::Task;

#[test]
fn samples_have_the_promised_sizes_and_their_episode_s_task() {
    let dataset = Dataset::from_spec(&spec(&mini()), shelf()).unwrap();
    let dims = dataset.dims();
    assert_eq!((dims.state, dims.sensor_window, dims.sensor_channels, dims.action), (4, 16, 6, 4));
    assert_eq!((dataset.len(), dataset.training_len() + dataset.holdout().count() as u64), (239, 239));
    let sample = dataset.sample(64).unwrap();
    assert_eq!((sample.index, sample.episode, sample.frame), (64, 1, 0));
    assert_eq!(sample.image_shapes, [[1, 6, 6]]);
    assert_eq!(sample.pixel_values.len(), 36 * 1176);
    assert_eq!(sample.input_ids.iter().filter(|id| **id == 1016).count(), 9);
    assert_eq!((sample.state.len(), sample.sensor.len(), sample.actions.len()), (4, 96, 32));
    assert_eq!(sample.action_is_pad, [false; 8]);
}

#[test]
fn actions_past_the_episode_s_end_repeat_the_last_one_and_count_as_padding() {
    let dataset = Dataset::from_spec(&spec(&mini()), shelf()).unwrap();
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
    let normalized = Dataset::from_spec(&spec, shelf()).unwrap();
    spec.vla_mut().data.normalization.action = coxswain_data::NormMode::Identity;
    let stored = Dataset::from_spec(&spec, shelf()).unwrap().sample(17).unwrap().actions;
    let mut actions = normalized.sample(17).unwrap().actions;
    assert_ne!(actions, stored);
    normalized.denormalize_actions(&mut actions);
    for (a, b) in actions.iter().zip(&stored) {
        assert!((a - b).abs() < 1e-5, "{a} instead of {b}");
    }
}

#[test]
fn a_written_sample_is_the_sample_that_training_sees() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.safetensors");
    let spec = spec(&mini());
    crate::vla_flow::data::write_sample(&spec, shelf(), 70, &out).unwrap();
    let sample = Dataset::from_spec(&spec, shelf()).unwrap().sample(70).unwrap();
    let bytes = std::fs::read(&out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str| file.tensor(name).unwrap();
    let seq = sample.input_ids.len();
    let ids: Vec<i64> = sample.input_ids.iter().map(|id| i64::from(*id)).collect();
    assert_eq!(tensor("input_ids").data(), bytemuck::cast_slice::<i64, u8>(&ids));
    assert_eq!(tensor("input_ids").shape(), [1, seq]);
    assert_eq!(tensor("attention_mask").shape(), [1, seq]);
    assert_eq!(tensor("pixel_values").shape(), [36, 1176]);
    assert_eq!(tensor("pixel_values").data(), bytemuck::cast_slice::<f32, u8>(&sample.pixel_values[..]));
    assert_eq!(tensor("image_grid_thw").shape(), [1, 3]);
    assert_eq!(tensor("sensor").shape(), [16, 6]);
    assert_eq!(tensor("actions").data(), bytemuck::cast_slice::<f32, u8>(&sample.actions));
    assert_eq!(tensor("actions").shape(), [8, 4]);
    assert_eq!(tensor("action_is_pad").shape(), [8]);
    // Out of range, and into a directory that is not there: nothing is left behind.
    assert!(crate::vla_flow::data::write_sample(&spec, shelf(), 239, &dir.path().join("y")).is_err());
    assert!(crate::vla_flow::data::write_sample(&spec, shelf(), 0, &dir.path().join("no/z")).is_err());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn an_inspected_data_set_says_what_a_run_can_name() {
    let report = coxswain_data::inspect(&mini()).unwrap();
    assert_eq!((report.episodes, report.frames, report.tasks, report.files), (4, 239, 2, 1));
    assert_eq!(report.problems, Vec::<String>::new());
    let section = report.run_section(VlaFlow::<Flex>::default().data_keys());
    for line in [
        "cameras: [observation.images.corner2]",
        "state: observation.state",
        "sensor: observation.sensor",
        "action: action",
    ] {
        assert!(section.contains(line), "{line:?} is not in {section}");
    }
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["version"], "v3.0");
    assert_eq!(json["features"][2]["role"], "action");
}

#[test]
fn exported_statistics_hold_the_features_of_the_run_in_lerobot_s_layout() {
    let stats = Dataset::from_spec(&spec(&mini()), shelf()).unwrap().stats();
    let json: serde_json::Value = serde_json::from_str(&stats.to_json()).unwrap();
    let names: Vec<&String> = json.as_object().unwrap().keys().collect();
    assert_eq!(names, ["action", "observation.sensor", "observation.state"]);
    assert_eq!(json["action"]["count"], serde_json::json!([239.0]));
    assert_eq!(json["action"]["mean"].as_array().unwrap().len(), 4);
}
