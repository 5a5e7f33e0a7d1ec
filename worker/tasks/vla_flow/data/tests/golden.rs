//! Against Transformers and LeRobot: fixtures made by `integration-tests/fixtures/make_data.py`.

use crate::vla_flow::config::VlaSpec;
use coxswain_models::families::shelf;
use std::path::{Path, PathBuf};

use coxswain_data::NormMode;

use super::{assets, mini, spec};
use crate::vla_flow::data::Dataset;
use coxswain_data::inspect;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/fixtures/data")
}

/// `AutoProcessor.save_pretrained` after a call with truncation and padding, as it leaves a directory.
#[test]
fn a_checkpoint_saved_again_by_transformers_5_gives_the_same_samples() {
    let resaved = fixtures().join("resaved");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(assets().join("tiny-vla/config.json"), dir.path().join("config.json")).unwrap();
    for file in ["processor_config.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(resaved.join(file), dir.path().join(file)).unwrap();
    }
    // The vocabulary is the one that is here already; what the call has left in the file is not.
    let read = |path: PathBuf| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    };
    let mut tokenizer = read(assets().join("tiny-vla/tokenizer.json"));
    for (field, value) in read(resaved.join("tokenizer.call.json")).as_object().unwrap() {
        tokenizer[field] = value.clone();
    }
    assert!(!tokenizer["padding"].is_null() && !tokenizer["truncation"].is_null());
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();

    let mut spec = spec(&mini());
    let published = Dataset::from_spec(&spec, shelf()).unwrap();
    spec.vla_mut().model.path = dir.path().display().to_string();
    let again = Dataset::from_spec(&spec, shelf()).unwrap();
    let (ours, theirs) = (again.sample(7).unwrap(), published.sample(7).unwrap());
    assert_eq!(ours.input_ids, theirs.input_ids);
    assert_eq!(ours.pixel_values, theirs.pixel_values);
    assert_eq!(ours.image_shapes, theirs.image_shapes);
}

#[test]
fn a_v2_1_data_set_gives_the_samples_of_the_v3_0_one_it_was_made_from() {
    let root = fixtures().join("metaworld-v21");
    let open = |path: &Path| {
        let mut spec = spec(path);
        spec.data.holdout_episodes = vec![1];
        spec.vla_mut().data.horizon = 3;
        spec.vla_mut().data.normalization.state = NormMode::Identity;
        spec.vla_mut().data.normalization.action = NormMode::Identity;
        spec.vla_mut().data.normalization.sensor = NormMode::Identity;
        Dataset::from_spec(&spec, shelf()).unwrap()
    };
    let (old, new) = (open(&root), open(&mini()));
    assert_eq!((old.len(), old.training_len()), (18, 12));
    // Six frames each of episodes 0, 1 and 3.
    for (number, episode) in [0, 1, 3].into_iter().enumerate() {
        let start = new.episode_samples(episode).unwrap().start;
        for frame in 0..4 {
            let (a, b) = (old.sample(number as u64 * 6 + frame).unwrap(), new.sample(start + frame).unwrap());
            assert_eq!((a.episode, a.frame), (number as u64, frame));
            assert_eq!(a.input_ids, b.input_ids);
            assert_eq!(a.pixel_values, b.pixel_values);
            assert_eq!((a.state, a.sensor, a.actions), (b.state, b.sensor, b.actions));
        }
    }
    let last = old.sample(17).unwrap();
    assert_eq!(last.action_is_pad, [false, true, true]);
}

#[test]
fn v2_1_statistics_are_aggregated_over_episodes() {
    let root = fixtures().join("metaworld-v21");
    let dataset = Dataset::from_spec(&spec(&root), shelf()).unwrap();
    let mut spec = spec(&root);
    spec.vla_mut().data.normalization.state = NormMode::Identity;
    let raw = Dataset::from_spec(&spec, shelf()).unwrap();
    let states: Vec<Vec<f32>> = (0..18).map(|i| raw.sample(i).unwrap().state).collect();
    let stats = dataset.stats();
    for element in 0..4 {
        let values = states.iter().map(|s| f64::from(s[element]));
        let mean = values.clone().sum::<f64>() / 18.0;
        let std = (values.clone().map(|v| (v - mean).powi(2)).sum::<f64>() / 18.0).sqrt();
        let of = |name: &str| stats.0["observation.state"][name][element];
        assert!((of("mean") - mean).abs() < 1e-6 && (of("std") - std).abs() < 1e-6);
        assert_eq!(of("max"), values.fold(f64::NEG_INFINITY, f64::max));
    }
    // Quantiles came with v3.0.
    spec.vla_mut().data.normalization.state = NormMode::Quantiles;
    let error = Dataset::from_spec(&spec, shelf()).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("episodes_stats.jsonl") && error.contains("observation.state.q01"), "{error}");
    let report = inspect(&root).unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
    assert!(report.to_string().contains("LeRobot v2.1, sawyer, 20 fps"), "{report}");
}
