//! `KEY=VALUE` on the command line, and the patterns that only mappings can say.

use super::*;

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
