//! What a run starts from, file by file.

use std::path::Path;

use burn::backend::Flex;
use coxswain_nn::{
    files::write_tensors,
    params::{Group, Init, TrainableLayout},
};
use coxswain_proto::run_spec::{InitFrom, RunSpec};
use coxswain_tasks::vla_flow::VlaFlow;

use crate::train::init_from::{InitError, bring, check_brought, check_start, content_digest, take};

const EXPERT: Group = Group("expert");
const SENSOR: Group = Group("sensor");

fn layout(tensors: &[(&str, &[usize], Group)]) -> TrainableLayout {
    let mut layout = TrainableLayout::default();
    for (name, shape, group) in tensors {
        layout.add((*name).into(), shape, *group, true, Init::Zeros);
    }
    layout
}

fn here() -> TrainableLayout {
    layout(&[
        ("adapter.a", &[2], Group::LORA),
        ("sensor.in", &[3], SENSOR),
        ("expert.in", &[2, 3], EXPERT),
        ("expert.out", &[2], EXPERT),
    ])
}

fn loaded(overrides: &[String]) -> RunSpec {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/quickstart.yaml");
    RunSpec::load(&file, overrides, coxswain_tasks::TASKS).unwrap()
}

fn spec(init_from: InitFrom) -> RunSpec {
    let mut spec = loaded(&[]);
    spec.train.init_from = Some(init_from);
    spec
}

/// A file with these tensors, whose elements count up from 1.
fn file(dir: &Path, tensors: &[(&str, &[usize], Group)]) -> String {
    let there = layout(tensors);
    let values: Vec<f32> = (0..there.len()).map(|at| 1.0 + at as f32).collect();
    let path = dir.join("weights.safetensors");
    write_tensors(&path, &there, &values, |_| true).unwrap();
    path.display().to_string()
}

fn started(init_from: InitFrom) -> Result<(Vec<f32>, Vec<String>), InitError> {
    let (layout, mut values) = (here(), vec![0.0; here().len()]);
    take(&VlaFlow::<Flex>::default(), &spec(init_from), &layout, &mut values).map(|lines| (values, lines))
}

#[test]
fn tensors_are_taken_by_name_and_what_keeps_its_initial_value_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), &[("expert.out", &[2], EXPERT), ("sensor.in", &[3], SENSOR)]);
    let (values, lines) = started(InitFrom::All(path.clone())).unwrap();
    assert_eq!(values, [0.0, 0.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0]);
    let expected = [
        "lora: all 1 tensors start from their initial values".to_owned(),
        format!("sensor: all 1 tensors start from {path}"),
        format!("expert: 1 tensors start from {path}, 1 from their initial values (the first: expert.in)"),
    ];
    assert_eq!(lines, expected);

    let (values, _) = started(InitFrom::Groups([("sensor".into(), path)].into())).unwrap();
    assert_eq!(values.iter().sum::<f32>(), 12.0, "the expert is not asked for: {values:?}");
}

#[test]
fn what_does_not_fit_is_named_with_both_shapes_and_nothing_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(
        dir.path(),
        &[("expert.in", &[3, 2], EXPERT), ("expert.more", &[1], EXPERT), ("sensor.in", &[3], SENSOR)],
    );
    let error = started(InitFrom::All(path.clone())).unwrap_err().to_string();
    assert!(error.contains("\n  expert.in: [3, 2] there, [2, 3] here"), "{error}");
    assert!(error.contains("\n  expert.more: [1] there, no such tensor here"), "{error}");
    assert!(!error.contains("sensor.in"), "{error}");
    // The group that fits can be had alone; the one that does not fit cannot.
    started(InitFrom::Groups([("sensor".into(), path.clone())].into())).unwrap();
    let error = started(InitFrom::Groups([("expert".into(), path.clone())].into())).unwrap_err();
    assert!(error.to_string().contains("expert.more"), "{error}");
    let error = started(InitFrom::Groups([("lora".into(), path)].into())).unwrap_err().to_string();
    assert!(error.contains("no tensor of the group `lora`"), "{error}");
}

#[test]
fn tensors_of_other_sizes_are_refused_by_headers_and_names_without_a_place_are_not_judged() {
    let dir = tempfile::tempdir().unwrap();
    let check = |init_from| check_start(&VlaFlow::<Flex>::default(), &spec(init_from), &here());
    let path = file(
        dir.path(),
        &[("expert.in", &[3, 3], EXPERT), ("expert.more", &[1], EXPERT), ("sensor.in", &[3], SENSOR)],
    );
    let error = check(InitFrom::All(path.clone())).unwrap_err().to_string();
    assert!(error.contains("\n  expert.in: [3, 3] there, [2, 3] here"), "{error}");
    assert!(!error.contains("expert.more") && !error.contains("sensor.in"), "{error}");
    check(InitFrom::Groups([("sensor".into(), path)].into())).unwrap();
}

#[test]
fn what_does_not_train_is_brought_whole_or_refused_tensor_by_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let mut here = layout(&[("sensor.in", &[3], SENSOR)]);
    here.add_constant("expert.in".into(), &[2, 3], EXPERT);
    here.add_constant("expert.out".into(), &[2], EXPERT);
    let brought = |path: &str, mut values: Vec<f32>| {
        bring(&VlaFlow::<Flex>::default(), &spec(InitFrom::All(path.to_owned())), &here, &mut values)
            .map(|()| values)
    };
    let path = file(
        dir.path(),
        &[("expert.in", &[2, 3], EXPERT), ("expert.out", &[2], EXPERT), ("sensor.in", &[3], SENSOR)],
    );
    // What trains is left as it is: a checkpoint's values, or drawn ones.
    let expected = [0.5, 0.5, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    assert_eq!(brought(&path, vec![0.5; 3]).unwrap(), expected);
    let mut values = vec![0.0; here.whole_len()];
    let lines =
        take(&VlaFlow::<Flex>::default(), &spec(InitFrom::All(path.clone())), &here, &mut values).unwrap();
    assert_eq!(values[..3], [9.0, 10.0, 11.0]);
    assert_eq!(lines[1], format!("frozen weights come from {path}"));

    let path = file(dir.path(), &[("expert.in", &[2, 3], EXPERT)]);
    let error = brought(&path, vec![0.5; 3]).unwrap_err().to_string();
    assert!(error.contains("\n  expert.out: [2]") && !error.contains("expert.in"), "{error}");
}

#[test]
fn a_group_that_stays_as_it_is_brought_is_looked_for_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let sensor = file(dir.path(), &[("sensor.in", &[3], SENSOR)]);
    let whole = dir.path().join("expert");
    std::fs::create_dir(&whole).unwrap();
    let expert = file(&whole, &[("expert.out", &[2], EXPERT), ("sensor.in", &[3], SENSOR)]);
    let groups = |paths: &[(&str, &str)]| {
        InitFrom::Groups(paths.iter().map(|(group, path)| ((*group).into(), (*path).into())).collect())
    };
    for stays in ["expert.train=false", "optimizer.lr.expert=0"] {
        let checked = |init_from: InitFrom| {
            let brought = format!("train.init_from={}", serde_json::to_string(&init_from).unwrap());
            check_brought(&VlaFlow::<Flex>::default(), &loaded(&[brought, stays.into()]))
        };
        checked(InitFrom::All(expert.clone())).unwrap();
        checked(groups(&[("expert", &expert), ("sensor", &sensor)])).unwrap();
        for without in [InitFrom::All(sensor.clone()), groups(&[("expert", &sensor)])] {
            let error = checked(without).unwrap_err().to_string();
            assert!(error.contains(&format!("expert: {sensor} has no tensor of this group")), "{error}");
        }
    }
    // One that trains may begin anew.
    check_brought(&VlaFlow::<Flex>::default(), &spec(InitFrom::All(sensor))).unwrap();
}

#[test]
fn of_the_pretrained_model_nothing_is_dropped_that_belongs_to_the_group() {
    let dir = tempfile::tempdir().unwrap();
    let (merger, layer) = ("model.visual.merger.ln_q.weight", "model.language_model.layers.4.q.weight");
    let adapter = "base_model.model.model.language_model.layers.4.k.lora_A.weight";
    let path = file(
        dir.path(),
        &[
            (merger, &[2], Group::BASE),
            (layer, &[3], Group::BASE),
            (adapter, &[2], Group::LORA),
            ("expert.out", &[2], EXPERT),
        ],
    );
    let here = layout(&[(merger, &[2], Group::BASE), ("expert.out", &[2], EXPERT)]);
    let start = |group: &str| {
        let mut values = vec![0.0; here.len()];
        let init_from = InitFrom::Groups([(group.to_owned(), path.clone())].into());
        take(&VlaFlow::<Flex>::default(), &spec(init_from), &here, &mut values).map(|_| values)
    };
    let error = start("base").unwrap_err().to_string();
    assert!(error.contains(layer) && error.contains("model.train") && !error.contains(adapter), "{error}");
    let error = start("lora").unwrap_err().to_string();
    assert!(error.contains(adapter) && error.contains("lora.targets") && !error.contains(layer), "{error}");
    assert_eq!(start("expert").unwrap()[2..], [8.0, 9.0]);
}

#[test]
fn a_place_without_weights_and_a_damaged_file_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().display().to_string();
    let error = started(InitFrom::All(empty.clone())).unwrap_err();
    assert!(matches!(error, InitError::NothingThere { .. }) && error.to_string().contains(&empty), "{error}");
    let path = dir.path().join("weights.safetensors");
    std::fs::write(&path, b"not tensors").unwrap();
    let error = started(InitFrom::All(path.display().to_string())).unwrap_err().to_string();
    assert!(error.contains("truncated or garbled") && error.contains("weights.safetensors"), "{error}");
}

#[test]
fn the_digest_is_that_of_the_content_and_workers_hold_what_they_read_against_it() {
    let dir = tempfile::tempdir().unwrap();
    let digest = |spec: &RunSpec| content_digest(&VlaFlow::<Flex>::default(), spec).unwrap().unwrap();
    let path = file(dir.path(), &[("sensor.in", &[3], SENSOR)]);
    let mut spec = spec(InitFrom::All(path.clone()));
    let first = digest(&spec);
    let moved = dir.path().join("moved.safetensors");
    std::fs::copy(&path, &moved).unwrap();
    assert_eq!(digest(&self::spec(InitFrom::All(moved.display().to_string()))), first);

    spec.train.init_digest = Some(first.clone());
    let mut values = vec![0.0; here().len()];
    take(&VlaFlow::<Flex>::default(), &spec, &here(), &mut values).unwrap();
    file(dir.path(), &[("expert.out", &[2], EXPERT)]);
    assert_ne!(digest(&spec), first);
    let error = take(&VlaFlow::<Flex>::default(), &spec, &here(), &mut values).unwrap_err();
    assert!(matches!(&error, InitError::Changed { launched, .. } if *launched == first), "{error}");
}
