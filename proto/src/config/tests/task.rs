//! Keys of tasks: which there are, whose they are, and that they travel.

use serde_json::Value;

use super::*;
use crate::{
    config::{TaskSchema, engine_keys},
    document, identity,
    toy::Toy,
    v1::RunSpecDocument,
};

#[test]
fn an_unknown_task_is_told_with_those_there_are() {
    refuses(
        SMALL,
        &["task.type=toyy"],
        "override `task.type=toyy`: task.type: `toyy` is not one of `toy`, `other`\n    help: did you mean `toy`?",
    );
    let unnamed = SMALL.replace("task: {type: toy}", "faults: {mirror: true}");
    refuses(&unnamed, &[], "run.yaml:1:1: task.type: `vla_flow` is not one of `toy`, `other`");
    refuses(
        SMALL,
        &["task=toy"],
        "override `task=toy`: task: expected a map of keys, found `toy`\n    \
         help: its keys are `type`; as an override: `task.type=toy`",
    );
}

#[test]
fn a_key_of_another_task_says_whose_it_is() {
    let expected = "is a key of the task `other`, but the task of this file is `toy`\n    help: remove it, or set `task.type`";
    refuses(&format!("{SMALL}tail: {{length: 3}}\n"), &[], &format!("run.yaml:11:1: tail: {expected}"));
    refuses(SMALL, &["tail.length=3"], &format!("override `tail.length=3`: tail: {expected}"));
}

#[test]
fn defaults_of_the_task_are_written_into_the_document() {
    let spec = small(&[]);
    let json = serde_json::to_value(&spec).unwrap();
    for (pointer, value) in [
        ("/task/type", "toy".into()),
        ("/head/bias", false.into()),
        ("/head/width", 8.into()),
        ("/data/path", "d".into()),
        ("/data/prefetch", 2.into()),
        ("/data/weight", Value::Null),
        ("/optimizer/lr/head", 1e-2.into()),
        ("/optimizer/eps", 1e-8.into()),
        ("/eval", serde_json::json!({"samples": 64, "shown": 0})),
    ] {
        assert_eq!(json.pointer(pointer), Some(&value), "{pointer}");
    }
    assert_eq!(spec.learning_rates().into_iter().collect::<Vec<_>>(), [("head".to_owned(), 1e-2)]);
}

#[test]
fn the_engine_s_fields_are_written_as_they_are_now_and_the_task_s_as_they_were_set() {
    let mut spec = small(&["train.recompute={every: 2}"]);
    spec.train.recompute = Recompute::Full;
    let mut toy = settings(&spec);
    toy.head.width = 16;
    spec.set_settings(&toy);
    assert_eq!(spec, small(&["train.recompute=full", "head.width=16"]));
    let json = serde_json::to_value(&spec).unwrap();
    assert_eq!((&json["train"]["recompute"], &json["head"]["width"]), (&"full".into(), &16.into()));
}

#[test]
fn a_specification_is_the_same_after_it_has_travelled() {
    for given in [&[][..], &["train.recompute={every: 2}", "cache.tap={row: 3}", "head.frozen={b: 1, a: 2}"]]
    {
        let spec = small(given);
        let travelled = RunSpec::try_from(&RunSpecDocument::from(&spec)).unwrap();
        assert_eq!(travelled, spec);
        assert_eq!(settings(&travelled), settings(&spec));
        TASKS.check(&travelled).unwrap();
    }
    assert_eq!(small(&["cache.tap={row: 3}"]).cache.tap.to_string(), "row 3");
}

#[test]
fn a_specification_that_a_program_wrote_is_a_run_file() {
    let spec = small(&["eval.shown=9"]);
    assert_eq!(read(&serde_json::to_string_pretty(&spec).unwrap(), &[]).unwrap(), spec);
}

#[test]
fn what_travelled_is_checked_by_the_task_and_refused_with_a_line() {
    let told = |change: fn(&mut Value)| {
        let mut json = serde_json::to_value(small(&[])).unwrap();
        change(&mut json);
        let read = serde_json::from_value::<RunSpec>(json);
        read.map_err(|error| error.to_string())
            .and_then(|spec| TASKS.check(&spec).map_err(|e| e.to_string()))
            .unwrap_err()
    };
    assert!(told(|json| json["head"]["width"] = 0.into()).starts_with("head.width: must be at least 1"));
    assert!(
        told(|json| json["head"]["width"] = "wide".into())
            .contains("does not fit the task `toy`: invalid type")
    );
    assert!(told(|json| drop(json.as_object_mut().unwrap().remove("head"))).contains("missing field `head`"));
    assert!(
        told(|json| json["task"]["type"] = "another".into())
            .starts_with("task.type: `another` is not one of")
    );
    assert!(
        told(|json| json["optimizer"]["lr"]["head"] = Value::Null).contains("optimizer.lr.head: must be")
    );
    assert!(told(|json| json["train"]["steps"] = "ten".into()).contains("invalid type"));
}

#[test]
fn settings_of_another_task_are_refused() {
    let error = small(&[]).settings::<crate::toy::OtherTask>().unwrap_err().to_string();
    assert_eq!(error, "the specification does not fit the task `other`: its task.type is `toy`");
}

#[test]
fn a_task_s_keys_say_whether_they_belong_to_the_identity_and_that_travels() {
    let digest = |given: &[&str]| document::digest(&small(given));
    assert_eq!(digest(&[]), digest(&["eval.shown=9"]));
    for other in
        ["head.width=9", "head.bias=true", "data.weight=w", "optimizer.lr.head=1", "head.frozen={a: 1}"]
    {
        assert_ne!(digest(&[]), digest(&[other]), "{other}");
    }
    assert_ne!(digest(&["head.frozen={a: 1, b: 2}"]), digest(&["head.frozen={b: 2, a: 1}"]));

    // One that does not know the task tells runs apart all the same.
    let document = RunSpecDocument::from(&small(&["eval.shown=9"]));
    let travelled = RunSpec::try_from(&document).unwrap();
    assert_eq!(document::digest(&travelled), digest(&[]));
    assert_eq!(document::differences(&travelled, &small(&[])), []);
}

#[test]
fn a_key_that_came_later_is_no_difference_where_it_does_what_was_done_before() {
    let new = small(&[]);
    let mut before = serde_json::to_value(&new).unwrap();
    before["head"].as_object_mut().unwrap().remove("bias");
    let before: RunSpec = serde_json::from_value(before).unwrap();
    assert_eq!(document::digest(&before), document::digest(&new));
    assert_eq!(document::differences(&before, &new), []);
    let told: Vec<_> =
        document::differences(&before, &small(&["head.bias=true"])).iter().map(ToString::to_string).collect();
    assert_eq!(told, ["head.bias (false there, true here)"]);
}

#[test]
fn of_a_run_of_another_task_only_the_task_is_told() {
    let other = read(
        "run: {name: a, output_dir: runs/a}\ntask: {type: other}\ntail: {length: 1}\ndata: {path: e}\n\
         train: {steps: 1, global_batch: 1, micro_batch: 1}\n",
        &[],
    );
    let told: Vec<_> =
        document::differences(&other.unwrap(), &small(&[])).iter().map(ToString::to_string).collect();
    assert_eq!(told, ["task.type (\"other\" there, \"toy\" here)"]);
}

#[test]
fn every_key_of_the_engine_says_whether_it_decides_what_is_learned() {
    assert_eq!(identity::misfits(&engine_keys(), identity::ENGINE), Vec::<String>::new());
    assert_eq!(TaskSchema::of::<Toy>().misfits(), Vec::<String>::new());
}

#[test]
fn a_key_without_a_class_and_a_class_without_a_key_are_found() {
    let keys = ["a.one", "a.two"].map(str::to_owned);
    let classes = &[("a.one", identity::Class::Learned), ("a.three", identity::Class::Outside("speed"))];
    assert_eq!(
        identity::misfits(&keys, classes),
        ["a.two: say whether it decides what is learned", "a.three: there is no such key"]
    );
}
