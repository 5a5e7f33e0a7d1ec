//! Against Pillow, Transformers and their tokenizers: fixtures made by `integration-tests/fixtures/make_data.py`.

use std::path::{Path, PathBuf};

use coxswain_proto::vla_flow::NormMode;
use safetensors::SafeTensors;
use serde::Deserialize;

use super::{assets, mini, spec};
use crate::data::prompt::{ModelFacts, PromptEncoder};
use crate::data::vision::{ImageProcessor, PatchShape};
use crate::data::{Dataset, inspect};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures/data")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn ints(bytes: &[u8]) -> Vec<usize> {
    let words = bytes.chunks_exact(8).map(|b| b.try_into().expect("8 bytes"));
    words.map(|b| i64::from_le_bytes(b) as usize).collect()
}

#[test]
fn preprocessed_pixels_are_transformers_own() {
    let bytes = std::fs::read(fixtures().join("images.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let names: Vec<_> =
        file.names().into_iter().filter_map(|n| n.strip_suffix(".file").map(str::to_string)).collect();
    assert_eq!(names.len(), 9);
    for name in names {
        let tensor = |part: &str| file.tensor(&format!("{name}.{part}")).unwrap();
        let mut data = spec(&mini()).vla().data;
        let bounds = ints(tensor("bounds").data());
        (data.min_pixels, data.max_pixels) = (Some(bounds[0]), Some(bounds[1]));
        let shape = PatchShape { patch: 14, merge: 2, frames: 2 };
        let processor = ImageProcessor::open(&assets().join("tiny-vla"), shape, &data).unwrap();
        // The image's size is part of its name: anything_HxW.
        let size = name.rsplit('_').next().and_then(|s| s.split_once('x')).expect("a size");
        let size = (size.0.parse().unwrap(), size.1.parse().unwrap());
        let got = processor.process(tensor("file").data(), size).unwrap();
        assert_eq!(got.grid.map(|g| g as usize).to_vec(), ints(tensor("grid").data()), "{name}");
        let want = floats(tensor("pixel_values").data());
        assert_eq!(got.pixel_values.len(), want.len(), "{name}");
        let square = |x: f32| f64::from(x) * f64::from(x);
        let off: f64 = got.pixel_values.iter().zip(&want).map(|(a, b)| square(a - b)).sum();
        let norm: f64 = want.iter().map(|b| square(*b)).sum();
        let error = (off / norm).sqrt();
        // The bar is 1e-4; Pillow's arithmetic is repeated exactly, so all that may differ is the last bit of a quotient.
        assert!(error < 1e-7, "{name}: relative error {error:e}");
    }
}

#[derive(Deserialize)]
struct Prompts {
    published_template: String,
    pad_token_id: u32,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    text: String,
    image_tokens: Vec<u32>,
    input_ids: Vec<u32>,
}

#[test]
fn prompts_are_encoded_as_transformers_encodes_them() {
    let text = std::fs::read_to_string(fixtures().join("prompts.json")).unwrap();
    let prompts: Prompts = serde_json::from_str(&text).unwrap();
    let own = assets().join("tiny-vla");
    let published = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "config.json"] {
        std::fs::copy(own.join(file), published.path().join(file)).unwrap();
    }
    let template = serde_json::json!({"chat_template": prompts.published_template});
    std::fs::write(published.path().join("chat_template.json"), template.to_string()).unwrap();
    let facts = ModelFacts::read(&own).unwrap();
    for case in &prompts.cases {
        let model = if case.template == "own" { own.as_path() } else { published.path() };
        let encoder = PromptEncoder::open(model, facts, "{task}", case.image_tokens.len()).unwrap();
        // A grid of one cell's height and as many cells as the image has tokens.
        let grids: Vec<[u32; 3]> = case.image_tokens.iter().map(|n| [1, 2, 2 * n]).collect();
        let ids = encoder.encode(&case.text, &grids).unwrap();
        assert_eq!(ids, case.input_ids, "{:?} with the {} template", case.text, case.template);
        assert_eq!(encoder.pad(), prompts.pad_token_id);
    }
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
    let published = Dataset::open(&spec).unwrap();
    spec.vla_mut().model.path = dir.path().display().to_string();
    let again = Dataset::open(&spec).unwrap();
    let (ours, theirs) = (again.sample(7).unwrap(), published.sample(7).unwrap());
    assert_eq!(ours.input_ids, theirs.input_ids);
    assert_eq!(ours.pixel_values, theirs.pixel_values);
    assert_eq!(ours.image_grids, theirs.image_grids);
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
        Dataset::open(&spec).unwrap()
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
    let dataset = Dataset::open(&spec(&root)).unwrap();
    let mut spec = spec(&root);
    spec.vla_mut().data.normalization.state = NormMode::Identity;
    let raw = Dataset::open(&spec).unwrap();
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
    let error = Dataset::open(&spec).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("episodes_stats.jsonl") && error.contains("observation.state.q01"), "{error}");
    let report = inspect(&root).unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
    assert!(report.to_string().contains("LeRobot v2.1, sawyer, 20 fps"), "{report}");
}
