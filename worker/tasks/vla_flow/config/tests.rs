//! The task's keys, and that everything in `configs/` loads.

mod overrides;
mod rules;
mod sets;

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::*;
use crate::TASKS;
use coxswain_nn::lora::LoraTargets;
use coxswain_proto::{
    config::{self, ConfigError, TaskSchema},
    document,
    run_spec::{Offload, RunSpec, Shard},
};

/// The smallest legal run file.
const SMALL: &str = "\
run: {name: a, output_dir: runs/a}
model:
  path: m
data:
  path: d
  cameras: [front]
train:
  steps: 10
  global_batch: 8
  micro_batch: 2
";

fn read(text: &str, overrides: &[&str]) -> Result<RunSpec, ConfigError> {
    let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
    RunSpec::from_yaml(text, "run.yaml", &overrides, TASKS)
}

fn small(overrides: &[&str]) -> RunSpec {
    read(SMALL, overrides).unwrap()
}

fn vla(overrides: &[&str]) -> VlaSettings {
    small(overrides).settings().unwrap()
}

#[track_caller]
fn refuses(text: &str, overrides: &[&str], expected: &str) {
    let error = read(text, overrides).expect_err("this configuration must be refused").to_string();
    assert_eq!(error, expected, "\n--- got ---\n{error}\n--- expected ---\n{expected}");
}

fn yaml_files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            yaml_files(&path, found);
        } else if path.extension().is_some_and(|e| e == "yaml" || e == "yml") {
            found.push(path);
        }
    }
}

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs")
}

/// Fault scripts and deployment files are read by tests of their own.
#[test]
fn every_run_file_in_configs_loads() {
    let mut files = Vec::new();
    yaml_files(&configs(), &mut files);
    let others = [configs().join("faults"), configs().join("deploy")];
    files.retain(|file| !others.iter().any(|other| file.starts_with(other)));
    assert!(files.len() >= 3, "no configurations found");
    for file in files {
        RunSpec::load(&file, &[], TASKS).unwrap_or_else(|error| panic!("{error}"));
    }
    for section in ["mt5-1.2b", "t5-220m"] {
        let choice = [format!("section={section}")];
        let spec = RunSpec::load(&configs().join("seq2seq-sizes.yaml"), &choice, TASKS).unwrap();
        assert_eq!(spec.run.name, section);
    }
}

#[test]
fn the_reference_names_every_key_and_states_every_default() {
    let file = configs().join("reference.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    let mut written = Vec::new();
    leaves(&config::from_yaml(&text, "reference.yaml").unwrap(), String::new(), &mut written);
    let mut known = [config::engine_keys(), TaskSchema::of::<VlaSettings>().known_keys()].concat();
    written.sort();
    known.sort();
    assert_eq!(written, known);

    let reference = RunSpec::load(&file, &[], TASKS).unwrap();
    let mut defaults =
        read(SMALL, &["lora={}", "train.steps=1000", "train.global_batch=32", "train.micro_batch=4"])
            .unwrap();
    defaults.run = coxswain_proto::run_spec::Run { seed: defaults.run.seed, ..reference.run.clone() };
    defaults.data.path.clone_from(&reference.data.path);
    let (mut settings, given): (VlaSettings, VlaSettings) =
        (defaults.settings().unwrap(), reference.settings().unwrap());
    settings.model.path = given.model.path;
    settings.data.cameras = given.data.cameras;
    defaults.set_settings(&settings);
    assert_eq!(reference, defaults);
}

fn leaves(value: &Value, path: String, found: &mut Vec<String>) {
    match value {
        Value::Object(entries) if !entries.is_empty() => {
            for (key, child) in entries {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                leaves(child, path, found);
            }
        }
        _ => found.push(path),
    }
}

#[test]
fn every_key_says_whether_it_decides_what_is_learned() {
    assert_eq!(TaskSchema::of::<VlaSettings>().misfits(), Vec::<String>::new());
}

#[test]
fn a_specification_keeps_the_digest_it_had_before_tasks() {
    let spec = small(&["lora={}", "run.seed=7"]);
    assert_eq!(document::digest(&spec), "8259f76864f10c48110a5cf04a9c6465eec42e2a09c1e9ea17c2000dd94b2660");
}

#[test]
fn rounding_activations_is_another_run() {
    let [plain, rounded] =
        ["float32", "bfloat16"].map(|dtype| small(&[&format!("model.activations_dtype={dtype}")]));
    assert_ne!(document::digest(&plain), document::digest(&rounded));
    let told: Vec<_> = document::differences(&plain, &rounded).iter().map(ToString::to_string).collect();
    assert_eq!(told, ["model.activations_dtype (\"float32\" there, \"bfloat16\" here)"]);
}

#[test]
fn a_model_may_be_moved_where_both_runs_know_it_by_the_same_content() {
    let run = |path: &str, digest: Option<&str>| {
        let digest = digest.map(|digit| format!("train.base_digest={}", digit.repeat(64)));
        let path = format!("model.path={path}");
        small(&[&*path].into_iter().chain(digest.as_deref()).collect::<Vec<_>>())
    };
    let of = |left: &RunSpec, right: &RunSpec| {
        let told = document::differences(left, right);
        told.iter().map(|of| (of.key.clone(), of.may_change())).collect::<Vec<_>>()
    };
    let (key, digest) = ("model.path".to_owned(), "train.base_digest".to_owned());
    let (here, moved, other) = (run("a", Some("1")), run("b", Some("1")), run("b", Some("2")));
    assert_eq!(of(&here, &moved), [(key.clone(), true)]);
    assert_eq!((of(&here, &here), document::other_base(&here, &moved)), (vec![], None));
    assert_eq!(document::core_digest(&here), document::core_digest(&moved));
    assert_ne!(document::digest(&here), document::digest(&moved), "the journal tells of it");

    assert_eq!(of(&here, &other), [(key.clone(), false), (digest.clone(), false)]);
    assert_eq!(document::other_base(&here, &other), Some(document::differences(&here, &other)));
    assert_ne!(document::core_digest(&here), document::core_digest(&other));
    assert_eq!(of(&moved, &other), [(digest.clone(), false)], "it was changed in its place");

    // Without a name for the content the place is what there is.
    assert_eq!(of(&run("a", None), &run("b", None)), [(key.clone(), false)]);
    assert_eq!(of(&run("a", None), &moved), [(key, false), (digest, false)]);
    assert_ne!(document::core_digest(&run("a", None)), document::core_digest(&run("b", None)));
    let place = here.base().expect("it has one");
    assert_eq!((place.key, place.path), ("model.path", "a"));
    let mut more = here.clone();
    more.run.seed = 9;
    assert_eq!(document::other_base(&more, &other), None, "it is another run for another reason");
}

#[test]
fn the_order_of_patterns_is_part_of_what_is_learned() {
    let [one, other] = ["{self_attn.q_proj: 16, q_proj: 6}", "{q_proj: 6, self_attn.q_proj: 16}"]
        .map(|patterns| small(&["lora={}", &format!("lora.rank_pattern={patterns}")]));
    assert_ne!(document::digest(&one), document::digest(&other));
    let [difference] = &document::differences(&one, &other)[..] else { panic!("one key differs") };
    assert_eq!(difference.key, "lora.rank_pattern");
    assert!(difference.left.starts_with(r#"{"self_attn.q_proj":16,"#), "{difference}");
}
