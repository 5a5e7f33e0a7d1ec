//! `data.sets`: what is refused before any file is opened, and what a run on one of them is.

use super::*;

/// A run on two data sets.
const SETS: &str = "\
run: {name: a, output_dir: runs/a}
model:
  path: m
data:
  path: root
  cameras: [front, wrist]
  prompt: 'do {task}'
  sets:
    - path: lab
      cameras: {front: cam_high, wrist: cam_low}
    - path: more/field
      weight: 2.5
      cameras: {front: top}
      state: joints
train:
  steps: 10
  global_batch: 8
  micro_batch: 2
";

#[test]
fn a_set_alone_is_the_run_with_what_the_set_says_instead() {
    let mut spec = read(SETS, &["serve.cameras=[a, b]"]).unwrap();
    spec.run.seed = 3;
    let vla: VlaSettings = spec.settings().unwrap();
    let [lab, field] = &vla.data.sets[..] else { panic!("two sets") };
    assert_eq!([lab.name(), field.name()], ["lab", "field"]);
    let own = vla.spec_of_set(&spec, field);
    assert_eq!((own.data.path.as_str(), own.run.seed), ("root/more/field", 3));
    let own: VlaSettings = own.settings().unwrap();
    assert_eq!((own.data.cameras, own.serve.cameras), (vec!["top".to_owned()], vec!["a".to_owned()]));
    assert_eq!((own.data.state.label(), own.data.action.label()), ("joints".to_owned(), "action".to_owned()));
    assert_eq!((own.data.prompt.as_str(), own.data.sets), ("do {task}", Vec::new()));
    assert_eq!(vla.of_set(lab).data.cameras, ["cam_high", "cam_low"]);
}

#[test]
fn sets_and_weights_are_part_of_what_is_learned_and_one_data_set_is_the_run_it_was() {
    let mixed = read(SETS, &[]).unwrap();
    let weighed = read(SETS, &["data.sets=[{path: lab, weight: 2}]"]).unwrap();
    let shared = read(SETS, &["data.sets=[{path: lab, share: 2}]"]).unwrap();
    assert_ne!(document::digest(&shared), document::digest(&weighed));
    assert_ne!(document::digest(&mixed), document::digest(&weighed));
    let single = serde_json::to_value(small(&[])).unwrap();
    assert!(single["data"].get("sets").is_none());
}

#[test]
fn what_no_mixture_can_be_is_refused_with_its_place() {
    let one = |path: &str| format!("data.sets=[{{path: lab, {path}}}]");
    let two = |more: &str| format!("data.sets=[{{path: lab}}, {{{more}}}]");
    let long = "a".repeat(40);
    let alike = format!("data.sets=[{{path: {long}-1}}, {{path: {long}-2}}]");
    for (given, field, says) in [
        (one("weight: 0"), "data.sets.0.weight", "no sample could be drawn"),
        (one("weight: -1"), "data.sets.0.weight", "is -1"),
        (one("weight: .inf"), "data.sets.0.weight", "a finite number above 0"),
        (one("share: 0"), "data.sets.0.share", "no sample could be drawn"),
        (one("share: 1, weight: 2"), "data.sets.0.share", "not together with `weight`"),
        (two("path: b, share: 2"), "data.sets.0.share", "for all sets or for none"),
        (one("name: a/b"), "data.sets.0.name", "not a usable name"),
        (one("cameras: {front: a}"), "data.cameras", "names `wrist`, which no data set has"),
        (one("cameras: {frnt: a}"), "data.sets.0.cameras", "maps `frnt`, which is not one of `data.cameras`"),
        (two("path: ''"), "data.sets.1.path", "is empty"),
        (two("path: lab, name: b"), "data.sets.1.path", "a second time"),
        (two("path: other/lab"), "data.sets.1.name", "another data set's name"),
        ("data.episodes=[1]".into(), "data.episodes", "which of `data.sets`"),
        ("data.holdout_episodes=[1]".into(), "data.holdout_episodes", "which of `data.sets`"),
        ("serve.set=attic".into(), "serve.set", "not one of `data.sets`"),
        (alike, "data.sets.1.name", "in the first 40 characters"),
    ] {
        let error = read(SETS, &[&given]).expect_err(&given);
        let found = error.problems().iter().find(|problem| problem.path == field);
        assert!(found.is_some() && error.to_string().contains(says), "{given}: {error}");
    }
    let error = read(SETS, &["data.sets=[{path: lab, wieght: 2}]"]).expect_err("misspelled");
    assert!(error.to_string().contains("data.sets.0.wieght: unknown key"), "{error}");
    let error = read(SMALL, &["serve.set=lab"]).expect_err("there are no sets");
    assert!(error.to_string().contains("remove it"), "{error}");
}
