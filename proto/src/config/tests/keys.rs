//! Keys that are unknown, misplaced or missing.

use super::*;

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
