//! What a user sees for each kind of mistake, and that everything in `configs/` loads.

mod keys;
mod overrides;
mod rules;
mod text;

use std::path::{Path, PathBuf};

use super::{ConfigError, known_keys, tree};
use crate::run_spec::{LoraTargets, Offload, Recompute, RunSpec};

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
    RunSpec::from_yaml(text, "run.yaml", &overrides)
}

fn small(overrides: &[&str]) -> RunSpec {
    read(SMALL, overrides).unwrap()
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
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs")
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
        RunSpec::load(&file, &[]).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn the_reference_names_every_key_and_states_every_default() {
    let file = configs().join("reference.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    let root = tree::parse(&text, "reference.yaml").unwrap();
    let mut written = Vec::new();
    leaves(&root, String::new(), &mut written);
    assert_eq!(written, known_keys());

    let reference = RunSpec::load(&file, &[]).unwrap();
    let mut defaults =
        read(SMALL, &["lora={}", "train.steps=1000", "train.global_batch=32", "train.micro_batch=4"])
            .unwrap();
    defaults.run = crate::run_spec::Run { seed: defaults.run.seed, ..reference.run.clone() };
    defaults.model.path.clone_from(&reference.model.path);
    defaults.data.path.clone_from(&reference.data.path);
    defaults.data.cameras.clone_from(&reference.data.cameras);
    assert_eq!(reference, defaults);
}

fn leaves(node: &tree::Node, path: String, found: &mut Vec<String>) {
    match &node.value {
        tree::Value::Map(entries) if !entries.is_empty() => {
            for (key, child) in entries {
                let path = if path.is_empty() { key.text.clone() } else { format!("{path}.{}", key.text) };
                leaves(child, path, found);
            }
        }
        _ => found.push(path),
    }
}

#[test]
fn a_missing_and_an_oversized_file_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none.yaml");
    let error = RunSpec::load(&missing, &[]).unwrap_err().to_string();
    assert!(error.contains("none.yaml: cannot read the configuration"), "{error}");
    let large = dir.path().join("large.yaml");
    std::fs::write(&large, vec![b'#'; (1 << 20) + 1]).unwrap();
    let error = RunSpec::load(&large, &[]).unwrap_err().to_string();
    assert!(error.contains("is this the right file?"), "{error}");
}
