//! What a user sees for each kind of mistake, and that everything in `configs/` loads.

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
fn an_unknown_key_is_named_with_its_place_and_a_suggestion() {
    refuses(
        &SMALL.replace("  micro_batch: 2", "  micro_batch: 2\n  recomptue: full"),
        &[],
        "run.yaml:11:3: train.recomptue: unknown key\n    help: did you mean `train.recompute`?",
    );
}

#[test]
fn a_key_of_another_section_is_suggested_there() {
    refuses(
        &format!("{SMALL}lr: 1e-4\n"),
        &[],
        "run.yaml:11:1: lr: unknown key\n    help: did you mean `optimizer.lr.lora`?",
    );
}

#[test]
fn without_a_near_miss_the_keys_of_the_section_are_listed() {
    refuses(
        &SMALL.replace("path: m", "path: m\n  xyzzy: 1"),
        &[],
        "run.yaml:4:3: model.xyzzy: unknown key\n    help: keys of `model` are `path`, `weights_dtype`, `activations_dtype`",
    );
}

#[test]
fn all_unknown_keys_are_reported_together_with_what_is_missing() {
    refuses(
        &SMALL.replace("path: m", "pth: m").replace("steps: 10", "step: 10"),
        &[],
        "run.yaml:3:3: model.pth: unknown key\n    help: did you mean `model.path`?\n\
         run.yaml:3:3: model.path: this key is required and missing",
    );
}

#[test]
fn a_wrong_type_names_field_place_and_what_was_found() {
    let with = |batch: &str| SMALL.replace("global_batch: 8", &format!("global_batch: {batch}"));
    let expected = |found: &str| {
        format!("run.yaml:9:17: train.global_batch: expected a whole number of at least 0, found {found}")
    };
    for (batch, found) in [
        ("eight", "`eight`"),
        ("8.5", "`8.5`"),
        ("-1", "`-1`"),
        ("[8]", "a list"),
        ("{a: 1}", "a map"),
        ("'8'", "`8`"),
    ] {
        refuses(&with(batch), &[], &expected(found));
    }
    refuses(
        &SMALL.replace("cameras: [front]", "cameras: front"),
        &[],
        "run.yaml:6:12: data.cameras: expected a list, found `front`",
    );
    refuses(
        &SMALL.replace("cameras: [front]", "cameras: [front, [a]]"),
        &[],
        "run.yaml:6:20: data.cameras.1: expected text, found a list",
    );
}

#[test]
fn text_that_is_not_yaml_is_refused_with_its_place() {
    let error = read("run: [a\nmodel: b\n", &[]).unwrap_err().to_string();
    assert!(error.starts_with("run.yaml:2:"), "{error}");
    assert!(error.contains("not YAML"), "{error}");
    refuses(
        &SMALL.replace("path: m", "path: m\n  path: n"),
        &[],
        "run.yaml:4:3: key `path` is given twice; first at run.yaml:3:3\n    help: remove one of them",
    );
    refuses(
        "a: 1\n---\nb: 2\n",
        &[],
        "run.yaml:2:1: a second YAML document begins here; one file describes one run",
    );
    refuses("!!map {a: 1}", &[], "run.yaml:1:7: YAML tags are not used in run files; write the bare value");
    refuses("a: &x [*x]", &[], "run.yaml:1:8: this alias refers to a value that contains it");
}

#[test]
fn nested_aliases_cannot_exhaust_memory() {
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let again = format!("*a{}, ", level - 1).repeat(10);
        bomb.push_str(&format!("a{level}: &a{level} [{}]\n", again.trim_end_matches(", ")));
    }
    let error = read(&bomb, &[]).unwrap_err().to_string();
    assert!(error.contains("more than 100000 values"), "{error}");
    let deep = format!("a: {}{}", "[".repeat(100), "]".repeat(100));
    let error = read(&deep, &[]).unwrap_err().to_string();
    assert!(error.contains("levels deep"), "{error}");
}

#[test]
fn aliases_are_expanded() {
    let spec = read(&SMALL.replace("path: m", "path: &p m").replace("path: d", "path: *p"), &[]).unwrap();
    assert_eq!(spec.data.path, "m");
}

#[test]
fn an_empty_file_and_an_empty_section_say_what_is_missing() {
    refuses("", &[], "run.yaml:1:1: run: this key is required and missing");
    refuses("run:\n", &[], "run.yaml:1:4: run.name: this key is required and missing");
}

#[test]
fn an_empty_section_of_defaults_is_the_defaults() {
    assert_eq!(read(&format!("{SMALL}launch:\n"), &[]).unwrap(), small(&[]));
}

#[test]
fn overrides_set_add_and_take_back() {
    let spec = small(&[
        "optimizer.lr.lora=1e-4",
        "train.recompute=full",
        "data.cameras=[front, wrist]",
        "data.sensor=observation.sensor",
        "data.sensor=",
        "lora={}",
        "lora.rank_pattern={'layers\\.0\\.': 4}",
        "run.name=007",
    ]);
    assert_eq!(spec.optimizer.lr.lora, 1e-4);
    assert_eq!(spec.train.recompute, Recompute::Full);
    assert_eq!(spec.data.cameras, ["front", "wrist"]);
    assert_eq!(spec.data.sensor, None);
    assert_eq!(spec.lora.unwrap().rank_pattern.iter().collect::<Vec<_>>(), [("layers\\.0\\.", &4)]);
    assert_eq!(spec.run.name, "007");
}

#[test]
fn patterns_keep_the_order_in_which_peft_asks_them() {
    let given = ["lora={}", "lora.rank_pattern={'self_attn.q_proj': 4, q_proj: 16, down_proj: 2}"];
    let written = [("self_attn.q_proj", &4), ("q_proj", &16), ("down_proj", &2)];
    let spec = small(&given);
    assert_eq!(spec.lora.as_ref().unwrap().rank_pattern.iter().collect::<Vec<_>>(), written);
    let travelled = RunSpec::try_from(&crate::v1::RunSpecDocument::from(&spec)).unwrap();
    assert_eq!(travelled.lora.unwrap().rank_pattern.iter().collect::<Vec<_>>(), written);
}

#[test]
fn patterns_are_those_of_python() {
    let spec = small(&["lora={}", r"lora.targets='^(?!.*visual).*\.(?P<kind>q|v)_proj$'"]);
    assert!(matches!(spec.lora.unwrap().targets, LoraTargets::Regex(text) if text.starts_with("^(?!")));
    let refused = RunSpec::from_yaml(SMALL, "run.yaml", &["lora={}".into(), "lora.targets='(?<=a'".into()]);
    let told = refused.unwrap_err().to_string();
    assert!(told.contains("lora.targets: `(?<=a` is not a regular expression"), "{told}");
}

#[test]
fn an_override_reaches_into_a_scalar_and_the_later_one_wins() {
    assert_eq!(
        small(&["train.recompute=full", "train.recompute.every=2"]).train.recompute,
        Recompute::Every(2)
    );
    assert_eq!(
        small(&["train.recompute={every: 2}", "train.recompute=none"]).train.recompute,
        Recompute::None
    );
}

#[test]
fn a_wrong_override_is_named() {
    refuses(
        SMALL,
        &["train.steps=ten"],
        "override `train.steps=ten`: train.steps: expected a whole number of at least 0, found `ten`",
    );
    refuses(
        SMALL,
        &["optimizer.lr.lroa=1"],
        "override `optimizer.lr.lroa=1`: optimizer.lr.lroa: unknown key\n    help: did you mean `optimizer.lr.lora`?",
    );
    refuses(
        SMALL,
        &["data.cameras.0=wrist"],
        "override `data.cameras.0=wrist`: data.cameras: is a list and cannot be changed in part\n    \
         help: replace it as a whole: `data.cameras=[first, second]`",
    );
    refuses(
        SMALL,
        &["train.steps"],
        "override `train.steps`: there is no `=` in it\n    \
         help: write `section.key=value`, for instance `train.steps=100`",
    );
    refuses(
        SMALL,
        &["train..steps=1"],
        "override `train..steps=1`: a part of the key is empty\n    \
         help: write `section.key=value`, for instance `train.steps=100`",
    );
    refuses(
        SMALL,
        &["train.micro_batch=9"],
        "override `train.micro_batch=9`: train.micro_batch: 9 is larger than the global batch of 8\n    \
         help: lower `train.micro_batch` or raise `train.global_batch`",
    );
}

#[test]
fn names_of_choices_are_checked_and_suggested() {
    refuses(
        SMALL,
        &["train.recompute=ful"],
        "override `train.recompute=ful`: train.recompute: `ful` is not one of `none`, `selective`, `full`, `every`\n    \
         help: did you mean `full`?",
    );
    refuses(
        SMALL,
        &["train.recompute=every"],
        "override `train.recompute=every`: train.recompute: `every` needs a value; write `{every: 2}`",
    );
    refuses(
        SMALL,
        &["train.recompute={full: 2}"],
        "override `train.recompute={full: 2}`: train.recompute: `full` takes no value; write `full` alone",
    );
    refuses(
        SMALL,
        &["lora.targets={a: b}"],
        "override `lora.targets={a: b}`: lora.targets: \
         expected a list of module names, or one regular expression as text",
    );
}

#[test]
fn targets_are_a_list_or_an_expression() {
    let targets = |text: &str| small(&[&format!("lora.targets={text}")]).lora.unwrap().targets;
    assert_eq!(targets("[q_proj, v_proj]"), LoraTargets::Suffixes(vec!["q_proj".into(), "v_proj".into()]));
    assert_eq!(targets("all-linear"), LoraTargets::Regex("all-linear".into()));
}

#[test]
fn contradictions_are_reported_all_at_once_with_their_places() {
    let text =
        SMALL.replace("steps: 10", "steps: 10\n  epochs: 2").replace("micro_batch: 2", "micro_batch: 9");
    refuses(
        &text,
        &["expert.heads=5", "data.cameras=[a, a]", "optimizer.lr.lora=.nan"],
        "override `expert.heads=5`: expert.heads: 5 heads do not divide the width 384\n    \
         help: choose `expert.width` as a multiple of `expert.heads`\n\
         override `data.cameras=[a, a]`: data.cameras: names a camera twice\n    help: name each once\n\
         run.yaml:8:10: train.steps: is given together with `train.epochs`\n    \
         help: remove one of them (on the command line: `train.epochs=`)\n\
         run.yaml:11:16: train.micro_batch: 9 is larger than the global batch of 8\n    \
         help: lower `train.micro_batch` or raise `train.global_batch`\n\
         override `optimizer.lr.lora=.nan`: optimizer.lr.lora: must be a finite number of at least 0, is NaN\n    \
         help: correct it",
    );
}

#[test]
fn every_rule_has_a_case() {
    for (given, field) in [
        ("run.name=a/b", "run.name"),
        ("run.name=''", "run.name"),
        ("run.output_dir=''", "run.output_dir"),
        ("model.path=''", "model.path"),
        ("lora.rank=0", "lora.rank"),
        ("lora.alpha=0", "lora.alpha"),
        ("lora.targets=[]", "lora.targets"),
        ("lora.targets='(a'", "lora.targets"),
        ("lora.rank_pattern={a: 0}", "lora.rank_pattern"),
        ("lora.alpha_pattern={a: -1}", "lora.alpha_pattern"),
        ("lora.init_from=''", "lora.init_from"),
        ("optimizer.lr.expert=0", "optimizer.lr.expert"),
        ("expert.layers=0", "expert.layers"),
        ("expert.heads=0", "expert.heads"),
        ("expert.repeated_noise=0", "expert.repeated_noise"),
        ("expert.sampling_steps=0", "expert.sampling_steps"),
        ("sensor.tokens=0", "sensor.tokens"),
        ("data.path=''", "data.path"),
        ("data.cameras=[]", "data.cameras"),
        ("data.sensor=''", "data.sensor"),
        ("data.horizon=0", "data.horizon"),
        ("data.holdout_episodes=[1, 1]", "data.holdout_episodes"),
        ("data.prompt=''", "data.prompt"),
        ("data.threads=0", "data.threads"),
        ("data.min_pixels=0", "data.min_pixels"),
        ("train.steps=", "train"),
        ("train.steps=0", "train.steps"),
        ("train.global_batch=0", "train.global_batch"),
        ("train.micro_batch=0", "train.micro_batch"),
        ("train.recompute={every: 0}", "train.recompute.every"),
        ("train.keep_checkpoints=0", "train.keep_checkpoints"),
        ("train.log_every=0", "train.log_every"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
        ("optimizer.eps=0", "optimizer.eps"),
        ("optimizer.clip_norm=-1", "optimizer.clip_norm"),
        ("optimizer.weight_decay=.inf", "optimizer.weight_decay"),
        ("optimizer.min_lr_ratio=2", "optimizer.min_lr_ratio"),
        ("memory.capacity=0", "memory.capacity"),
        ("memory.offload=disk", "memory.offload"),
        ("launch.nproc_per_node=0", "launch.nproc_per_node"),
        ("launch.threads_per_worker=0", "launch.threads_per_worker"),
        ("launch.listen=nowhere", "launch.listen"),
        ("launch={device: cpu, collectives: nccl}", "launch.collectives"),
    ] {
        let error = read(SMALL, &[given]).expect_err(given);
        assert!(error.problems().iter().any(|p| p.path == field), "{given}: {error}");
    }
}

#[test]
fn layers_are_streamed_only_where_the_tape_does_not_keep_them() {
    let layers = "memory.offload=layers";
    for kept in ["train.recompute=none", "train.recompute={every: 2}"] {
        let error = read(SMALL, &["lora={}", kept, layers]).expect_err(kept);
        let [problem] = error.problems() else { panic!("{error}") };
        assert_eq!(problem.path, "memory.offload");
        assert!(error.to_string().contains("train.recompute: full"), "{error}");
        // Without adapters nothing of the model is on a tape.
        assert_eq!(small(&[kept, layers]).memory.offload, Offload::Layers);
    }
    for again in ["train.recompute=full", "train.recompute=selective", "train.recompute={every: 1}"] {
        assert_eq!(small(&["lora={}", again, layers]).memory.offload, Offload::Layers);
    }
}

#[test]
fn asking_for_what_every_run_does_is_no_error_and_where_weights_lie_is_not_what_is_learned() {
    assert_eq!(small(&["memory.offload=optimizer"]).memory.offload, Offload::Optimizer);
    let digest = |given: &[&str]| crate::document::digest(&small(given));
    assert_eq!(digest(&[]), digest(&["memory.offload=layers"]));
}

#[test]
fn a_world_needs_a_sample_for_every_worker() {
    let spec = small(&[]);
    spec.check_world(8).unwrap();
    let error = spec.check_world(9).unwrap_err().to_string();
    assert!(error.starts_with("train.global_batch: 8 samples cannot be shared by 9 workers"), "{error}");
    spec.check_world(0).unwrap_err();
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
